"""Examples as tables of ids that are cut into batches where they lie, on a GPU too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

import numpy as np
import torch
from torch import Tensor

MULTIPLE = 8  # batches are padded to a multiple of so many tokens
SMALL = 256  # columns of smaller numbers, such as masks, take one byte each


@final
@dataclass(frozen=True)
class Coded:
    """All examples of a file, padded on the right to the longest one; N examples, W tokens."""

    columns_NW: Mapping[str, Tensor]  # what the model takes, by name
    targets_N: Tensor
    lengths_N: Tensor  # stays on the CPU

    def __len__(self) -> int:
        return len(self.lengths_N)

    def to(self, device: torch.device) -> "Coded":
        """The same tables on a device."""
        columns = {name: column.to(device) for name, column in self.columns_NW.items()}
        return Coded(columns, self.targets_N.to(device), self.lengths_N)

    def batch(self, places_B: Tensor, width: int) -> dict[str, Tensor]:
        """The inputs of these examples, so many tokens wide."""
        columns = self.columns_NW.items()
        return {name: column[:, :width].index_select(0, places_B).long() for name, column in columns}

    def widths(self, order_N: Tensor, batch: int) -> list[int]:
        """How wide each batch of an order is: its longest example, then up to a multiple of `MULTIPLE`.

        None is wider than the longest example of all.
        """
        longest = [int(part_B.max()) for part_B in torch.split(self.lengths_N[order_N], batch)]
        room = next(iter(self.columns_NW.values())).shape[1]
        return [min(-(-one // MULTIPLE) * MULTIPLE, room) for one in longest]


def coded(rows: Sequence[Mapping[str, Sequence[int]]], targets_N: Tensor, pad: int) -> Coded:
    """The rows of a tokenizer as tables; ids are padded with `pad`, all else (no attention, the first type) with 0."""
    columns = {}
    for name in rows[0]:
        lengths = np.fromiter((len(row[name]) for row in rows), np.int64, len(rows))
        values = np.fromiter(chain.from_iterable(row[name] for row in rows), np.int32, int(lengths.sum()))
        kind = np.uint8 if min(values.min(), pad) >= 0 and max(values.max(), pad) < SMALL else np.int32
        table = np.full((len(rows), int(lengths.max())), pad if name == "input_ids" else 0, kind)
        table[np.arange(table.shape[1]) < lengths[:, None]] = values
        columns[name] = torch.from_numpy(table)
        if name == "input_ids":
            counted = torch.from_numpy(lengths)
    return Coded(columns, targets_N, counted)
