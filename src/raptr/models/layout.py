"""Where a block's tensors hold its heads and MLP parts. Each family has one such table.

An axis of heads or MLP parts lies within one dimension of a tensor. That dimension holds `maps` projections one after
the other, each with the same number of rows for every unit (head or part); a fused matrix of queries, keys and values
holds three projections. A tensor cut in dimension 0 computes the units from the layer's input. It is what a gate
multiplies: a unit whose queries, keys and values are zero, or whose input to the activation is zero, outputs zeros. A
tensor cut in dimension 1 reads the units' outputs.

    {"qkv.weight": Cut("heads", dim=0, maps=3), "attention_out.weight": Cut("heads", dim=1), ...}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from raptr.models.inputs import BlockInputs
from raptr.subnetworks.value import Width


@dataclass(frozen=True)
class Cut:
    """The dimension of a tensor that holds heads or MLP parts, for `maps` projections one after the other."""

    axis: Width
    dim: int
    maps: int = 1


Layout = Mapping[str, Cut]  # by parameter name in the block; a parameter that is not listed has no such axis


class CutBlock(Protocol):
    """A block whose layout cuts its tensors into this many heads and MLP parts."""

    heads: int
    parts: int
    layout: Layout


def of_running(block: CutBlock, name: str, inputs: BlockInputs) -> Tensor:
    """Return a parameter of the block, reduced to the heads and MLP parts that run and multiplied by their gates."""
    assert isinstance(block, nn.Module)
    module, _, key = name.partition(".")
    tensor, cut = getattr(getattr(block, module), key), block.layout[name]
    if cut.axis == "heads":
        units, index, gates = block.heads, inputs.heads_H, inputs.head_gates_H
    else:
        units, index, gates = block.parts, inputs.parts_P, inputs.part_gates_P
    return gated(chosen(tensor, cut, units, index), cut, gates)


def chosen(tensor: Tensor, cut: Cut, units: int, index: Tensor | None) -> Tensor:
    """Return the tensor with only the units in `index`; None: the tensor itself."""
    if index is None:
        return tensor
    picked: Tensor = _Picked.apply(by_unit(tensor, cut, units), index, cut.dim + 1)  # type: ignore[no-untyped-call]
    return picked.flatten(cut.dim, cut.dim + 2)


def gated(tensor: Tensor, cut: Cut, gates: Tensor | None) -> Tensor:
    """Multiply each unit's rows by its gate; return the tensor itself without gates or if `cut.dim` is not 0."""
    if gates is None or cut.dim != 0:
        return tensor
    factors = gates.view(-1, *(1,) * tensor.dim())
    return (by_unit(tensor, cut, len(gates)) * factors).flatten(0, 2)


def by_unit(tensor: Tensor, cut: Cut, units: int) -> Tensor:
    """Return a view in which dimension `cut.dim` becomes three: (maps, units, rows of a unit)."""
    before, after = tensor.shape[: cut.dim], tensor.shape[cut.dim + 1 :]
    return tensor.view(*before, cut.maps, units, -1, *after)


class _Picked(torch.autograd.Function):
    """`index_select` of distinct indices, which need no atomic additions or sorting in the gradient, unlike torch's."""

    @staticmethod
    def forward(whole: Tensor, index: Tensor, dim: int) -> Tensor:
        return whole.index_select(dim, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        whole, index, ctx.dim = inputs
        ctx.units = whole.shape[ctx.dim]
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return _spread(grad, index, ctx.units, ctx.dim), None, None


def _spread(picked: Tensor, index: Tensor, units: int, dim: int) -> Tensor:
    """Return a tensor with `units` entries in dimension `dim`: `picked` at `index`, zeros elsewhere.

    This is a gather, which compilers can fuse.
    """
    order = torch.arange(1, len(index) + 1, device=index.device)
    place = torch.zeros(units, dtype=order.dtype, device=index.device).scatter(0, index, order)  # from 1; 0: idle
    idle = (place == 0).view(-1, *[1] * (picked.dim() - dim - 1))
    return picked.index_select(dim, (place - 1).clamp(min=0)).masked_fill(idle, 0)


def split(tensor: Tensor, cut: Cut) -> tuple[Tensor, ...]:
    """Split the tensor into its projections: a fused matrix into its matrices."""
    return tensor.chunk(cut.maps, cut.dim)
