"""Write the shards of one split, from where a journal says that writing stopped."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
from numpy.typing import NDArray

from raptr.data.store import OFFSETS, Shard, Split, Tokens
from raptr.files import flush


@dataclass(frozen=True)
class Written:
    """The complete shards of a split, and how many tokens and documents of the next one are on disk."""

    shards: tuple[Shard, ...] = ()
    tokens: int = 0
    documents: int = 0


@final
class ShardWriter:
    """Writes the shards of one split of a domain, and computes their checksums while writing."""

    def __init__(
        self, folder: Path, domain: str, split: Split, limit: int, dtype: np.dtype[Any], start: Written | None = None
    ) -> None:
        self._folder, self._stem, self._limit, self._dtype = folder, f"{domain}-{split}", limit, dtype
        start = start or Written()
        self._shards = list(start.shards)
        self._tokens, self._documents = start.tokens, start.documents
        self._files: tuple[_File, _File] | None = None
        if start.documents:
            self._open(start.tokens * dtype.itemsize, start.documents * OFFSETS.itemsize)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files or ():
            file.stream.close()

    def add(self, tokens: Tokens, lengths: NDArray[np.int64]) -> None:
        """Append documents of these lengths; start a new shard where the current one would exceed its limit."""
        assert len(tokens) == lengths.sum()
        while len(lengths):
            ends = np.cumsum(lengths) + self._tokens
            fitting = int(np.searchsorted(ends, self._limit, side="right"))
            if not fitting and self._documents:
                self._close()
                continue
            fitting = max(1, fitting)  # a document longer than the limit gets its own shard
            if self._files is None:
                self._open(0, 0)
            assert self._files is not None
            size = int(ends[fitting - 1]) - self._tokens
            self._files[0].append(tokens[:size].astype(self._dtype, copy=False).tobytes())
            self._files[1].append(ends[:fitting].astype(OFFSETS).tobytes())
            self._tokens, self._documents = self._tokens + size, self._documents + fitting
            tokens, lengths = tokens[size:], lengths[fitting:]

    def sync(self) -> Written:
        """Flush everything added so far to disk, and return how much that is."""
        for file in self._files or ():
            flush(file.stream)
        return Written(tuple(self._shards), self._tokens, self._documents)

    def finish(self) -> tuple[Shard, ...]:
        """Close the last shard and return all of them."""
        if self._files:
            self._close()
        return tuple(self._shards)

    def _open(self, tokens: int, documents: int) -> None:
        path = self._folder / f"{self._stem}-{len(self._shards):05d}.tokens"
        self._files = _File(path, tokens), _File(path.with_suffix(".documents"), documents)

    def _close(self) -> None:
        assert self._files is not None
        self.sync()
        digests = [file.digest.hexdigest() for file in self._files]
        for file in self._files:
            file.stream.close()
        name = f"{self._stem}-{len(self._shards):05d}.tokens"
        self._shards.append(Shard(name, self._tokens, self._documents, *digests))
        self._files, self._tokens, self._documents = None, 0, 0


@final
class _File:
    """A file to append to, with the checksum so far; anything after its first `size` bytes is cut off."""

    def __init__(self, path: Path, size: int) -> None:
        self.digest = hashlib.sha256()
        self.stream: BinaryIO = path.open("r+b" if size else "wb")
        left = size
        while left:
            data = self.stream.read(min(left, 2**20))
            if not data:
                self.stream.close()
                raise ValueError(f"{path}: expected {size} bytes, found {size - left}; remove the folder to start over")
            self.digest.update(data)
            left -= len(data)
        # A stream needs a seek between reading and writing.
        self.stream.seek(size)
        self.stream.truncate()

    def append(self, data: bytes) -> None:
        self.digest.update(data)
        self.stream.write(data)
