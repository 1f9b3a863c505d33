"""batch(step): what a step reads, as a pure function of (seed, step).

A sample is [CLS] and S-1 contiguous tokens of one shard. The shards are cut into such windows once, in
order; a window never reaches from one shard into the next, and a shard's tail that fills none is dropped.
Documents share windows: [SEP] stands between them. There is no loader to rewind: a resumed run asks for the
step it is at.

Shapes: B batch, S sequence, M masked positions.
"""

from collections.abc import Iterator
from typing import final

import numpy as np
import torch

from raptr.data.batch import Batch
from raptr.data.masking import Int64s, mask, masked_count
from raptr.data.order import permuted
from raptr.data.store import Split, TokenStore
from raptr.hashing import Stream, Uint64s


@final
class TrainData:
    """The training split, in an order that a seed decides; `samples` windows make an epoch."""

    def __init__(self, store: TokenStore, length: int, batch: int, seed: int) -> None:
        if batch < 1:
            raise ValueError(f"batch is {batch}; a step needs at least one sample")
        self._windows = _Windows(store, "train", length)
        self._batch, self._seed = batch, seed
        self.samples = self._windows.count

    def batch(self, step: int, micro: int = 0, micros: int = 1) -> Batch:
        """The batch of an optimizer step, or the contiguous share `micro` of `micros` of it."""
        if micros < 1 or self._batch % micros:
            raise ValueError(f"micros is {micros}; it must divide the batch of {self._batch} samples")
        assert step >= 0, step
        assert 0 <= micro < micros, (micro, micros)
        share = self._batch // micros
        first = step * self._batch + micro * share
        samples_B = np.arange(first, first + share, dtype=np.uint64)
        indices_B = permuted(samples_B, self.samples, self._seed)
        return self._windows.batch(indices_B, samples_B, self._seed, "mask")


@final
class EvalData:
    """At most `count` windows spread evenly over the held-out split, masked alike whatever a run's seed."""

    def __init__(self, store: TokenStore, length: int, count: int) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; an evaluation needs at least one window")
        self._windows = _Windows(store, "valid", length)
        available = self._windows.count
        self._count = min(count, available)
        self._indices = (np.arange(self._count) * available // self._count).astype(np.uint64)

    def __len__(self) -> int:
        """How many windows there are."""
        return self._count

    def batches(self, size: int) -> Iterator[Batch]:
        """All windows in order, `size` at a time; the last batch may be smaller."""
        if size < 1:
            raise ValueError(f"size is {size}; a batch needs at least one window")
        for first in range(0, self._count, size):
            indices_B = self._indices[first : first + size]
            yield self._windows.batch(indices_B, indices_B, 0, "evaluation")


@final
class _Windows:
    """A split as numbered windows of S-1 tokens."""

    def __init__(self, store: TokenStore, split: Split, length: int) -> None:
        masked_count(length)  # refuses a length that is too short to be masked
        self._vocabulary = store.vocabulary
        self._length = length
        width = length - 1
        shards = store.tokens(split)
        # Views into the memory maps: a batch touches only the pages that its rows lie on.
        self._shards = [s[: len(s) // width * width].reshape(-1, width) for s in shards]
        self._ends = np.cumsum([len(s) for s in self._shards], dtype=np.int64)
        self.count = int(self._ends[-1]) if shards else 0
        if self.count == 0:
            longest = max((len(s) for s in shards), default=0)
            raise ValueError(
                f"length is {length}; the {split} split has no window of {width} tokens "
                f"({longest} tokens in its longest shard): give a shorter length or more text"
            )

    def batch(self, indices_B: Uint64s, samples_B: Uint64s, seed: int, stream: Stream) -> Batch:
        """The windows at these indices, masked as the samples of these numbers."""
        masked = mask(self._read(indices_B), samples_B, seed=seed, stream=stream, vocabulary=self._vocabulary)
        return Batch(*(torch.from_numpy(array) for array in masked))

    def _read(self, indices_B: Uint64s) -> Int64s:
        index_B = indices_B.astype(np.int64)
        tokens_BS = np.full((len(index_B), self._length), self._vocabulary.cls, np.int64)
        shard_B = np.searchsorted(self._ends, index_B, side="right")
        for shard in np.unique(shard_B):
            here_B = shard_B == shard
            rows = self._shards[shard]
            tokens_BS[here_B, 1:] = rows[index_B[here_B] - (self._ends[shard] - len(rows))]
        return tokens_BS
