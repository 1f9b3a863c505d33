"""The second reading: several threads encode the documents, and each document's tokens are written to its split.

One thread reads ahead, `workers` threads encode, and the caller's thread writes, always in the order of the reading,
so the number of threads does not change the result. Threads suffice, since encoding releases Python's global lock.

The tokenizer needs more than 100 bytes of memory for each character of its input, so long documents are encoded piece
by piece. A piece ends before white space, where byte-level BPE begins a new word in any case, so the tokens are those
of the whole document. This also holds for tokenizers that put a space in front of each text: there, a piece's own first
space is dropped.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from raptr.data.prepare.census import Sides
from raptr.data.prepare.journal import Journal
from raptr.data.prepare.request import Request
from raptr.data.prepare.stream import Chunk, Position, in_order
from raptr.data.prepare.writer import ShardWriter
from raptr.data.store import SPLITS, DomainShards, Split, Tokens

# Seconds between writes of the journal: the work that a kill can cost.
JOURNAL_EVERY = 5.0
SWITCH = "TOKENIZERS_PARALLELISM"
# The most characters of a document that are encoded at once.
PIECE = 2**16
# Patterns that find the last place for a cut, and how many characters behind the cut each must see: best before a
# single space, which every kind of tokenizer drops or keeps with the word after it; else before other white space.
CUTS = ((re.compile(r".*\S(?= \S)", re.DOTALL), 2), (re.compile(r".*\S(?=[ \t\r\n])", re.DOTALL), 1))


@dataclass(frozen=True)
class Progress:
    """How far a preparation has come; `read` and `total` are bytes of the files on disk, before decompression."""

    stage: Literal["reading", "training", "encoding"]
    read: int
    total: int
    documents: int = 0
    tokens: int = 0
    rate: float = 0.0
    """Tokens per second since this process began to encode."""


def encode(
    folder: Path,
    tokenizer: Tokenizer,
    end: str,
    dtype: np.dtype[Any],
    request: Request,
    journal: Journal,
    progress: Callable[[Progress], None],
) -> Journal:
    """Write the shards of all domains, from where the journal stands; return the last journal. `end` ends documents."""
    sides = journal.sides(request.limit)
    pieces = request.chunks(journal.position)
    encoder = Encoder(tokenizer, sides, dtype, end)
    with one_thread_each(), ExitStack() as stack:
        encoded = in_order(encoder, pieces, request.threads, depth=request.threads + 2)
        stack.enter_context(closing(encoded))
        meter = _Meter(request.total, progress, journal)
        while journal.position.domain < len(request.names):
            journal = _domain(folder, encoded, dtype, request, journal, meter)
    return journal


def _domain(
    folder: Path,
    encoded: Iterator[tuple["Encoded", Chunk]],
    dtype: np.dtype[Any],
    request: Request,
    journal: Journal,
    meter: "_Meter",
) -> Journal:
    """Write the rest of the current domain; return the journal that follows."""
    index = journal.position.domain
    name = request.names[index]
    counts = np.array(journal.counts)
    saved = time.monotonic()
    with ExitStack() as stack:
        writers: dict[Split, ShardWriter] = {}
        for split in SPLITS:
            start = journal.start(split)
            writer = ShardWriter(folder, name, split, request.shard_tokens, dtype, start)
            writers[split] = stack.enter_context(writer)
        for result, chunk in encoded:
            for split in SPLITS:
                writers[split].add(result[split].tokens, result[split].lengths)
            counts += (chunk.duplicates, chunk.broken, chunk.empty, *(result[split].bytes for split in SPLITS))
            meter.add(chunk, sum(len(side.tokens) for side in result.values()))
            if chunk.last:
                break
            if time.monotonic() - saved >= JOURNAL_EVERY:
                journal = replace(
                    journal,
                    position=chunk.position,
                    written=tuple(writers[split].sync() for split in SPLITS),
                    counts=tuple(counts.tolist()),
                )
                journal.write(folder)
                saved = time.monotonic()
        done = {split: writers[split].finish() for split in SPLITS}
    domain = DomainShards(name, 1.0, done["train"], done["valid"], *counts.tolist())
    count = domain.count("train") + domain.count("valid")
    if count != (expected := journal.documents[index]):
        raise ValueError(
            f"domain {name} had {expected} documents on the first reading and {count} on the second. Start again when "
            "nothing changes its files."
        )
    for split, side in (("train", "training"), ("valid", "held-out")):
        if not done[split]:
            raise ValueError(
                f"domain {name} has no {side} document on the second reading. Start again when nothing changes its "
                "files."
            )
    journal = replace(
        journal,
        domains=(*journal.domains, domain),
        position=Position(index + 1),
        written=Journal.written,
        counts=Journal.counts,
    )
    journal.write(folder)
    return journal


class Side(NamedTuple):
    """One split of a chunk: the tokens of its documents, the length of each document, and the text's UTF-8 bytes."""

    tokens: Tokens
    lengths: NDArray[np.int64]
    bytes: int


Encoded = dict[Split, Side]


@dataclass(frozen=True)
class Encoder:
    """Encodes chunks: turns each into the tokens of both splits, with `end` behind every document."""

    tokenizer: Tokenizer
    sides: Sides
    dtype: np.dtype[Any]
    end: str

    def __call__(self, chunk: Chunk) -> Encoded:
        """Return the chunk's tokens for each split; the chunk's texts are dropped, to free their memory."""
        end = np.array([self.tokenizer.token_to_id(self.end)], self.dtype)
        short = [text for text in chunk.texts if len(text) <= PIECE]
        whole = iter(self._ids(short))
        encoded: dict[Split, list[list[Tokens]]] = {split: [] for split in SPLITS}
        sizes = dict.fromkeys(SPLITS, 0)
        for text, digest in zip(chunk.texts, chunk.digests, strict=True):
            parts = [next(whole)] if len(text) <= PIECE else self._long(text)
            split: Split = "valid" if self.sides.holds_out(digest) else "train"
            encoded[split].append([*parts, end])
            sizes[split] += len(text.encode())
        chunk.texts.clear()
        result: Encoded = {}
        for split, documents in encoded.items():
            lengths = np.array([sum(map(len, parts)) for parts in documents], np.int64)
            tokens = [part for parts in documents for part in parts]
            result[split] = Side(np.concatenate([end[:0], *tokens]), lengths, sizes[split])
        return result

    def _long(self, text: str) -> list[Tokens]:
        first, *others = pieces(text)
        if self._adds_a_space:
            others = [piece.removeprefix(" ") for piece in others]
        return [self._ids([piece])[0] for piece in (first, *others)]

    @cached_property
    def _adds_a_space(self) -> bool:
        """Whether the tokenizer puts a space in front of each text, as Llama's first tokenizers do."""
        whole, first, bare, spaced = (one.tolist() for one in self._ids(["a b", "a", "b", " b"]))
        return bool(whole == first + bare != first + spaced)

    def _ids(self, texts: list[str]) -> list[Tokens]:
        # The fast variant returns the same ids without offsets into the text.
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, self.dtype) for one in encodings]


def pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most PIECE characters, cut before white space if possible."""
    start = 0
    while len(text) - start > PIECE:
        limit = start + PIECE
        matches = (cut.match(text, start, limit + seen) for cut, seen in CUTS)
        end = next((match.end() for match in matches if match), limit)
        yield text[start:end]
        start = end
    yield text[start:]


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Turn off the tokenizer's own threads, since each worker is a thread already."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


class _Meter:
    """Reports the progress of the encoding."""

    def __init__(self, total: int, progress: Callable[[Progress], None], journal: Journal) -> None:
        self._total, self._progress, self._started = total, progress, time.monotonic()
        written: Sequence[Any] = [shard for domain in journal.domains for shard in domain.train + domain.valid]
        written = [*written, *journal.written, *(shard for one in journal.written for shard in one.shards)]
        self._documents = sum(one.documents for one in written)
        self._tokens = self._before = sum(one.tokens for one in written)

    def add(self, chunk: Chunk, tokens: int) -> None:
        self._documents += len(chunk.digests)
        self._tokens += tokens
        seconds = max(1e-9, time.monotonic() - self._started)
        rate = (self._tokens - self._before) / seconds
        self._progress(Progress("encoding", chunk.read, self._total, self._documents, self._tokens, rate))
