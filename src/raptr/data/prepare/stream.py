"""Documents in chunks: read in order, hashed, and without duplicates if asked.

A document's identity is the hash of its text. Its first eight bytes decide whether the document is held out,
so that copies of a text always lie on the same side; the next eight decide whether it is in the tokenizer's
sample; all sixteen tell it from others. `Seen` keeps these sixteen bytes of every document read so far.
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
    """Everything before this record of this input of this domain is done."""

    domain: int = 0
    input: int = 0
    record: int = 0


BEGINNING = Position()


@dataclass
class Chunk:
    """Some documents of one domain, what was left out between them, and where the reading stands after them."""

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
    """Sixteen bytes that belong to a text."""
    return hashlib.sha256(text.encode()).digest()[:DIGEST]


def chunks(
    domains: Sequence[Sequence[Input]], *, start: Position = BEGINNING, deduplicate: bool, skip_broken: bool
) -> Iterator[Chunk]:
    """All documents from `start` on; the last chunk of a domain says so, and may be empty.

    Without duplicates, what lies before `start` is read again, since the memory of it is not kept on disk.
    """
    seen = Seen() if deduplicate else None
    before = 0
    for domain, inputs in enumerate(domains):
        if seen is None and domain < start.domain:
            before += sum(one.size for one in inputs)
            continue
        chunk = Chunk(Position(domain))
        for index, one in enumerate(inputs):
            place = (domain, index)
            if seen is None and place < start[:2]:
                before += one.size
                continue
            first = start.record if seen is None and place == start[:2] else 0
            for number, (text, problem, position) in enumerate(one.records(first), first + 1):
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
                # Cut at `start` too, so that a chunk lies on one side of it.
                here = Position(domain, index, number)
                if chunk.size >= CHUNK or len(chunk.texts) >= DOCUMENTS or here == start:
                    chunk.position, chunk.read = here, before + position
                    _hash(chunk, seen)
                    if here > start:
                        yield chunk
                    chunk = Chunk(here)
            before += one.size
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
    """A set of digests at 16 bytes each: a few sorted runs, merged when two are of about the same length."""

    def __init__(self) -> None:
        self._runs: list[NDArray[np.bytes_]] = []

    def add(self, digests: Sequence[bytes]) -> list[bool]:
        """Remember the digests; which of them are here for the first time."""
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
    """The same items, read by another thread up to `depth` in advance."""
    # One thread, so the calls of `next` come one after the other and their results in order.
    for item, _ in in_order(lambda _: next(items, None), repeat(None), workers=1, depth=depth):
        if item is None:
            return
        yield item


def in_order(
    work: Callable[[T], R], items: Iterator[T], workers: int, depth: int
) -> Generator[tuple[R, T], None, None]:
    """Each item's result with the item, in order, from threads that are up to `depth` items in advance."""
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
