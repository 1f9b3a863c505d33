"""Tokens on disk: a folder that is written once, is complete whenever it exists, and is memory-mapped.

    tokenizer.json
    tokenizer_config.json        the tokenizer's names of the special tokens; only if they differ from ours
    wiki-train-00000.tokens      the documents' tokens, each document with an end token; little-endian integers
    wiki-train-00000.documents   where each document ends in that file, in tokens; little-endian uint64
    wiki-valid-00000.tokens, wiki-valid-00000.documents, and so on for every shard and every domain
    data.json                    written last: describes the other files, with checksums and a fingerprint
    .verified.json               which files passed verification (verification.py); not part of the data

A domain is a named kind of text with a weight: its share of the mixture, relative to the other weights. Opening a
folder compares file sizes with data.json, which is cheap and detects incomplete copies. `verify` compares checksums,
and reads only what has changed since the last time. `raptr.data.prepare` writes such folders.
"""

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from raptr.data.tokenizer import BERT, CONFIG, Vocabulary, load, read_vocabulary
from raptr.data.verification import first_damaged
from raptr.hashing import Uint64s

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 2
MANIFEST = "data.json"
TOKENIZER = "tokenizer.json"
DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
OFFSETS = np.dtype("<u8")
# Fields of a domain that do not affect training: the fingerprint leaves them out, and older folders lack some.
BESIDE = ("duplicates", "broken", "empty", "train_bytes", "valid_bytes")

Split = Literal["train", "valid"]
SPLITS: tuple[Split, ...] = ("train", "valid")
Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Shard:
    """A file of tokens and its file of document ends, as data.json describes them."""

    file: str
    tokens: int
    documents: int
    tokens_sha256: str
    documents_sha256: str

    @property
    def documents_file(self) -> str:
        """The name of the file with the document ends."""
        return str(Path(self.file).with_suffix(".documents"))


@dataclass(frozen=True)
class DomainShards:
    """A domain: its weight and shards, how many documents were left out, and the UTF-8 bytes of each split."""

    name: str
    weight: float
    train: tuple[Shard, ...]
    valid: tuple[Shard, ...]
    duplicates: int = 0
    broken: int = 0
    empty: int = 0
    train_bytes: int | None = None
    valid_bytes: int | None = None

    def shards(self, split: Split) -> tuple[Shard, ...]:
        """Return the shards of a split, in order."""
        return self.train if split == "train" else self.valid

    def count(self, split: Split) -> int:
        """Return the number of documents in a split."""
        return sum(shard.documents for shard in self.shards(split))

    def total(self, split: Split) -> int:
        """Return the number of tokens in a split."""
        return sum(shard.tokens for shard in self.shards(split))


@dataclass(frozen=True)
class Manifest:
    """The contents of data.json, apart from the format version and the fingerprint."""

    vocabulary: int
    dtype: str
    tokenizer_sha256: str
    domains: tuple[DomainShards, ...]
    request: dict[str, Any] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Our names of special tokens, mapped to the tokenizer's; only those that differ."""

    @property
    def objective(self) -> str:
        """The objective that the text was prepared for; requests for mlm do not name it."""
        return str(self.request.get("objective", BERT.objective))

    @property
    def fingerprint(self) -> str:
        """A digest of everything that decides what a run reads; where the text came from is not included."""
        facts = self._facts()
        del facts["request"]
        for domain in facts["domains"]:
            for name in BESIDE:
                del domain[name]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def domain(self, name: str) -> DomainShards:
        for domain in self.domains:
            if domain.name == name:
                return domain
        names = ", ".join(domain.name for domain in self.domains)
        raise ValueError(f"domain is {name!r}. The prepared data has {names}.")

    def shards(self) -> tuple[Shard, ...]:
        """Return the shards of all domains and splits."""
        return tuple(shard for domain in self.domains for shard in domain.train + domain.valid)

    def to_json(self) -> str:
        return json.dumps({**self._facts(), "fingerprint": self.fingerprint}, indent=2) + "\n"

    def _facts(self) -> dict[str, Any]:
        facts = {"format": FORMAT, **asdict(self)}
        if not self.special_tokens:  # folders that are older than this field keep their fingerprint
            del facts["special_tokens"]
        return facts


@final
@dataclass(frozen=True)
class TokenStore:
    """A prepared folder, memory-mapped. Use `open_store` to open one."""

    path: Path
    manifest: Manifest
    vocabulary: Vocabulary

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens, weights, tokenizer and format, wherever the folder lies."""
        return self.manifest.fingerprint

    @property
    def domains(self) -> tuple[DomainShards, ...]:
        """The domains, in the order in which they were prepared."""
        return self.manifest.domains

    def tokens(self, split: Split, domain: str) -> tuple[Tokens, ...]:
        """Return the memory-mapped tokens of a domain's split, one array for each shard."""
        shards, dtype = self.manifest.domain(domain).shards(split), DTYPES[self.manifest.dtype]
        return tuple(np.memmap(self.path / s.file, dtype, mode="r") for s in shards)

    def documents(self, split: Split, domain: str) -> tuple[Uint64s, ...]:
        """Return where documents end in a domain's split: an array for each shard, in tokens from the shard's start."""
        shards = self.manifest.domain(domain).shards(split)
        return tuple(np.memmap(self.path / s.documents_file, OFFSETS, mode="r") for s in shards)

    def bytes_per_token(self, split: Split) -> dict[str, float]:
        """Return each domain's UTF-8 bytes per token, counting end tokens; leave out domains without counted bytes."""
        counts = [(domain, domain.train_bytes if split == "train" else domain.valid_bytes) for domain in self.domains]
        return {domain.name: count / domain.total(split) for domain, count in counts if count}

    def longest_window(self) -> int:
        """Return the length, in tokens, of the longest window that every split of every domain has."""
        splits = (domain.shards(split) for domain in self.manifest.domains for split in SPLITS)
        return min(max(shard.tokens for shard in shards) for shards in splits)

    def tokenizer(self) -> "Tokenizer":
        return load(self.path / TOKENIZER)

    def verify(self, *, anew: bool = False) -> None:
        """Compare every file's checksum; raise a ValueError that names the first file whose checksum differs.

        Files that have not changed since their last verification are read again only with `anew`: see verification.py.
        """
        expected = {TOKENIZER: self.manifest.tokenizer_sha256}
        for shard in self.manifest.shards():
            expected[shard.file] = shard.tokens_sha256
            expected[shard.documents_file] = shard.documents_sha256
        if damage := first_damaged(self.path, expected, anew=anew):
            name, actual = damage
            raise _damaged(self.path / name, f"the SHA-256 {expected[name]}", actual)


def open_store(path: Path, options: Sequence[str] = ()) -> TokenStore:
    """Open a prepared folder, or raise a ValueError that says what is wrong with it.

    `options` are those of the `raptr prepare` command with which the error says how to make a missing folder.
    """
    if not (path / MANIFEST).is_file():
        raise _unprepared(path, options)
    manifest = _read_manifest(path / MANIFEST)
    itemsize = DTYPES[manifest.dtype].itemsize
    for shard in manifest.shards():
        _check_size(path / shard.file, shard.tokens * itemsize)
        _check_size(path / shard.documents_file, shard.documents * OFFSETS.itemsize)
    vocabulary = read_vocabulary(path / TOKENIZER)
    if vocabulary.size != manifest.vocabulary:
        raise _damaged(path / TOKENIZER, f"{manifest.vocabulary} tokens", f"{vocabulary.size}")
    for token, name in manifest.special_tokens.items():
        if vocabulary.name(token) != name:
            raise _damaged(path / CONFIG, f"{name} for {token}", vocabulary.names.get(token, "no name"))
    return TokenStore(path, manifest, Vocabulary(vocabulary.ids, manifest.special_tokens))


def dtype_for(vocabulary: int) -> str:
    """Return the name of the smallest dtype that holds every token id of a vocabulary of this size."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


def _damaged(path: Path, expected: str, found: str) -> ValueError:
    return ValueError(f"{path}: expected {expected}, found {found}")


def _check_size(path: Path, expected: int) -> None:
    if not path.is_file():
        raise _damaged(path, f"{expected} bytes", "no file")
    if (size := path.stat().st_size) != expected:
        raise _damaged(path, f"{expected} bytes", f"{size}")


def _unprepared(path: Path, options: Sequence[str]) -> ValueError:
    """Return the error for a path without prepared data, which may be the text itself."""
    text, out = ("TEXT", path) if not path.exists() else (path, Path("data", f"{path.resolve().stem}-prepared"))
    command = shlex.join(["raptr", "prepare", "--data", str(text), *options, "--out", str(out)])
    return ValueError(f"{path} holds no prepared data: there is no {path / MANIFEST}. Make it with: {command}")


def _read_manifest(path: Path) -> Manifest:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, "JSON", f"text that is not ({error})") from error
    version = facts.get("format") if isinstance(facts, dict) else None
    if version != FORMAT:
        raise _damaged(path, f"format version {FORMAT}", f"{version}")
    try:
        del facts["format"]
        fingerprint = facts.pop("fingerprint")
        for domain in facts["domains"]:
            for split in SPLITS:
                domain[split] = tuple(Shard(**shard) for shard in domain[split])
        manifest = Manifest(**{**facts, "domains": tuple(DomainShards(**domain) for domain in facts["domains"])})
    except (KeyError, TypeError) as error:
        raise _damaged(path, f"the fields of format version {FORMAT}", f"others ({error})") from error
    # The fingerprint covers every field that affects training, so an edited or damaged value is noticed here.
    if fingerprint != manifest.fingerprint:
        raise _damaged(path, f"the fingerprint {fingerprint}", manifest.fingerprint)
    return manifest
