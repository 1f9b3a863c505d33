"""A subnetwork as tensors: the inputs of a forward pass besides the batch.

Scales and indices reach a block only as tensors, because a compiled block would be recompiled for each new Python
number. They are None if there is nothing to scale or to select, so a full layer runs without extra operations.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raptr.data.batch import uploaded
from raptr.models.contract import ModelConfig
from raptr.subnetworks import Subnetwork
from raptr.subnetworks.value import Kept

SCALES = 5  # columns of `Packed.scales_K5`


@dataclass(frozen=True)
class BlockInputs:
    """One layer's inputs: its scales (0-dimensional), the indices of the heads and MLP parts that run, and gates.

    `layer_scale` multiplies the update of the whole layer, `branch_scale` the output of each branch, output bias
    included, and `norm_scale` the output of each norm. `head_scale` and `part_scale` compensate for the heads and MLP
    parts that do not run. They leave out the output bias, which is added whatever runs.
    """

    layer_scale: Tensor | None
    branch_scale: Tensor | None
    head_scale: Tensor | None
    part_scale: Tensor | None
    heads_H: Tensor | None
    parts_P: Tensor | None
    norm_scale: Tensor | None
    head_gates_H: Tensor | None = None
    part_gates_P: Tensor | None = None


class Inputs(NamedTuple):
    """The running layers, ascending, the inputs of each, and the residual stream's precision (None: as computed)."""

    kept: tuple[int, ...]
    blocks: Sequence[BlockInputs]
    stream: torch.dtype | None = None


class Packed(NamedTuple):
    """A subnetwork in a few tensors, over its K running layers, ascending.

    The columns of `scales_K5` are the scales of the layer, the branches, the heads, the MLP parts and the norms. The
    indices of kept heads (parts) are concatenated over the layers. All layers share the gates.
    """

    scales_K5: Tensor
    heads: Tensor | None
    parts: Tensor | None
    head_gates_H: Tensor | None
    part_gates_P: Tensor | None

    def to(self, device: torch.device) -> "Packed":
        """Return a copy on another device."""
        return Packed(*uploaded(self, device))  # type: ignore[arg-type]


class Signature(NamedTuple):
    """A subnetwork's operations and their shapes, without its numbers: equal signatures can share a CUDA graph."""

    size: int
    scaled: tuple[bool, ...]  # for each kind of scale, whether it differs from 1 in some running layer
    heads: tuple[int, ...] | None  # how many run in each running layer; None: all
    parts: tuple[int, ...] | None
    gated: tuple[bool, bool]  # whether heads have gates, and whether parts have


def pack(subnetwork: Subnetwork, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None) -> Packed:
    """Pack a subnetwork, on the CPU, with floats in float32 or wider; `config` is None for other people's models."""
    scales = [_scales(subnetwork, layer, config) for layer in subnetwork.kept]
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


def signature(subnetwork: Subnetwork, config: ModelConfig | None = None) -> Signature:
    """Return the subnetwork's signature; `config` is None for other people's models."""
    rows = [_scales(subnetwork, layer, config) for layer in subnetwork.kept]
    used = tuple(any(row[column] != 1 for row in rows) for column in range(SCALES))
    heads, parts = (_counts(kept, subnetwork) for kept in (subnetwork.heads, subnetwork.parts))
    gated = subnetwork.head_gates is not None, subnetwork.part_gates is not None
    return Signature(subnetwork.size, used, heads, parts, gated)


def unpack(packed: Packed, sign: Signature) -> Iterator[BlockInputs]:
    """Yield the inputs of each running layer; a kind of scale that differs from 1 in some layer is passed to all."""
    heads, parts = _split(packed.heads, sign.heads, sign.size), _split(packed.parts, sign.parts, sign.size)
    for row in range(sign.size):
        scales = [packed.scales_K5[row, column] if used else None for column, used in enumerate(sign.scaled)]
        layer, branch, head, part, norm = scales
        gates = packed.head_gates_H, packed.part_gates_P
        yield BlockInputs(layer, branch, head, part, heads[row], parts[row], norm, *gates)


def scaled(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Scale a linear layer's weight or bias, which has far fewer elements than the activations."""
    return weight if scale is None else scale * weight


def times(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    """Return the product of two scales; None stands for 1."""
    return two if one is None else one if two is None else one * two


class Folded(NamedTuple):
    """The factors by which a layer's parameters are multiplied to fold its scales into them, for a stock model."""

    attention: float  # for the weight of the attention's output projection
    mlp: float  # for the weight of the MLP's output projection
    bias: float  # for the biases of both
    norm: float  # for the weights and biases of both norms


def folded(subnetwork: Subnetwork, layer: int, config: ModelConfig) -> Folded:
    """Return the factors that fold the scales of a layer's branches and norms into its parameters."""
    _, branch, head, part, norm = _scales(subnetwork, layer, config)
    return Folded(branch * head, branch * part, branch, norm)


def _scales(subnetwork: Subnetwork, layer: int, config: ModelConfig | None) -> tuple[float, ...]:
    """Return a layer's row of `Packed.scales_K5`."""
    scale = subnetwork.scales[layer]
    whole, branch = (scale, 1.0) if subnetwork.scaled == "layer" else (1.0, scale)
    multiplier, norm = (1.0, 1.0) if config is None else (config.residual_multiplier, config.norm_scale(layer))
    return whole, branch * multiplier, subnetwork.head_scale, subnetwork.part_scale, norm


def _counts(kept: Kept | None, subnetwork: Subnetwork) -> tuple[int, ...] | None:
    return None if kept is None else tuple(len(kept[layer]) for layer in subnetwork.kept)


def _split(flat: Tensor | None, counts: tuple[int, ...] | None, size: int) -> Sequence[Tensor | None]:
    if flat is None or counts is None:
        return [None] * size
    return torch.split(flat, list(counts))
