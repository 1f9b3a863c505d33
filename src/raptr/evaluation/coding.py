"""Tokenized examples as tables of ids, from which batches are cut on the device that holds them, such as a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

import numpy as np
import torch
from torch import Tensor

MULTIPLE = 8  # batches are padded to a multiple of this many tokens
SMALL = 256  # columns whose numbers are all below this, such as masks, take one byte per number


@final
@dataclass(frozen=True)
class Coded:
    """All examples of a file, padded on the right to the longest one; N examples, W tokens."""

    columns_NW: Mapping[str, Tensor]  # the model's inputs, by name
    targets_N: Tensor
    lengths_N: Tensor  # stays on the CPU

    def __len__(self) -> int:
        return len(self.lengths_N)

    def to(self, device: torch.device) -> "Coded":
        """Return a copy with its columns and targets on `device`."""
        columns = {name: column.to(device) for name, column in self.columns_NW.items()}
        return Coded(columns, self.targets_N.to(device), self.lengths_N)

    def batch(self, places_B: Tensor, width: int) -> dict[str, Tensor]:
        """Return the model's inputs for the examples at `places_B`, cut to `width` tokens."""
        columns = self.columns_NW.items()
        return {name: column[:, :width].index_select(0, places_B).long() for name, column in columns}

    def widths(self, order_N: Tensor, batch: int) -> list[int]:
        """Return the width of each batch of an order: its longest example, rounded up to a multiple of `MULTIPLE`.

        No batch is wider than the longest example of all.
        """
        longest = [int(part_B.max()) for part_B in torch.split(self.lengths_N[order_N], batch)]
        room = next(iter(self.columns_NW.values())).shape[1]
        return [min(-(-length // MULTIPLE) * MULTIPLE, room) for length in longest]


def coded(rows: Sequence[Mapping[str, Sequence[int]]], targets_N: Tensor, pad: int) -> Coded:
    """Put a tokenizer's rows into tables; ids are padded with `pad`, all else with 0 (no attention, the first type)."""
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
