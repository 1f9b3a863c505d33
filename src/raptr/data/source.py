"""batch(step): what a step reads, as a pure function of (seed, step).

A sample is [CLS] and S-1 contiguous tokens of one shard of one domain. The shards are cut into such windows
once, in order; a window never reaches from one shard into the next, and a shard's tail that fills none is
dropped. Documents share windows: [SEP] stands between them. With `isolate`, a batch says which tokens belong
together, and attention stays inside documents. There is no loader to rewind: a resumed run asks for the step
it is at.

Shapes: B batch, S sequence, M masked positions.
"""

from collections.abc import Iterator
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from raptr.data.batch import Batch
from raptr.data.masking import Int64s, mask, masked_count
from raptr.data.order import CYCLE, mixed, permuted, quotas
from raptr.data.store import Split, TokenStore
from raptr.hashing import Stream, Uint64s


@final
class TrainData:
    """The training split, in an order that a seed decides; `samples` counts the windows of each domain."""

    def __init__(self, store: TokenStore, length: int, batch: int, seed: int, *, isolate: bool = False) -> None:
        if batch < 1:
            raise ValueError(f"batch is {batch}; a step needs at least one sample")
        self._windows = _Windows(store, "train", length, isolate)
        self._batch, self._seed = batch, seed
        self._quotas = quotas([domain.weight for domain in store.domains])
        for domain, quota in zip(store.domains, self._quotas, strict=True):
            if quota == 0:
                raise ValueError(
                    f"domain {domain.name} has weight {domain.weight:g}, less than one sample in {CYCLE}. "
                    "Prepare the data with a larger weight, or without it."
                )
        self.samples = self._windows.counts

    def batch(self, step: int, micro: int = 0, micros: int = 1) -> Batch:
        """The batch of an optimizer step, or the contiguous share `micro` of `micros` of it."""
        if micros < 1 or self._batch % micros:
            raise ValueError(f"micros is {micros}; it must divide the batch of {self._batch} samples")
        assert step >= 0, step
        assert 0 <= micro < micros, (micro, micros)
        share = self._batch // micros
        first = step * self._batch + micro * share
        samples_B = np.arange(first, first + share, dtype=np.uint64)
        domains_B, numbers_B = mixed(samples_B, self._quotas, self._seed)
        indices_B = permuted(numbers_B, self.samples, self._seed, domains_B)
        return self._windows.batch(domains_B, indices_B, samples_B, self._seed, "mask")


@final
class EvalData:
    """At most `count` windows of the held-out split, spread evenly over each domain's, masked alike for any seed.

    Every domain has its share by weight, and at least one window; one with too little text has fewer than its share.
    """

    def __init__(self, store: TokenStore, length: int, count: int, *, isolate: bool = False) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; an evaluation needs at least one window")
        self._windows = _Windows(store, "valid", length, isolate)
        self.domains = tuple(domain.name for domain in store.domains)
        total = sum(domain.weight for domain in store.domains)
        self.shares = {domain.name: domain.weight / total for domain in store.domains}
        self._indices: list[Uint64s] = []
        for domain, available in zip(store.domains, self._windows.counts, strict=True):
            wanted = min(available, max(1, round(count * domain.weight / total)))
            self._indices.append((np.arange(wanted) * available // wanted).astype(np.uint64))

    def __len__(self) -> int:
        """How many windows there are."""
        return sum(len(indices) for indices in self._indices)

    def batches(self, domain: str, size: int) -> Iterator[Batch]:
        """The windows of a domain in order, `size` at a time; the last batch may be smaller."""
        if size < 1:
            raise ValueError(f"size is {size}; a batch needs at least one window")
        number = self.domains.index(domain)
        indices = self._indices[number]
        for first in range(0, len(indices), size):
            indices_B = indices[first : first + size]
            domains_B = np.full(len(indices_B), number, np.int64)
            # a window's mask is its own, however many others are judged beside it
            samples_B = indices_B | np.uint64(number << 48)
            yield self._windows.batch(domains_B, indices_B, samples_B, 0, "evaluation")


@final
class _Windows:
    """A split as numbered windows of S-1 tokens, domain by domain."""

    def __init__(self, store: TokenStore, split: Split, length: int, isolate: bool) -> None:
        masked_count(length)  # refuses a length that is too short to be masked
        self._vocabulary, self._length, self._isolate = store.vocabulary, length, isolate
        self._domains = [_DomainWindows(store, split, domain.name, length) for domain in store.domains]
        self.counts = tuple(domain.count for domain in self._domains)

    def batch(
        self, domains_B: NDArray[np.int64], indices_B: Uint64s, samples_B: Uint64s, seed: int, stream: Stream
    ) -> Batch:
        """The windows at these indices of their domains, masked as the samples of these numbers."""
        tokens_BS = np.full((len(indices_B), self._length), self._vocabulary.cls, np.int64)
        for number, domain in enumerate(self._domains):
            here_B = np.flatnonzero(domains_B == number)
            domain.read(indices_B[here_B].astype(np.int64), tokens_BS, here_B)
        inputs_BS, positions_BM, labels_BM = mask(
            tokens_BS, samples_B, seed=seed, stream=stream, vocabulary=self._vocabulary
        )
        batch = Batch(*map(torch.from_numpy, (inputs_BS, positions_BM, labels_BM)))
        if self._isolate:
            ends_BS = tokens_BS == self._vocabulary.sep
            # [SEP] ends its own document
            return batch._replace(segments_BS=torch.from_numpy(np.cumsum(ends_BS, axis=1) - ends_BS))
        return batch


@final
class _DomainWindows:
    """One domain's shards of a split, cut into windows."""

    def __init__(self, store: TokenStore, split: Split, domain: str, length: int) -> None:
        width = length - 1
        shards = store.tokens(split, domain)
        # Views into the memory maps: a batch touches only the pages that its rows lie on.
        self._shards = [s[: len(s) // width * width].reshape(-1, width) for s in shards]
        self._ends = np.cumsum([len(s) for s in self._shards], dtype=np.int64)
        self.count = int(self._ends[-1]) if shards else 0
        if self.count == 0:
            longest = max((len(s) for s in shards), default=0)
            raise ValueError(
                f"length is {length}; the {split} split of {domain} has no window of {width} tokens "
                f"({longest} tokens in its longest shard): give a shorter length or more text"
            )

    def read(self, index_B: Int64s, into_BS: Int64s, rows_B: NDArray[np.int64]) -> None:
        """Write the windows at these indices into the given rows, behind [CLS]."""
        shard_B = np.searchsorted(self._ends, index_B, side="right")
        for shard in np.unique(shard_B):
            here_B = shard_B == shard
            windows = self._shards[shard]
            into_BS[rows_B[here_B], 1:] = windows[index_B[here_B] - (self._ends[shard] - len(windows))]
