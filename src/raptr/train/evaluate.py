"""Evaluation on held-out text: the full model at every stage, and random parts of any size on request."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raptr.data.batch import Batch
from raptr.data.source import EvalData
from raptr.distributed.processes import ALONE, Processes
from raptr.distributed.sharding import reshard
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
    tokens of documents cost bits but have no bytes. Folders prepared before bytes were counted give none. `denoisers`
    has the mean over the targets of each denoiser, where the objective is a mixture of them.
    """

    loss: float
    domains: dict[str, float]
    mixture: float
    likelihood: dict[str, float]
    denoisers: dict[str, float]

    def record(self) -> dict[str, object]:
        """What is recorded of it: domains and denoisers where there are several."""
        found: dict[str, object] = {"loss": self.loss, **self.likelihood}
        if len(self.domains) > 1:
            found |= {"loss_mixture": self.mixture, "domains": self.domains}
        return found | ({"denoisers": self.denoisers} if self.denoisers else {})


def evaluate(
    model: Model,
    objective: Objective,
    data: EvalData,
    subnetwork: Subnetwork,
    *,
    batch: int,
    stream: torch.dtype | None = None,
    processes: Processes = ALONE,
) -> Evaluation:
    """Judge the subnetwork on the fixed held-out set, which is the same for every run; each process takes a share.

    Nothing compiled runs: the last batch of each domain has a shape of its own.
    """
    device = next(model.parameters()).device
    training, inputs = model.training, model.inputs(subnetwork, stream)
    model.eval()
    parts: list[_Part] = []
    losses: list[Tensor] = []
    batches = ((domain, windows) for domain in data.domains for windows in data.windows(domain, batch))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for (domain, windows), counts in processes.share(batches):
            whole = objective.evaluation(windows)
            shown = whole.to(device)
            judged = _judged(whole, objective.denoisers(windows))
            pieces = [shown._replace(positions_BM=p, labels_BM=labels).to(device) for p, labels in judged.values()]
            found = model.losses(shown, inputs, pieces)
            if counts:
                losses += found
                parts += [_Part(domain, name, len(labels)) for name, (_, labels) in judged.items()]
    reshard(model)
    model.train(training)
    numbers = torch.stack(losses).double().tolist() if losses else []  # read back at once
    shares = processes.gather([part._replace(loss=loss) for part, loss in zip(parts, numbers, strict=True)])
    return _summary([part for share in shares for part in share], objective, data)


def _summary(parts: Sequence["_Part"], objective: Objective, data: EvalData) -> Evaluation:
    means, counts = _means(parts, "domain")
    losses = {domain: means[domain] for domain in data.domains}
    mean = sum(losses[domain] * counts[domain] for domain in losses) / sum(counts.values())
    mixture = sum(losses[domain] * data.shares[domain] for domain in losses)
    likelihood = _likelihood(mean, counts, data.bytes_per_token) if objective.attention == "causal" else {}
    denoisers, _ = _means([part for part in parts if part.denoiser], "denoiser")
    return Evaluation(mean, losses, mixture, likelihood, denoisers)


class _Part(NamedTuple):
    """The mean loss over some targets of a batch (all of them, or one denoiser's), and the weight of that mean."""

    domain: str
    denoiser: str
    weight: int
    loss: float = 0.0


def _judged(batch: Batch, rows: Mapping[str, NDArray[np.bool_]]) -> dict[str, tuple[Tensor | None, Tensor]]:
    """Positions and labels of each denoiser that has any here, or all under no name where there are no denoisers."""
    if not rows:
        return {"": (batch.positions_BM, batch.labels_BM)}
    assert batch.positions_BM is not None
    row_N = batch.positions_BM // batch.tokens_BS.shape[1]
    own = {name: torch.from_numpy(rows_B)[row_N] for name, rows_B in rows.items() if rows_B.any()}
    return {name: (batch.positions_BM[own_N], batch.labels_BM[own_N]) for name, own_N in own.items()}


def _means(parts: Sequence[_Part], by: Literal["domain", "denoiser"]) -> tuple[dict[str, float], dict[str, int]]:
    """The mean loss of all parts of one domain or denoiser, and the weight of it."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for part in parts:
        name = part.domain if by == "domain" else part.denoiser
        sums[name] = sums.get(name, 0.0) + part.loss * part.weight
        counts[name] = counts.get(name, 0) + part.weight
    return {name: total / counts[name] for name, total in sums.items()}, counts


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
