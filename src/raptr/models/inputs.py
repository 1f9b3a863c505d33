"""A subnetwork as tensors: what a forward pass is given in addition to the batch.

Scales and indices reach a block only as tensors: a compiled block would be compiled anew for each Python
number. None stands where there is nothing to scale or to choose, so that a full layer is called plainly.
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
    """A layer's share of the subnetwork: its scales (0-dim), the heads and MLP parts that run, and gates.

    `layer_scale` multiplies the whole layer and `branch_scale` each of its branches, with the bias of its last linear
    layer. `norm_scale` multiplies what its norms give.
    `head_scale` and `part_scale` make up for the heads and MLP parts that do not run; a bias is there whatever runs,
    so it is not scaled by them.
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
    """The layers that run, ascending, what each is given, and the precision of the residual stream (None: any)."""

    kept: tuple[int, ...]
    blocks: Sequence[BlockInputs]
    stream: torch.dtype | None = None


class Packed(NamedTuple):
    """A subnetwork's numbers, one tensor to a kind, for the layers that run (K of them), ascending.

    The columns of the scales multiply the whole layer, each branch, and what the heads, the MLP parts and the norms
    give. Kept heads and parts stand one layer after the other. Gates are the same in every layer.
    """

    scales_K5: Tensor
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
    scaled: tuple[bool, ...]  # whether any running layer has such a scale, other than 1
    heads: tuple[int, ...] | None
    parts: tuple[int, ...] | None
    gated: tuple[bool, bool]  # whether heads have gates, and parts


def pack(subnetwork: Subnetwork, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None) -> Packed:
    """Return the numbers of a subnetwork of our model (None: of any other), on the CPU; scales are float32 at least."""
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
    """Return the subnetwork's signature for a model of ours (None: any other)."""
    rows = [_scales(subnetwork, layer, config) for layer in subnetwork.kept]
    used = tuple(any(row[column] != 1 for row in rows) for column in range(SCALES))
    heads, parts = (_counts(kept, subnetwork) for kept in (subnetwork.heads, subnetwork.parts))
    gated = subnetwork.head_gates is not None, subnetwork.part_gates is not None
    return Signature(subnetwork.size, used, heads, parts, gated)


def unpack(packed: Packed, sign: Signature) -> Iterator[BlockInputs]:
    """The inputs of each running layer, with all the scales that any of them has."""
    heads, parts = _split(packed.heads, sign.heads, sign.size), _split(packed.parts, sign.parts, sign.size)
    for row in range(sign.size):
        scales = [packed.scales_K5[row, column] if used else None for column, used in enumerate(sign.scaled)]
        layer, branch, head, part, norm = scales
        gates = packed.head_gates_H, packed.part_gates_P
        yield BlockInputs(layer, branch, head, part, heads[row], parts[row], norm, *gates)


def scaled(weight: Tensor, scale: Tensor | None) -> Tensor:
    """A map's weight or bias times a scale: there are far fewer of them than activations."""
    return weight if scale is None else scale * weight


def times(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    """The product of two scales."""
    return two if one is None else one if two is None else one * two


class Folded(NamedTuple):
    """A layer's scales as they are folded into its weights, for a stock model."""

    attention: float  # the weight of the attention's output
    mlp: float  # the weight of the MLP's output
    bias: float  # the biases of both
    norm: float  # the weights and biases of both norms


def folded(subnetwork: Subnetwork, layer: int, config: ModelConfig) -> Folded:
    """Return the scales of a layer's branches and norms, to be folded into its weights."""
    _, branch, head, part, norm = _scales(subnetwork, layer, config)
    return Folded(branch * head, branch * part, branch, norm)


def _scales(subnetwork: Subnetwork, layer: int, config: ModelConfig | None) -> tuple[float, ...]:
    """The row of `Packed.scales_K5` for a layer."""
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
