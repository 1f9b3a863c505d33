"""Evaluation on held-out text: the full model at every stage, and random parts of any size on request."""

from dataclasses import dataclass

import torch
from torch import nn

from raptr.data import EvalData
from raptr.methods import Method
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
    model: nn.Module, objective: Objective, data: EvalData, subnetwork: Subnetwork, *, batch: int
) -> Evaluation:
    """Judge the subnetwork on the fixed held-out set, which is the same for every run."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    sums, counts = {}, {}
    with torch.no_grad():
        for domain in data.domains:
            total, count = torch.zeros((), dtype=torch.float64, device=device), 0
            for windows in data.windows(domain, batch):
                piece = objective.evaluation(windows)
                total += model(piece.to(device), subnetwork).double() * len(piece.tokens_BS)
                count += len(piece.tokens_BS)
            sums[domain], counts[domain] = total, count
    model.train(training)
    losses = {domain: float(total) / counts[domain] for domain, total in sums.items()}
    mean = sum(losses[domain] * counts[domain] for domain in losses) / sum(counts.values())
    return Evaluation(mean, losses, sum(losses[domain] * data.shares[domain] for domain in losses))


def evaluate_size(
    model: nn.Module, objective: Objective, data: EvalData, method: Method, size: int, step: int, *, batch: int
) -> float:
    """The mean loss after `step` steps of a few fixed random parts of `size` layers, as the method would run them."""
    parts = [method.part(size, draw, step) for draw in range(DRAWS)]
    losses = [evaluate(model, objective, data, part, batch=batch).loss for part in parts]
    return sum(losses) / len(losses)
