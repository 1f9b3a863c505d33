"""Evaluation on held-out text: the full model at every stage, and random parts of any size on request."""

import torch
from torch import nn

from raptr.data import EvalData
from raptr.methods import Method
from raptr.subnetworks import Subnetwork

DRAWS = 4  # random parts of one size that are averaged


def evaluate(model: nn.Module, data: EvalData, subnetwork: Subnetwork, *, batch: int) -> float:
    """The mean loss per masked token on the fixed held-out set, under fixed masks."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    with torch.no_grad():
        for piece in data.batches(batch):
            total += model(piece.to(device), subnetwork).double() * len(piece.tokens_BS)
            count += len(piece.tokens_BS)
    model.train(training)
    return float(total) / count


def evaluate_size(model: nn.Module, data: EvalData, method: Method, size: int, *, batch: int) -> float:
    """The mean loss of a few fixed random parts of `size` layers, as the method would run them."""
    losses = [evaluate(model, data, method.part(size, draw), batch=batch) for draw in range(DRAWS)]
    return sum(losses) / len(losses)
