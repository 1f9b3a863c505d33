"""Text to tokens: trains the tokenizer, splits the documents, and writes the folder that `store.py` reads.

The documents are read twice, once for the tokenizer and once to be encoded, and are never all in memory. A
document is held out when the hash of its name is low (about 1 in 50), so adding documents moves none of the
others to the other side. The folder is written under another name next to its place, synced to disk and
renamed, so a folder that is there is whole.
"""

import hashlib
import platform
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from tokenizers import Tokenizer

from raptr.data.corpus import Document, builtin
from raptr.data.store import (
    DTYPES,
    FORMAT,
    MANIFEST,
    SPLITS,
    TOKENIZER,
    Manifest,
    Split,
    TokenStore,
    dtype_for,
    open_store,
    sha256_of,
)
from raptr.data.tokenizer import train, vocabulary_of
from raptr.data.writer import ShardWriter, sync_file, sync_folder

HELD_OUT = 2**64 // 50
SHARD_TOKENS = 2**27
# Characters encoded at once: enough to keep every core busy, little enough to be nothing in memory.
CHUNK = 2**20

Documents = Callable[[], Iterable[Document]]
Progress = Callable[[int, int], None]


def prepare_builtin(folder: Path, vocabulary: int, progress: Progress | None = None) -> TokenStore:
    """The built-in corpus in its place under `folder`: reused when it is there and whole, else built."""
    origin = f"python{platform.python_version()}-vocabulary{vocabulary}-format{FORMAT}"
    target = folder / f"builtin-{origin}"
    if target.exists():
        try:
            store = open_store(target)
            store.verify()
        except ValueError:
            # It is a cache and only ours: what is damaged is made again.
            shutil.rmtree(target)
        else:
            return store
    return prepare(target, builtin, vocabulary, origin=origin, progress=progress)


def prepare(
    folder: Path,
    documents: Documents,
    vocabulary: int,
    *,
    shard_tokens: int = SHARD_TOKENS,
    origin: str = "",
    progress: Progress | None = None,
) -> TokenStore:
    """Write the documents as a new folder; `progress` is told (documents encoded, documents in all).

    `documents` is called twice and must give the same documents in the same order; empty ones are left out.
    A shard holds whole documents: at most `shard_tokens` tokens, or a single document that is longer.
    """
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens is {shard_tokens}; a shard must hold at least one token")
    if folder.exists():
        raise ValueError(f"{folder} is there already; prepared data goes into a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        _write(partial, documents, vocabulary, shard_tokens, origin, progress)
        try:
            partial.rename(folder)
        except OSError:
            # Another process may have been first. What it wrote is as good when it is the same.
            if not folder.exists() or open_store(folder).fingerprint != open_store(partial).fingerprint:
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return open_store(folder)


def name_hash(name: str) -> int:
    """64 bits that belong to a document's name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def _write(
    folder: Path,
    documents: Documents,
    vocabulary: int,
    shard_tokens: int,
    origin: str,
    progress: Progress | None,
) -> None:
    census = _Census()
    tokenizer = train(census.texts(documents()), vocabulary)
    threshold = census.threshold()
    facts = vocabulary_of(tokenizer)
    (folder / TOKENIZER).write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8", newline="\n")
    dtype = dtype_for(facts.size)
    with ExitStack() as stack:
        writers = {split: ShardWriter(folder, split, shard_tokens) for split in SPLITS}
        for writer in writers.values():
            stack.enter_context(writer)
        done = 0
        for chunk in _chunks(_with_text(documents())):
            for document, ids in zip(chunk, _encode(tokenizer, chunk), strict=True):
                split: Split = "valid" if name_hash(document.name) < threshold else "train"
                writers[split].add(np.array([*ids, facts.sep], DTYPES[dtype]))
            done += len(chunk)
            if progress:
                progress(done, census.count)
        shards = {split: writer.finish() for split, writer in writers.items()}
    if done != census.count:
        raise ValueError(f"documents: expected the same {census.count} on the second reading, found {done}")
    sync_file(folder / TOKENIZER)
    manifest = Manifest(
        vocabulary=facts.size,
        dtype=dtype,
        origin=origin,
        tokenizer_sha256=sha256_of(folder / TOKENIZER),
        train=shards["train"],
        valid=shards["valid"],
    )
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8", newline="\n")
    sync_file(folder / MANIFEST)
    sync_folder(folder)


@final
@dataclass
class _Census:
    """Counts the documents that pass by, and finds the lowest and the highest hash of their names."""

    count: int = 0
    lowest: int = 2**64
    highest: int = -1

    def texts(self, documents: Iterable[Document]) -> Iterator[str]:
        for document in _with_text(documents):
            value = name_hash(document.name)
            self.count += 1
            self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
            yield document.text

    def threshold(self) -> int:
        """Hashes below it are held out: a fiftieth, moved where needed so that neither side is empty."""
        if self.count < 2:
            raise ValueError(
                f"documents: {self.count} with text were given; at least 2 are needed, one to train on "
                "and one to hold out"
            )
        if self.lowest == self.highest:
            raise ValueError(f"documents: all {self.count} have the same name; names must differ")
        return max(min(HELD_OUT, self.highest), self.lowest + 1)


def _with_text(documents: Iterable[Document]) -> Iterator[Document]:
    return (document for document in documents if document.text)


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encode(tokenizer: Tokenizer, chunk: list[Document]) -> Iterator[list[int]]:
    # The fast variant gives the same ids and leaves out the offsets into the text.
    encodings = tokenizer.encode_batch_fast([document.text for document in chunk], add_special_tokens=False)
    return (encoding.ids for encoding in encodings)
