"""The tensors that one training or evaluation step reads.

Shapes: B batch, S sequence, M targets: the positions of a sequence where the loss is taken. M is the same for every
sequence of a given length, so all shapes are static and the mean over micro-batches is the mean over the batch. With
UL2, sequences differ in their number of targets, but a micro-batch of whole cycles always has N targets in all:
positions and labels then have shape (N,), and the positions index the flattened batch.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # the label that torch's cross entropy skips


class Batch(NamedTuple):
    """Input sequences, with the labels to predict at some or all of their positions."""

    tokens_BS: Tensor
    """int64: the input tokens."""
    positions_BM: Tensor | None
    """int64: where the loss is taken, ascending in each row. None: at every position, so M is S. With UL2 (N,)."""
    labels_BM: Tensor
    """int64: the tokens to predict at these positions."""
    segments_BS: Tensor | None = None
    """int64: tokens attend only to tokens of the same segment. None: segments do not restrict attention."""
    prefix_B: Tensor | None = None
    """int64: in a decoder, position q attends to k where k <= q or k < prefix. None: only where k <= q."""

    def labels_BS(self) -> Tensor:
        """Return labels for every position, IGNORED where no loss is taken: the form that stock models expect."""
        if self.positions_BM is None:
            return self.labels_BM
        labels_BS = torch.full_like(self.tokens_BS, IGNORED)
        if self.positions_BM.dim() == 1:
            return labels_BS.flatten().scatter(0, self.positions_BM, self.labels_BM).view_as(labels_BS)
        return labels_BS.scatter(1, self.positions_BM, self.labels_BM)

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*uploaded(self, torch.device(device)))  # type: ignore[arg-type]


def uploaded(tensors: Iterable[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Move tensors to a device. For a GPU they are pinned first, so that the program does not wait for the copy."""
    return [None if t is None else _pinned(t, device).to(device, non_blocking=True) for t in tensors]


def refill(old: Iterable[Tensor | None], new: Iterable[Tensor | None]) -> None:
    """Copy the values of `new` into the `old` tensors, which have the same shapes, likewise without waiting."""
    for target, source in zip(old, new, strict=True):
        assert (target is None) == (source is None)
        if target is not None and source is not None:
            target.copy_(_pinned(source, target.device), non_blocking=True)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
