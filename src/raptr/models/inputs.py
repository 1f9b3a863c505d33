"""A subnetwork as tensors on the device: what each running block is handed.

Scales and indices reach a block only as tensors: a compiled block would be compiled anew for each Python
number. None stands where there is nothing to scale or to choose, so that a full layer is called plainly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raptr.subnetworks import Subnetwork
from raptr.subnetworks.value import Kept


@dataclass(frozen=True)
class BlockInputs:
    """A layer's share of the subnetwork: scales (0-dim) of the layer and its branches, kept heads and parts."""

    layer_scale: Tensor | None
    attention_scale: Tensor | None
    mlp_scale: Tensor | None
    heads_H: Tensor | None
    parts_P: Tensor | None


def block_inputs(subnetwork: Subnetwork, like: Tensor) -> Iterator[tuple[int, BlockInputs]]:
    """The layers that run, ascending, each with its scales and indices on the device of `like`."""
    numbers = [_scales(subnetwork, layer) for layer in subnetwork.kept]
    uploaded = torch.tensor(numbers, dtype=like.dtype).to(like.device, non_blocking=True)
    heads, parts = (_indices(kept, subnetwork, like) for kept in (subnetwork.heads, subnetwork.parts))
    for row, layer in enumerate(subnetwork.kept):
        layer_scale, attention_scale, mlp_scale = (
            None if number == 1 else uploaded[row, column] for column, number in enumerate(numbers[row])
        )
        yield layer, BlockInputs(layer_scale, attention_scale, mlp_scale, heads[layer], parts[layer])


def _scales(subnetwork: Subnetwork, layer: int) -> tuple[float, float, float]:
    """What multiplies the whole layer, its attention branch and its MLP branch."""
    scale, whole = subnetwork.scales[layer], subnetwork.scaled == "layer"
    branch = 1.0 if whole else scale
    return scale if whole else 1.0, branch * subnetwork.head_scale, branch * subnetwork.part_scale


def _indices(kept: Kept | None, subnetwork: Subnetwork, like: Tensor) -> Sequence[Tensor | None]:
    """Each layer's kept heads or parts, from one upload."""
    if kept is None:
        return [None] * subnetwork.layers
    flat = torch.tensor([unit for units in kept for unit in units]).to(like.device, non_blocking=True)
    return torch.split(flat, [len(units) for units in kept])
