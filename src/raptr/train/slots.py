"""Slots: blocks that hold the weights of the running layers for one step (the form `gather`).

A slot always holds a whole layer, so all kinds of subnetworks share the slots. Which heads and MLP parts run is an
input of the block, as for the model's own blocks, so Python does not have to choose them in each step.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from raptr.models.model import Model
from raptr.models.roles import roles


class Parameters(NamedTuple):
    """Parameters of blocks by kind: matrices are used in the precision of matrix products, vectors in their own."""

    matrices: list[Tensor]
    vectors: list[Tensor]


def parameters_of(blocks: Iterable[nn.Module]) -> Parameters:
    """Return the parameters of the blocks, split into matrices and vectors."""
    every = [pair for block in blocks for pair in zip(roles(block).values(), block.parameters(), strict=True)]
    return Parameters([p for role, p in every if role == "matrix"], [p for role, p in every if role != "matrix"])


class Slot(NamedTuple):
    """A block that holds a layer's weights for a step, and float32 tensors for the gradients of bfloat16 matrices."""

    block: nn.Module
    gradients: list[Tensor]


@final
class Slots:
    """The slots of a model, created when they are first needed; `ready` is called with each new block to compile it."""

    def __init__(self, model: Model, device: torch.device, *, half: bool, ready: Callable[[nn.Module], None]) -> None:
        self._model, self._device, self._half, self._ready = model, device, half, ready
        self._dtype = next(model.parameters()).dtype
        self._made: list[Slot] = []

    def first(self, size: int) -> list[Slot]:
        """Return the first `size` slots, with whatever weights they hold."""
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
            matrix.data = matrix.data.bfloat16()  # copying then does the rounding that the layer would do anyway
        return slot
