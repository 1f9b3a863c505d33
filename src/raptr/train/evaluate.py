"""Evaluation on held-out text: of the full model in every stage, and of random subnetworks of any size on request."""

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

LARGEST = 700.0  # the largest loss whose exponential is computed: much more would overflow
DRAWS = 4  # random subnetworks of one size whose losses are averaged


@dataclass(frozen=True)
class Evaluation:
    """Mean losses per target token: over all held-out windows, over each domain, and over the mixture of domains.

    `loss` and `mixture` differ if a domain has less held-out text than its share of the mixture. `likelihood` holds
    metrics of causal objectives, whose loss is a likelihood of text: `perplexity`, exp(loss), and `bits_per_byte`,
    which compares models with different tokenizers. Bits per byte use the bytes per token of each domain's whole
    held-out text; the end tokens of documents cost bits but have no bytes. They are missing for data prepared before
    bytes were counted. `denoisers` holds the mean loss over the targets of each denoiser, if the objective mixes them.
    """

    loss: float
    domains: dict[str, float]
    mixture: float
    likelihood: dict[str, float]
    denoisers: dict[str, float]

    def record(self) -> dict[str, object]:
        """Return the evaluation as part of a record: domains only if there are several, denoisers if there are any."""
        record: dict[str, object] = {"loss": self.loss, **self.likelihood}
        if len(self.domains) > 1:
            record |= {"loss_mixture": self.mixture, "domains": self.domains}
        return record | ({"denoisers": self.denoisers} if self.denoisers else {})


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
    """Evaluate the subnetwork on the held-out set, which is the same for every run; each process takes a share.

    Compiled code is bypassed, since the last batch of each domain has a different shape.
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
            on_device = whole.to(device)
            judged = _judged(whole, objective.denoisers(windows))
            pieces = [on_device._replace(positions_BM=p, labels_BM=labels).to(device) for p, labels in judged.values()]
            means = model.losses(on_device, inputs, pieces)
            if counts:
                losses += means
                parts += [_Part(domain, name, len(labels)) for name, (_, labels) in judged.items()]
    reshard(model)
    model.train(training)
    numbers = torch.stack(losses).double().tolist() if losses else []  # read back from the device at once
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
    """The mean loss over some targets of a batch (all, or those of one denoiser), and the weight of that mean."""

    domain: str
    denoiser: str
    weight: int
    loss: float = 0.0


def _judged(batch: Batch, rows: Mapping[str, NDArray[np.bool_]]) -> dict[str, tuple[Tensor | None, Tensor]]:
    """Return positions and labels for each denoiser with targets in this batch; without denoisers, all under ''."""
    if not rows:
        return {"": (batch.positions_BM, batch.labels_BM)}
    assert batch.positions_BM is not None
    row_N = batch.positions_BM // batch.tokens_BS.shape[1]
    masks = {name: torch.from_numpy(rows_B)[row_N] for name, rows_B in rows.items() if rows_B.any()}
    return {name: (batch.positions_BM[mask_N], batch.labels_BM[mask_N]) for name, mask_N in masks.items()}


def _means(parts: Sequence[_Part], by: Literal["domain", "denoiser"]) -> tuple[dict[str, float], dict[str, int]]:
    """Return the mean loss of each domain or denoiser, and the weight of each mean."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for part in parts:
        name = part.domain if by == "domain" else part.denoiser
        sums[name] = sums.get(name, 0.0) + part.loss * part.weight
        counts[name] = counts.get(name, 0) + part.weight
    return {name: total / counts[name] for name, total in sums.items()}, counts


def _likelihood(loss: float, counts: Mapping[str, int], bytes_per_token: Mapping[str, float]) -> dict[str, float]:
    """Return perplexity and bits per byte, from the mean loss and the number of windows of each domain."""
    metrics = {"perplexity": math.exp(min(loss, LARGEST))}
    if counts.keys() <= bytes_per_token.keys():
        mean = sum(counts[domain] * bytes_per_token[domain] for domain in counts) / sum(counts.values())
        metrics["bits_per_byte"] = loss / math.log(2) / mean
    return metrics


def evaluate_size(judge: Callable[[Subnetwork], Evaluation], method: Method, size: int, step: int) -> float:
    """Return the mean loss of a few fixed random subnetworks of `size` layers, as the method runs them at `step`."""
    losses = [judge(method.drawn(size, draw, step)).loss for draw in range(DRAWS)]
    return sum(losses) / len(losses)
