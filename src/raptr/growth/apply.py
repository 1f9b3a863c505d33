"""A growth plan applied, tensor by tensor, to weights and optimizer state alike.

Tensors are named as in a checkpoint: `model.NAME` is a weight, `KIND.NAME` a part of its optimizer state (for AdamW:
exp_avg, exp_avg_sq, step). Nothing but names connects the two models, so the tensors may as well be shards.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raptr.growth.plan import Growth

WEIGHT = "model"


def grow(
    plan: Growth, old: Mapping[str, Tensor], into: Mapping[str, Tensor], *, layers: str, outputs: Sequence[str]
) -> None:
    """Fill the larger model's tensors in place from the smaller one's; see `Growth.rule` for the names."""
    with torch.no_grad():
        for name, tensor in into.items():
            kind, _, parameter = name.partition(".")
            rule = plan.rule(parameter, layers=layers, outputs=outputs)
            if rule.zero_weight if kind == WEIGHT else rule.zero_moments:
                tensor.zero_()
                continue
            source = old[f"{kind}.{rule.source}"]
            assert source.shape == tensor.shape, name  # copy_ would broadcast
            tensor.copy_(source)
