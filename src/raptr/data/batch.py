"""What one training or evaluation step reads.

Shapes: B batch, S sequence, M targets: the positions where the loss is taken. M is the same for every sequence of a
given length, so all shapes are static and the mean over micro-batches is the mean over the batch. With UL2 sequences
differ in their targets, but a micro-batch of whole cycles always has N of them: positions and labels are then (N,), and
positions count through the flattened batch.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # a label that torch's cross entropy leaves out


class Batch(NamedTuple):
    """Sequences, and what is to be predicted at some of their positions."""

    tokens_BS: Tensor
    """int64: the input."""
    positions_BM: Tensor | None
    """int64: where the loss is taken, ascending in each row; None: at every position, so M is S. Or (N,), see above."""
    labels_BM: Tensor
    """int64: the tokens to be predicted there."""
    segments_BS: Tensor | None = None
    """int64: tokens attend to those of their own segment only; None: to all of the sequence."""
    prefix_B: Tensor | None = None
    """int64: position q of a decoder attends to k where k <= q or k < prefix; None: where k <= q."""

    def labels_BS(self) -> Tensor:
        """The labels at every position of the sequences, IGNORED where no loss is taken: what stock models expect."""
        if self.positions_BM is None:
            return self.labels_BM
        labels_BS = torch.full_like(self.tokens_BS, IGNORED)
        if self.positions_BM.dim() == 1:
            return labels_BS.flatten().scatter(0, self.positions_BM, self.labels_BM).view_as(labels_BS)
        return labels_BS.scatter(1, self.positions_BM, self.labels_BM)

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*uploaded(self, torch.device(device)))  # type: ignore[arg-type]


def uploaded(tensors: Iterable[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """The tensors on a device; from pinned memory, so that the program need not wait for a GPU to take them."""
    return [None if t is None else _pinned(t, device).to(device, non_blocking=True) for t in tensors]


def refill(old: Iterable[Tensor | None], new: Iterable[Tensor | None]) -> None:
    """Write tensors over others of the same shapes, likewise without waiting."""
    for mine, theirs in zip(old, new, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            mine.copy_(_pinned(theirs, mine.device), non_blocking=True)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
