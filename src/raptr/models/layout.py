"""How the tensors of a block are laid out in heads and MLP parts: the one table that each family has.

A tensor that has an axis of heads or MLP parts has it inside one of its dimensions: that dimension is `maps` maps,
each of `units` units of some rows. The queries, keys and values of one matrix are three such maps. A tensor that is
cut in dimension 0 makes the units of what enters the layer (and is what a gate multiplies: with zeros for its queries,
keys and values, or before its activation, a unit gives zeros); one that is cut in dimension 1 reads them.

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
    """Where a tensor has an axis of heads or MLP parts."""

    axis: Width
    dim: int
    maps: int = 1


Layout = Mapping[str, Cut]  # by the name of the block's parameter; those that are not in it have no such axis


class CutBlock(Protocol):
    """A block whose tensors are laid out in this many heads and MLP parts."""

    heads: int
    parts: int
    layout: Layout


def of_running(block: CutBlock, name: str, inputs: BlockInputs) -> Tensor:
    """A parameter of the block as if the heads and MLP parts that run were all of them, under their gates."""
    assert isinstance(block, nn.Module)
    module, _, key = name.partition(".")
    tensor, cut = getattr(getattr(block, module), key), block.layout[name]
    if cut.axis == "heads":
        units, index, gates = block.heads, inputs.heads_H, inputs.head_gates_H
    else:
        units, index, gates = block.parts, inputs.parts_P, inputs.part_gates_P
    return gated(chosen(tensor, cut, units, index), cut, gates)


def chosen(tensor: Tensor, cut: Cut, units: int, index: Tensor | None) -> Tensor:
    """The tensor as if the chosen ones of its units were all; None: all are."""
    if index is None:
        return tensor
    picked: Tensor = _Picked.apply(by_unit(tensor, cut, units), index, cut.dim + 1)  # type: ignore[no-untyped-call]
    return picked.flatten(cut.dim, cut.dim + 2)


def gated(tensor: Tensor, cut: Cut, gates: Tensor | None) -> Tensor:
    """The tensor with what makes each unit times the unit's gate; None, or where it makes no units: as it is."""
    if gates is None or cut.dim != 0:
        return tensor
    factors = gates.view(-1, *(1,) * tensor.dim())
    return (by_unit(tensor, cut, len(gates)) * factors).flatten(0, 2)


def by_unit(tensor: Tensor, cut: Cut, units: int) -> Tensor:
    """A view whose dimension `cut.dim` is three: maps, units, and the rows of a unit."""
    before, after = tensor.shape[: cut.dim], tensor.shape[cut.dim + 1 :]
    return tensor.view(*before, cut.maps, units, -1, *after)


class _Picked(torch.autograd.Function):
    """`index_select` of different indices. Its own gradient adds with atomics, or sorts: no need, none stands twice."""

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
    """`picked` at the places `index` of a dimension of `units`, zeros at the others: a gather, which compilers fuse."""
    order = torch.arange(1, len(index) + 1, device=index.device)
    place = torch.zeros(units, dtype=order.dtype, device=index.device).scatter(0, index, order)  # from 1; 0: none
    idle = (place == 0).view(-1, *[1] * (picked.dim() - dim - 1))
    return picked.index_select(dim, (place - 1).clamp(min=0)).masked_fill(idle, 0)


def split(tensor: Tensor, cut: Cut) -> tuple[Tensor, ...]:
    """The maps of the cut dimension: of a fused matrix, its matrices."""
    return tensor.chunk(cut.maps, cut.dim)
