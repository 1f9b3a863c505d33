"""Evaluation on held-out text: the full model at every stage, and random parts of any size on request."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from raptr.data.source import EvalData
from raptr.methods import Method
from raptr.models.model import Model
from raptr.objectives.contract import Objective
from raptr.subnetworks import Subnetwork

LARGEST = 700.0  # a loss whose exponential is still a number
DRAWS = 4  # random parts of one size that are averaged


@dataclass(frozen=True)
class Evaluation:
    """The mean loss per target token: over all held-out windows, over each domain's, and of these by mixture weight.

    `loss` and `mixture` differ where a domain has less held-out text than its share of the mixture. `likelihood` holds
    what only follows from the likelihood of text: `perplexity`, exp(loss), and `bits_per_byte`, which compares models
    with different tokenizers. Bits per byte take the bytes per token of each domain's whole held-out text; the end
    tokens of documents cost bits but have no bytes. Folders prepared before bytes were counted give none.
    """

    loss: float
    domains: dict[str, float]
    mixture: float
    likelihood: dict[str, float]


def evaluate(
    model: Model,
    objective: Objective,
    data: EvalData,
    subnetwork: Subnetwork,
    *,
    batch: int,
    stream: torch.dtype | None = None,
) -> Evaluation:
    """Judge the subnetwork on the fixed held-out set, which is the same for every run.

    Nothing compiled runs: the last batch of each domain has a shape of its own.
    """
    device = next(model.parameters()).device
    training, inputs = model.training, model.inputs(subnetwork, stream)
    model.eval()
    sums, counts = {}, {}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for domain in data.domains:
            total, count = torch.zeros((), dtype=torch.float64, device=device), 0
            for windows in data.windows(domain, batch):
                piece = objective.evaluation(windows)
                weight = len(piece.labels_BM)  # sequences of equally many targets, or targets where they are flat
                total += model(piece.to(device), inputs).double() * weight
                count += weight
            sums[domain], counts[domain] = total, count
    model.train(training)
    losses = {domain: float(total) / counts[domain] for domain, total in sums.items()}
    mean = sum(losses[domain] * counts[domain] for domain in losses) / sum(counts.values())
    mixture = sum(losses[domain] * data.shares[domain] for domain in losses)
    likelihood = _likelihood(mean, counts, data.bytes_per_token) if objective.attention == "causal" else {}
    return Evaluation(mean, losses, mixture, likelihood)


def _likelihood(loss: float, counts: Mapping[str, int], bytes_per_token: Mapping[str, float]) -> dict[str, float]:
    """The measures of text, from the mean loss and the number of windows of each domain."""
    found = {"perplexity": math.exp(min(loss, LARGEST))}
    if counts.keys() <= bytes_per_token.keys():
        mean = sum(counts[domain] * bytes_per_token[domain] for domain in counts) / sum(counts.values())
        found["bits_per_byte"] = loss / math.log(2) / mean
    return found


def evaluate_size(judge: Callable[[Subnetwork], Evaluation], method: Method, size: int, step: int) -> float:
    """The mean loss after `step` steps of a few fixed random parts of `size` layers, as the method would run them."""
    losses = [judge(method.drawn(size, draw, step)).loss for draw in range(DRAWS)]
    return sum(losses) / len(losses)
