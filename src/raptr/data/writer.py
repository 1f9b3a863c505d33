"""Writes the shards of one split, and puts files and folders on the disk itself."""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO, final

import numpy as np

from raptr.data.store import OFFSETS, Shard, Split, Tokens


@final
class ShardWriter:
    """Writes the shards of one split, with checksums taken on the way."""

    def __init__(self, folder: Path, split: Split, limit: int) -> None:
        self.folder, self.split, self.limit = folder, split, limit
        self.shards: list[Shard] = []
        self.file: BinaryIO | None = None
        self.ends: list[int] = []
        self.digest = hashlib.sha256()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *error: object) -> None:
        if self.file:
            self.file.close()

    def add(self, tokens: Tokens) -> None:
        """Append a document, in a new shard when the current one would grow over its limit."""
        if self.ends and self.ends[-1] + len(tokens) > self.limit:
            self._close()
        if self.file is None:
            self.file = (self.folder / self._name()).open("wb")
        self.ends.append((self.ends[-1] if self.ends else 0) + len(tokens))
        self.digest.update(tokens.tobytes())
        self.file.write(tokens.tobytes())

    def finish(self) -> tuple[Shard, ...]:
        """Close the last shard and list them all."""
        if self.file:
            self._close()
        return tuple(self.shards)

    def _name(self) -> str:
        return f"{self.split}-{len(self.shards):05d}.tokens"

    def _close(self) -> None:
        assert self.file is not None
        flush(self.file)
        self.file.close()
        ends = np.array(self.ends, OFFSETS).tobytes()
        shard = Shard(
            file=self._name(),
            tokens=self.ends[-1],
            documents=len(self.ends),
            tokens_sha256=self.digest.hexdigest(),
            documents_sha256=hashlib.sha256(ends).hexdigest(),
        )
        with (self.folder / shard.documents_file).open("wb") as file:
            file.write(ends)
            flush(file)
        self.shards.append(shard)
        self.file, self.ends, self.digest = None, [], hashlib.sha256()


def flush(file: BinaryIO) -> None:
    """Put a file that is being written on the disk itself."""
    file.flush()
    os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Put a closed file on the disk itself."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Put a folder's list of names on the disk itself."""
    # Windows has no way to sync a folder, and does not need it.
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
