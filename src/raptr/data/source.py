"""The windows of raw tokens that each step reads, as a pure function of (seed, step).

A sample is a window of W contiguous tokens from one shard of one domain. Each shard is cut into windows once, in
order. No window reaches from one shard into the next, and tokens at the end of a shard that do not fill a window are
dropped. A window may hold parts of several documents; with `isolate`, segments tell them apart. The objective decides
what is done with a window. There is no loader state to restore: a resumed run asks for the windows of its step.

Shapes: B batch, W window.
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from raptr.data.order import CYCLE, mixed, permuted, quotas
from raptr.data.store import Split, TokenStore
from raptr.hashing import Uint64s

Int64s = NDArray[np.int64]


class Windows(NamedTuple):
    """The windows of some samples."""

    tokens_BW: Int64s
    samples_B: Uint64s
    """A number for each sample, unique within its split."""
    segments_BW: Int64s | None = None
    """The document of each token, counted from 0 in each window. None unless documents are isolated."""


@final
class TrainData:
    """The training split, in an order that the seed decides; `samples` has the number of windows of each domain."""

    def __init__(self, store: TokenStore, window: int, batch: int, seed: int, *, isolate: bool = False) -> None:
        if batch < 1:
            raise ValueError(f"batch is {batch}; a step needs at least one sample")
        self._split = _Split(store, "train", window, isolate)
        self._batch, self._seed = batch, seed
        self._quotas = quotas([domain.weight for domain in store.domains])
        for domain, quota in zip(store.domains, self._quotas, strict=True):
            if quota == 0:
                raise ValueError(
                    f"domain {domain.name} has weight {domain.weight:g}, less than one sample in {CYCLE}. "
                    "Prepare the data with a larger weight, or without it."
                )
        self.samples = self._split.counts

    def windows(self, step: int, micro: int = 0, micros: int = 1) -> Windows:
        """Return the windows of an optimizer step, or one of its `micros` equal, contiguous shares (`micro` from 0)."""
        if micros < 1 or self._batch % micros:
            raise ValueError(f"micros is {micros}; it must divide the batch of {self._batch} samples")
        assert step >= 0, step
        assert 0 <= micro < micros, (micro, micros)
        share = self._batch // micros
        samples_B, domains_B, indices_B = self._order(step * self._batch + micro * share, share)
        return self._split.windows(domains_B, indices_B, samples_B)

    def digest(self, step: int) -> str:
        """Return a fingerprint of the windows that an optimizer step reads."""
        _, domains_B, indices_B = self._order(step * self._batch, self._batch)
        return hashlib.blake2b(domains_B.tobytes() + indices_B.tobytes(), digest_size=8).hexdigest()

    def _order(self, first: int, count: int) -> tuple[Uint64s, Int64s, Uint64s]:
        """Return numbers, domains, and window indices within these domains, of `count` samples from `first` on."""
        samples_B = np.arange(first, first + count, dtype=np.uint64)
        domains_B, numbers_B = mixed(samples_B, self._quotas, self._seed)
        return samples_B, domains_B, permuted(numbers_B, self.samples, self._seed, domains_B)


@final
class EvalData:
    """About `count` windows of the held-out split, evenly spaced within each domain.

    Each domain gets its share by weight, rounded, and at least one window. A domain with too little text gets less than
    its share: all of its windows.
    """

    def __init__(self, store: TokenStore, window: int, count: int, *, isolate: bool = False) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; an evaluation needs at least one window")
        self._split = _Split(store, "valid", window, isolate)
        self.domains = tuple(domain.name for domain in store.domains)
        total = sum(domain.weight for domain in store.domains)
        self.shares = {domain.name: domain.weight / total for domain in store.domains}
        self.bytes_per_token = store.bytes_per_token("valid")
        self._indices: list[Uint64s] = []
        for domain, available in zip(store.domains, self._split.counts, strict=True):
            wanted = min(available, max(1, round(count * domain.weight / total)))
            self._indices.append((np.arange(wanted) * available // wanted).astype(np.uint64))

    def __len__(self) -> int:
        return sum(len(indices) for indices in self._indices)

    def windows(self, domain: str, size: int) -> Iterator[Windows]:
        """Yield the windows of a domain in order, `size` at a time; the last batch may have fewer."""
        if size < 1:
            raise ValueError(f"size is {size}; a batch needs at least one window")
        number = self.domains.index(domain)
        indices = self._indices[number]
        for first in range(0, len(indices), size):
            indices_B = indices[first : first + size]
            domains_B = np.full(len(indices_B), number, np.int64)
            # a number that belongs to the window, however many others are evaluated
            samples_B = indices_B | np.uint64(number << 48)
            yield self._split.windows(domains_B, indices_B, samples_B)


@final
class _Split:
    """One split of all domains, with numbered windows in each domain."""

    def __init__(self, store: TokenStore, split: Split, window: int, isolate: bool) -> None:
        assert window >= 1, window
        self._window, self._isolate = window, isolate
        self._domains = [_DomainWindows(store, split, domain.name, window, isolate) for domain in store.domains]
        self.counts = tuple(domain.count for domain in self._domains)

    def windows(self, domains_B: Int64s, indices_B: Uint64s, samples_B: Uint64s) -> Windows:
        """Return the windows at these indices of their domains; `samples_B` are the numbers of the samples."""
        tokens_BW = np.empty((len(indices_B), self._window), np.int64)
        segments_BW = np.empty_like(tokens_BW) if self._isolate else None
        for number, domain in enumerate(self._domains):
            here_B = np.flatnonzero(domains_B == number)
            domain.read(indices_B[here_B].astype(np.int64), here_B, tokens_BW, segments_BW)
        return Windows(tokens_BW, samples_B, segments_BW)


@final
class _DomainWindows:
    """The shards of one domain in one split, cut into windows."""

    def __init__(self, store: TokenStore, split: Split, domain: str, window: int, isolate: bool) -> None:
        shards = store.tokens(split, domain)
        # Views into the memory maps: reading a batch touches only the pages of its rows.
        self._shards = [s[: len(s) // window * window].reshape(-1, window) for s in shards]
        self._documents = store.documents(split, domain) if isolate else ()
        self._ends = np.cumsum([len(s) for s in self._shards], dtype=np.int64)
        self.count = int(self._ends[-1]) if shards else 0
        if self.count == 0:
            longest = max((len(s) for s in shards), default=0)
            raise ValueError(
                f"the {split} split of {domain} has no window of {window} tokens ({longest} tokens in its longest "
                "shard): give a shorter length (data.length) or more text"
            )

    def read(self, index_B: Int64s, rows_B: Int64s, tokens_BW: Int64s, segments_BW: Int64s | None) -> None:
        """Write the windows at these indices into the given rows, and their segments too if `segments_BW` is given."""
        shard_B = np.searchsorted(self._ends, index_B, side="right")
        for shard in np.unique(shard_B):
            here_B = shard_B == shard
            windows = self._shards[shard]
            inside_B = index_B[here_B] - (self._ends[shard] - len(windows))
            tokens_BW[rows_B[here_B]] = windows[inside_B]
            if segments_BW is not None:
                width = windows.shape[1]
                places_BW = (inside_B[:, None] * width + np.arange(width)).astype(np.uint64)
                document_BW = np.searchsorted(self._documents[shard], places_BW, side="right")
                segments_BW[rows_B[here_B]] = document_BW - document_BW[:, :1]
