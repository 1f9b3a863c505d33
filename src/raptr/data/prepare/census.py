"""The first reading: checks every record, counts the documents, and samples text for the tokenizer.

A document is held out if the first half of its hash is below a limit, so adding documents moves no others to the other
side. If a domain would have no held-out document, the one with its lowest hash is held out after all; if it would have
no training document, the one with its highest hash is trained on. Copies in other domains change sides with it.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from raptr.data.prepare.domains import DomainSource
from raptr.data.prepare.stream import Chunk

# Bytes of text that the tokenizer is trained on, and the most characters of one document among them.
SAMPLE = 2**26
PIECE = 2**20


@final
@dataclass(frozen=True)
class Sides:
    """Which documents are held out: those with hashes below the limit, apart from the exceptions listed."""

    limit: int
    held_out: frozenset[int] = frozenset()
    trained: frozenset[int] = frozenset()

    def holds_out(self, digest: bytes) -> bool:
        """Return whether the text with this digest is held out."""
        value = side_value(digest)
        return value in self.held_out or (value < self.limit and value not in self.trained)


def side_value(digest: bytes) -> int:
    """Return the half of a digest that decides on which side its text is, as an integer."""
    return int.from_bytes(digest[:8], "little")


@final
@dataclass
class Count:
    """Counts of the first reading in one domain, with its lowest and highest hash."""

    documents: int = 0
    held_out: int = 0  # those among them that occur in given held-out text; 0 if none was given
    broken: int = 0
    problem: str = ""
    lowest: int = 2**64
    highest: int = -1

    def add(self, chunk: Chunk, given: Sides | None = None) -> None:
        values = [side_value(digest) for digest in chunk.digests]
        self.documents += len(values)
        self.held_out += sum(map(given.holds_out, chunk.digests)) if given else 0
        self.broken += chunk.broken
        self.problem = self.problem or chunk.problem
        self.lowest, self.highest = min([self.lowest, *values]), max([self.highest, *values])


@final
@dataclass
class Sample:
    """The texts with the lowest hashes that together reach `limit` bytes, whatever the order of reading."""

    limit: int = SAMPLE
    size: int = 0
    heap: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)

    def add(self, digest: bytes, text: str) -> None:
        """Add a text if its hash is low enough; drop those with the highest while the rest still reaches `limit`."""
        key = -int.from_bytes(digest[8:], "little")
        if digest in self.known or (self.size >= self.limit and key < self.heap[0][0]):
            return
        piece = text[:PIECE].encode()
        self.known.add(digest)
        heapq.heappush(self.heap, (key, digest, piece))
        self.size += len(piece)
        while self.size - len(self.heap[0][2]) >= self.limit:
            _, gone, piece = heapq.heappop(self.heap)
            self.known.remove(gone)
            self.size -= len(piece)

    def texts(self, sides: Sides) -> Iterator[str]:
        """Yield the training documents of the sample; held-out text never reaches the tokenizer."""
        for _, digest, piece in sorted(self.heap):
            if not sides.holds_out(digest):
                yield piece.decode()


def given_sides(domains: Sequence[DomainSource], chunks: Iterator[Chunk]) -> Sides:
    """Return the split that holds out the texts in `chunks`; raise a ValueError that names a domain without any."""
    values: set[int] = set()
    counts = [Count() for _ in domains]
    domain = 0
    for chunk in chunks:
        counts[domain].add(chunk)
        values.update(map(side_value, chunk.digests))
        if chunk.last:
            if not counts[domain].documents:
                raise ValueError(
                    f"domain {domains[domain].name}: the text to hold out, {_paths(domains[domain].valid)}, has no "
                    f"document with text{_broken(counts[domain])}. Give --valid files with text, or leave it out: then "
                    "--held-out takes documents from the domain itself."
                )
            domain += 1
    return Sides(0, frozenset(values))


def take_census(
    domains: Sequence[DomainSource],
    chunks: Iterator[Chunk],
    sample: Sample | None,
    progress: Callable[[Chunk, int], None],
    given: Sides | None = None,
) -> tuple[Count, ...]:
    """Read everything once; raise a ValueError that names a domain with no documents on one side of the split."""
    counts = [Count() for _ in domains]
    domain = 0
    for chunk in chunks:
        counts[domain].add(chunk, given)
        if sample is not None:
            for digest, text in zip(chunk.digests, chunk.texts, strict=True):
                sample.add(digest, text)
        progress(chunk, sum(count.documents for count in counts))
        if chunk.last:
            if problem := _problem(domains[domain], counts[domain], given):
                raise ValueError(f"domain {domains[domain].name} {problem}")
            domain += 1
    return tuple(counts)


def sides_of(counts: Sequence[Count], limit: int) -> Sides:
    """Return the split by the limit, with the exceptions that give every domain a document on each side."""
    held_out = frozenset(count.lowest for count in counts if count.lowest >= limit)
    trained = frozenset(count.highest for count in counts if count.highest < limit)
    return Sides(limit, held_out, trained)


def _problem(domain: DomainSource, count: Count, given: Sides | None) -> str:
    """Say why a domain cannot be split in two; empty if it can."""
    broken = _broken(count)
    if not count.documents:
        return f"has no document with text{broken}: {_paths(domain.paths)}. Give --data files with text."
    if given is not None and count.held_out == count.documents:
        return (
            f"has no document to train on{broken}: all of its text also stands in the text to hold out. Give --data "
            "more text, or --valid other text."
        )
    if given is not None and not count.held_out:
        return (
            f"has no document to hold out{broken}: all of its text for it, {_paths(domain.valid)}, also stands in an "
            "earlier domain, and --deduplicate keeps it there alone. Give --valid other text."
        )
    if count.lowest < count.highest:
        return ""
    what = f"{count.documents} documents, all with the same text" if count.documents > 1 else "only one document"
    return (
        f"has {what}{broken}. At least two different ones are needed, one to train on and one to hold out. Give more "
        "text; or --documents line, which makes each line of a text file a document; or text to hold out with --valid."
    )


def _broken(count: Count) -> str:
    return f" ({count.broken} broken, the first of them: {count.problem})" if count.broken else ""


def _paths(paths: Sequence[str]) -> str:
    return ", ".join(paths) or "as given"
