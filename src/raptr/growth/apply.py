"""A growth plan applied, tensor by tensor, to weights and optimizer state alike.

Tensors are named as in a checkpoint: `model.NAME` is a weight, `KIND.NAME` a part of its optimizer state (for AdamW:
exp_avg, exp_avg_sq, step), for parameters that have one. Nothing but names connects the two models, so the tensors may
as well be shards.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raptr.growth.plan import Growth

WEIGHT = "model"


def grow(
    plan: Growth, old: Mapping[str, Tensor], into: Mapping[str, Tensor], *, layers: str, outputs: Sequence[str]
) -> dict[str, Tensor]:
    """Fill the larger model's weights in place from the smaller one's tensors, and return its optimizer state.

    See `Growth.rule` for the names. Zero moments are no state: the optimizer then makes what it begins with.
    """
    state: dict[str, Tensor] = {}
    kinds = sorted({name.partition(".")[0] for name in old} - {WEIGHT})
    with torch.no_grad():
        for name, weight in into.items():
            kind, _, parameter = name.partition(".")
            assert kind == WEIGHT, name
            rule = plan.rule(parameter, layers=layers, outputs=outputs)
            source = old[f"{WEIGHT}.{rule.source}"]
            assert source.shape == weight.shape, name  # copy_ would broadcast
            if rule.zero_weight:
                weight.zero_()
            else:
                weight.copy_(source)
            if not rule.zero_moments:
                kept = {kind: old[f"{kind}.{rule.source}"] for kind in kinds if f"{kind}.{rule.source}" in old}
                state |= {f"{kind}.{parameter}": tensor.clone() for kind, tensor in kept.items()}
    return state
