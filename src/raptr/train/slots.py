"""Slots: blocks that hold, for a step, the weights of the layers that run (the form `gather`).

A slot holds a whole layer, whatever runs of it, so all kinds of subnetworks share the slots. Which heads and MLP parts
run is an input of the block, as it is of the model's own: nothing of the choice is left to the Python of a step.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from raptr.models.model import Model
from raptr.models.roles import roles


class Parameters(NamedTuple):
    """The parameters of some blocks, by kind: matrices are used in the precision of products, vectors in their own."""

    matrices: list[Tensor]
    vectors: list[Tensor]


def parameters_of(blocks: Iterable[nn.Module]) -> Parameters:
    """The parameters of the blocks."""
    every = [pair for block in blocks for pair in zip(roles(block).values(), block.parameters(), strict=True)]
    return Parameters([p for role, p in every if role == "matrix"], [p for role, p in every if role != "matrix"])


class Slot(NamedTuple):
    """A block that holds a layer's weights for a step, and where the gradients of matrices in half precision go."""

    block: nn.Module
    gradients: list[Tensor]


@final
class Slots:
    """The slots of a model, made when they are first needed; `ready` is given each new block, to compile it."""

    def __init__(self, model: Model, device: torch.device, *, half: bool, ready: Callable[[nn.Module], None]) -> None:
        self._model, self._device, self._half, self._ready = model, device, half, ready
        self._dtype = next(model.parameters()).dtype
        self._made: list[Slot] = []

    def first(self, size: int) -> list[Slot]:
        """The first `size` slots, whatever they hold."""
        while len(self._made) < size:
            self._made.append(self._make())
        return self._made[:size]

    def _make(self) -> Slot:
        with torch.device("meta"):
            block = self._model.new_block()
        block.to_empty(device=self._device).to(self._dtype)
        self._ready(block)
        matrices = parameters_of([block]).matrices if self._half else []
        slot = Slot(block, [torch.empty_like(matrix) for matrix in matrices])
        for matrix in matrices:
            matrix.data = matrix.data.bfloat16()  # copying is then the rounding that a layer does anyway
        return slot
