"""Evaluation on held-out text: the full model at every stage, and random parts of any size on request."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from raptr.data.source import EvalData
from raptr.methods import Method
from raptr.models.model import Model
from raptr.objectives.contract import Objective
from raptr.subnetworks import Subnetwork

DRAWS = 4  # random parts of one size that are averaged


@dataclass(frozen=True)
class Evaluation:
    """The mean loss per target token: over all held-out windows, over each domain's, and of these by mixture weight.

    `loss` and `mixture` differ where a domain has less held-out text than its share of the mixture.
    """

    loss: float
    domains: dict[str, float]
    mixture: float


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
                total += model(piece.to(device), inputs).double() * len(piece.tokens_BS)
                count += len(piece.tokens_BS)
            sums[domain], counts[domain] = total, count
    model.train(training)
    losses = {domain: float(total) / counts[domain] for domain, total in sums.items()}
    mean = sum(losses[domain] * counts[domain] for domain in losses) / sum(counts.values())
    return Evaluation(mean, losses, sum(losses[domain] * data.shares[domain] for domain in losses))


def evaluate_size(judge: Callable[[Subnetwork], Evaluation], method: Method, size: int, step: int) -> float:
    """The mean loss after `step` steps of a few fixed random parts of `size` layers, as the method would run them."""
    losses = [judge(method.part(size, draw, step)).loss for draw in range(DRAWS)]
    return sum(losses) / len(losses)
