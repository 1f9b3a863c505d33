"""A subnetwork as tensors: what a forward pass is given beside the batch.

Scales and indices reach a block only as tensors: a compiled block would be compiled anew for each Python
number. None stands where there is nothing to scale or to choose, so that a full layer is called plainly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raptr.data.batch import uploaded
from raptr.subnetworks import Subnetwork
from raptr.subnetworks.value import Kept


@dataclass(frozen=True)
class BlockInputs:
    """A layer's share of the subnetwork: scales (0-dim) of the layer and its branches, kept heads and parts, gates."""

    layer_scale: Tensor | None
    attention_scale: Tensor | None
    mlp_scale: Tensor | None
    heads_H: Tensor | None
    parts_P: Tensor | None
    head_gates_H: Tensor | None = None
    part_gates_P: Tensor | None = None


class Inputs(NamedTuple):
    """The layers that run, ascending, what each is given, and the precision of the residual stream (None: any)."""

    kept: tuple[int, ...]
    blocks: Sequence[BlockInputs]
    stream: torch.dtype | None = None


class Packed(NamedTuple):
    """A subnetwork's numbers, one tensor to a kind, for the layers that run (K of them), ascending.

    The columns of the scales multiply the whole layer, its attention branch and its MLP branch; kept heads and
    parts stand one layer after the other. Gates are the same in every layer.
    """

    scales_K3: Tensor
    heads: Tensor | None
    parts: Tensor | None
    head_gates_H: Tensor | None
    part_gates_P: Tensor | None

    def to(self, device: torch.device) -> "Packed":
        """The same numbers on another device."""
        return Packed(*uploaded(self, device))  # type: ignore[arg-type]


class Signature(NamedTuple):
    """What of a subnetwork decides the operations that run, whatever the numbers: steps of one share a graph."""

    size: int
    scaled: tuple[bool, bool, bool]  # whether any running layer has such a scale, other than 1
    heads: tuple[int, ...] | None
    parts: tuple[int, ...] | None
    gated: tuple[bool, bool]  # whether heads have gates, and parts


def pack(subnetwork: Subnetwork, dtype: torch.dtype = torch.float32) -> Packed:
    """The subnetwork's numbers on the CPU; scales are float32 at least, whatever the model computes in."""
    scales = [_scales(subnetwork, layer) for layer in subnetwork.kept]
    heads, parts = (
        None if kept is None else torch.tensor([unit for layer in subnetwork.kept for unit in kept[layer]])
        for kept in (subnetwork.heads, subnetwork.parts)
    )
    wide = torch.promote_types(dtype, torch.float32)
    gates = (
        None if gates is None else torch.tensor(gates, dtype=wide)
        for gates in (subnetwork.head_gates, subnetwork.part_gates)
    )
    return Packed(torch.tensor(scales, dtype=wide), heads, parts, *gates)


def signature(subnetwork: Subnetwork) -> Signature:
    """The subnetwork's signature."""
    rows = [_scales(subnetwork, layer) for layer in subnetwork.kept]
    layer, attention, mlp = (any(row[column] != 1 for row in rows) for column in range(3))
    heads, parts = (_counts(kept, subnetwork) for kept in (subnetwork.heads, subnetwork.parts))
    gated = subnetwork.head_gates is not None, subnetwork.part_gates is not None
    return Signature(subnetwork.size, (layer, attention, mlp), heads, parts, gated)


def unpack(packed: Packed, sign: Signature) -> Iterator[BlockInputs]:
    """The inputs of each running layer, with all the scales that any of them has."""
    heads, parts = _split(packed.heads, sign.heads, sign.size), _split(packed.parts, sign.parts, sign.size)
    for row in range(sign.size):
        layer, attention, mlp = (packed.scales_K3[row, c] if used else None for c, used in enumerate(sign.scaled))
        yield BlockInputs(layer, attention, mlp, heads[row], parts[row], packed.head_gates_H, packed.part_gates_P)


def scaled(weight: Tensor, scale: Tensor | None) -> Tensor:
    """A map's weight or bias times a scale: there are far fewer of them than activations."""
    return weight if scale is None else scale * weight


def times(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    """The product of two scales."""
    return two if one is None else one if two is None else one * two


def folded(subnetwork: Subnetwork, layer: int) -> tuple[float, float]:
    """The scales of a layer's attention and MLP branches, to be folded into their last maps."""
    _, attention, mlp = _scales(subnetwork, layer)
    return attention, mlp


def _scales(subnetwork: Subnetwork, layer: int) -> tuple[float, float, float]:
    scale, whole = subnetwork.scales[layer], subnetwork.scaled == "layer"
    branch = 1.0 if whole else scale
    return scale if whole else 1.0, branch * subnetwork.head_scale, branch * subnetwork.part_scale


def _counts(kept: Kept | None, subnetwork: Subnetwork) -> tuple[int, ...] | None:
    return None if kept is None else tuple(len(kept[layer]) for layer in subnetwork.kept)


def _split(flat: Tensor | None, counts: tuple[int, ...] | None, size: int) -> Sequence[Tensor | None]:
    if flat is None or counts is None:
        return [None] * size
    return torch.split(flat, list(counts))
