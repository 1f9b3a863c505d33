"""What one training or evaluation step reads.

Shapes: B batch, S sequence, M masked positions. M is the same for every sequence of a given length, so all
shapes are static and the mean over micro-batches is the mean over the batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Masked sequences, and what stood at the masked positions."""

    tokens_BS: Tensor
    """int64: the input, with some of its tokens masked."""
    positions_BM: Tensor
    """int64: where the loss is taken, ascending in each row."""
    labels_BM: Tensor
    """int64: the original tokens at these positions."""
    segments_BS: Tensor | None = None
    """int64: tokens attend to those of their own segment only; None: to all of the sequence."""

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return Batch(*(None if tensor is None else tensor.to(device) for tensor in self))  # type: ignore[arg-type]
