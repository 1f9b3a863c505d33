"""Slots: blocks that hold, for a step, the weights of the layers that run (the form `gather`).

A slot is as large as what runs of its layer. Where all heads and MLP parts run, whole layers are copied. Where not all
of them do, the slot is a smaller block, and only what runs is read out of the layer, by index; its gradients go back
the same way, with zeros for what did not run. How a block's tensors are cut is the family's table (models/layout.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from raptr.models.inputs import Signature
from raptr.models.layout import chosen, narrow, spread
from raptr.models.model import Model
from raptr.models.roles import roles
from raptr.subnetworks import Shape


class Parameters(NamedTuple):
    """The parameters of some blocks, by kind: matrices are used in the precision of products, vectors in their own."""

    matrices: list[Tensor]
    vectors: list[Tensor]

    def by_block(self, blocks: int) -> list[list[Tensor]]:
        """The matrices and the vectors of each of so many blocks."""
        m, v = (len(kind) // max(blocks, 1) for kind in self)
        return [self.matrices[n * m : (n + 1) * m] + self.vectors[n * v : (n + 1) * v] for n in range(blocks)]


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
    """The slots of a model, made when they are first needed; `ready` is given each new module, to compile it."""

    def __init__(self, model: Model, device: torch.device, *, half: bool, ready: Callable[[nn.Module], None]) -> None:
        self._model, self._device, self._half, self._ready = model, device, half, ready
        self._dtype = next(model.parameters()).dtype
        self._made: dict[Shape, list[Slot]] = {}  # by what runs of a layer
        self.narrowing, self.widening = _Narrowing(model), _Widening(model)
        for module in (self.narrowing, self.widening):
            ready(module)

    def take(self, sign: Signature) -> list[Slot]:
        """A slot for each layer of a subnetwork with this signature, whatever it holds."""
        taken, used = [], Counter[Shape]()
        for shape in self._shapes(sign):
            slots = self._made.setdefault(shape, [])
            if used[shape] == len(slots):
                slots.append(self._make(shape))
            taken.append(slots[used[shape]])
            used[shape] += 1
        return taken

    def keep(self, sign: Signature) -> None:
        """Let go of all slots but those that a subnetwork with this signature takes."""
        shapes = set(self._shapes(sign))
        self._made = {shape: slots for shape, slots in self._made.items() if shape in shapes}

    def _shapes(self, sign: Signature) -> list[Shape]:
        """What runs of each layer."""
        whole = self._model.config.shape
        heads, parts = sign.heads or (whole.heads,) * sign.size, sign.parts or (whole.parts,) * sign.size
        return [Shape(1, *counts) for counts in zip(heads, parts, strict=True)]

    def _make(self, shape: Shape) -> Slot:
        whole = self._model.config.shape
        with torch.device("meta"):
            block = self._model.new_block()
            if (shape.heads, shape.parts) != (whole.heads, whole.parts):
                narrow(block, self._model.layout, whole, shape)
        block.to_empty(device=self._device).to(self._dtype)
        self._ready(block)
        matrices = parameters_of([block]).matrices if self._half else []
        slot = Slot(block, [torch.empty_like(matrix) for matrix in matrices])
        for matrix in matrices:
            matrix.data = matrix.data.bfloat16()  # copying is then the rounding that a layer does anyway
        return slot


class _Cutting(nn.Module):
    """What both directions need: how each parameter of a block is cut, matrices first."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        kinds = roles(model.blocks[0]) if len(model.blocks) else {}
        ordered = sorted(kinds, key=lambda name: kinds[name] != "matrix")
        self.cuts = [model.layout.get(name) for name in ordered]
        self.units = {"heads": model.config.shape.heads, "parts": model.config.shape.parts}


@final
class _Narrowing(_Cutting):
    """Writes what runs of a layer into a slot."""

    def forward(
        self, slot: Sequence[Tensor], layer: Sequence[Tensor], heads_H: Tensor | None, parts_P: Tensor | None
    ) -> None:
        for mine, whole, cut in zip(slot, layer, self.cuts, strict=True):
            if cut is None:
                mine.copy_(whole)
            else:
                mine.copy_(chosen(whole, cut, self.units[cut.axis], heads_H if cut.axis == "heads" else parts_P))


@final
class _Widening(_Cutting):
    """Makes a slot's gradients those of its layer."""

    def forward(self, slot: Sequence[Tensor], heads_H: Tensor | None, parts_P: Tensor | None) -> list[Tensor]:
        indices = [None if cut is None else heads_H if cut.axis == "heads" else parts_P for cut in self.cuts]
        return [  # never the slot's own memory, which the next micro-batch is written to
            mine.clone() if cut is None or index is None else spread(mine, cut, self.units[cut.axis], index)
            for mine, cut, index in zip(slot, self.cuts, indices, strict=True)
        ]
