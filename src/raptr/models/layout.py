"""How the tensors of a block are laid out in heads and MLP parts: the one table that each family has.

A tensor that has an axis of heads or MLP parts has it inside one of its dimensions: that dimension is `before` blocks
of `units` units of some rows each. The queries, keys and values of one matrix are three such blocks.

    LAYOUT = {"qkv.weight": Cut("heads", dim=0, before=3), "attention_out.weight": Cut("heads", dim=1), ...}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """Where a tensor has an axis of heads or MLP parts."""

    axis: Literal["heads", "parts"]
    dim: int
    before: int = 1


Layout = Mapping[str, Cut]  # by the name of the block's parameter; those that are not in it have no such axis


def chosen(tensor: Tensor, cut: Cut, units: int, index: Tensor | None) -> Tensor:
    """The tensor as if the chosen ones of its units were all; None: all are."""
    if index is None:
        return tensor
    before, after = tensor.shape[: cut.dim], tensor.shape[cut.dim + 1 :]
    whole = tensor.view(*before, cut.before, units, -1, *after)
    return whole.index_select(cut.dim + 1, index).flatten(cut.dim, cut.dim + 2)


def split(tensor: Tensor, cut: Cut) -> tuple[Tensor, ...]:
    """The blocks of the cut dimension: of a fused matrix, its matrices."""
    return tensor.chunk(cut.before, cut.dim)
