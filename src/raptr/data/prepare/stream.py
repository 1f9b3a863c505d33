"""Documents in chunks: read in order, hashed, and deduplicated if requested.

A document is identified by the hash of its text, of 16 bytes. The first eight decide whether the document is held out,
so copies of a text always lie on the same side; the other eight decide whether it is in the tokenizer's sample. All 16
tell documents apart: `Seen` keeps them for every document read so far.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from raptr.data.prepare.reading import Input

# Characters per chunk: enough work for a thread, too little to matter in memory.
CHUNK = 2**18
DOCUMENTS = 4096
DIGEST = 16

T = TypeVar("T")
R = TypeVar("R")


class Position(NamedTuple):
    """A place in the reading: a record of an input of a domain. Everything before it is done."""

    domain: int = 0
    input: int = 0
    record: int = 0


BEGINNING = Position()


@dataclass
class Chunk:
    """Consecutive documents of one domain, counts of what was left out between them, and the position behind them."""

    position: Position
    read: int = 0
    last: bool = False
    texts: list[str] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    size: int = 0
    duplicates: int = 0
    broken: int = 0
    empty: int = 0
    problem: str = ""


def digest_of(text: str) -> bytes:
    """Return the 16 bytes that identify a text."""
    return hashlib.sha256(text.encode()).digest()[:DIGEST]


def chunks(
    domains: Sequence[Sequence[Input]], *, start: Position = BEGINNING, deduplicate: bool, skip_broken: bool
) -> Iterator[Chunk]:
    """Yield the documents from `start` on, in chunks. The last chunk of each domain is marked, and may be empty.

    With `deduplicate`, everything before `start` is read again, since the digests of earlier documents are not stored.
    """
    seen = Seen() if deduplicate else None
    before = 0
    for domain, inputs in enumerate(domains):
        if seen is None and domain < start.domain:
            before += sum(source.size for source in inputs)
            continue
        chunk = Chunk(Position(domain))
        for index, source in enumerate(inputs):
            place = (domain, index)
            if seen is None and place < start[:2]:
                before += source.size
                continue
            first = start.record if seen is None and place == start[:2] else 0
            for number, (text, problem, position) in enumerate(source.records(first), first + 1):
                if problem:
                    if not skip_broken:
                        raise ValueError(f"{problem}. Correct the file, or leave such text out with --skip-broken.")
                    chunk.broken += 1
                    chunk.problem = chunk.problem or problem
                elif not text or text.isspace():
                    chunk.empty += 1
                else:
                    chunk.texts.append(text)
                    chunk.size += len(text)
                # Also cut at `start`, so that no chunk reaches across it.
                here = Position(domain, index, number)
                if chunk.size >= CHUNK or len(chunk.texts) >= DOCUMENTS or here == start:
                    chunk.position, chunk.read = here, before + position
                    _hash(chunk, seen)
                    if here > start:
                        yield chunk
                    chunk = Chunk(here)
            before += source.size
        chunk.position, chunk.read, chunk.last = Position(domain + 1), before, True
        _hash(chunk, seen)
        if chunk.position > start:
            yield chunk


def _hash(chunk: Chunk, seen: "Seen | None") -> None:
    chunk.digests = [digest_of(text) for text in chunk.texts]
    if seen is not None and chunk.texts:
        new = seen.add(chunk.digests)
        chunk.duplicates = len(new) - sum(new)
        chunk.texts = [text for text, kept in zip(chunk.texts, new, strict=True) if kept]
        chunk.digests = [digest for digest, kept in zip(chunk.digests, new, strict=True) if kept]


@final
class Seen:
    """A set of digests, 16 bytes each, in a few sorted arrays; two are merged when they have about the same length."""

    def __init__(self) -> None:
        self._runs: list[NDArray[np.bytes_]] = []

    def add(self, digests: Sequence[bytes]) -> list[bool]:
        """Add the digests; return for each whether it is new. Of equal digests, only the first is."""
        unique, index = np.unique(np.frombuffer(b"".join(digests), f"S{DIGEST}"), return_index=True)
        new = np.ones(len(unique), np.bool_)
        for run in self._runs:
            place = np.searchsorted(run, unique)
            new &= (place == len(run)) | (run[np.minimum(place, len(run) - 1)] != unique)
        if new.any():
            self._runs.append(unique[new])
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            merged.sort()
            self._runs.append(merged)
        mask = np.zeros(len(digests), np.bool_)
        mask[index[new]] = True
        return list(map(bool, mask))


def ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the items in order, while another thread reads up to `depth` of them in advance."""
    # With one thread, the calls of `next` follow one another, so the order is kept.
    for item, _ in in_order(lambda _: next(items, None), repeat(None), workers=1, depth=depth):
        if item is None:
            return
        yield item


def in_order(
    work: Callable[[T], R], items: Iterator[T], workers: int, depth: int
) -> Generator[tuple[R, T], None, None]:
    """Yield each item's result with the item, in order, while threads work on up to `depth` items in advance."""
    pending: deque[tuple[Future[R], T]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                pending.append((pool.submit(work, item), item))
                if len(pending) > depth:
                    future, done = pending.popleft()
                    yield future.result(), done
            while pending:
                future, done = pending.popleft()
                yield future.result(), done
        finally:
            for future, _ in pending:
                future.cancel()
