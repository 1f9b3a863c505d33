"""The request for a preparation: checked once, and compared with the earlier request when work is continued."""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from raptr.data.prepare.domains import DomainSource, checked
from raptr.data.prepare.reading import DOCUMENTS, Input
from raptr.data.prepare.stream import Chunk, Position, ahead, chunks
from raptr.data.prepare.tokenizer import checked_size, existing
from raptr.data.store import FORMAT
from raptr.data.tokenizer import BERT, Specials
from raptr.files import sha256_of

HELD_OUT = 0.02
SHARD_TOKENS = 2**27
READ_AHEAD = 8


@final
@dataclass(frozen=True)
class Request:
    """The domains with their inputs, and all settings of a preparation."""

    domains: tuple[DomainSource, ...]
    inputs: tuple[tuple[Input, ...], ...]
    vocabulary: int
    valid: tuple[tuple[Input, ...], ...] = ()
    tokenizer: Path | None = None
    field: str = "text"
    documents: str | None = None
    held_out: float = HELD_OUT
    deduplicate: bool = False
    skip_broken: bool = False
    shard_tokens: int = SHARD_TOKENS
    workers: int | None = None
    specials: Specials = BERT

    def __post_init__(self) -> None:
        checked(self.domains)
        if self.shard_tokens < 1:
            raise ValueError(f"shard_tokens is {self.shard_tokens}. A shard must hold at least one token.")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers is {self.workers}. At least one is needed.")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}. It must be a fraction between 0 and 1.")
        if self.documents not in (None, *DOCUMENTS):
            raise ValueError(f"documents is {self.documents!r}. Use one of: {', '.join(DOCUMENTS)}.")
        if self.tokenizer is None:
            checked_size(self.vocabulary, self.specials)
        else:
            existing(self.tokenizer, self.specials)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(domain.name for domain in self.domains)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Our names of special tokens, mapped to those of the given tokenizer; only those that differ."""
        return {} if self.tokenizer is None else existing(self.tokenizer, self.specials)[1].names

    @property
    def limit(self) -> int:
        """Documents with hashes below it are held out; 0 if held-out text is given."""
        return 0 if any(self.valid) else int(self.held_out * 2**64)

    @property
    def threads(self) -> int:
        """The number of threads that encode: by default one for each core that this process may use."""
        return self.workers or (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)

    @property
    def total(self) -> int:
        return sum(one.size for inputs in self.inputs for one in inputs)

    def chunks(self, start: Position) -> Iterator[Chunk]:
        """Yield the documents from `start` on, read ahead by another thread."""
        read = chunks(self.inputs, start=start, deduplicate=self.deduplicate, skip_broken=self.skip_broken)
        return ahead(read, READ_AHEAD)

    def given_held_out(self) -> Iterator[Chunk]:
        """Yield the documents of the given held-out text."""
        return chunks(self.valid, deduplicate=False, skip_broken=self.skip_broken)

    def facts(self) -> dict[str, Any]:
        """Return everything that decides the result, as JSON values."""
        # Left out for mlm, as in folders that are older than the other objectives.
        objective = {} if self.specials == BERT else {"objective": self.specials.objective}
        names = self.special_tokens
        return {
            "format": FORMAT,
            **objective,
            "vocabulary": self.vocabulary if self.tokenizer is None else None,
            "tokenizer": None if self.tokenizer is None else sha256_of(self.tokenizer),
            **({"special_tokens": names} if names else {}),
            "field": self.field,
            "documents": self.documents,
            "held_out": self.held_out,
            "deduplicate": self.deduplicate,
            "skip_broken": self.skip_broken,
            "shard_tokens": self.shard_tokens,
            "domains": [domain.request(inputs) for domain, inputs in zip(self.domains, self.inputs, strict=True)],
        }


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describe the first difference between two requests; empty if there is none."""
    old, new = ({"objective": BERT.objective, **request} for request in (old, new))
    for key in new:
        if key != "domains" and old.get(key) != new[key]:
            return f"{key} was {old.get(key)}, is {new[key]}"
    before, after = ([_normalised(domain) for domain in request.get("domains", [])] for request in (old, new))
    if [domain["name"] for domain in before] != [domain["name"] for domain in after]:
        return f"the domains were {_names(before)}, are {_names(after)}"
    for was, now in zip(before, after, strict=True):
        for key in ("weight", "paths", "valid"):
            if was[key] != now[key]:
                return f"domain {now['name']}: {key} was {was[key]}, is {now[key]}"
        if was != now:
            return (
                f"domain {now['name']}: its files have changed "
                f"({was['files']} of {was['bytes']} bytes before, {now['files']} of {now['bytes']} bytes now)"
            )
    return ""


def _normalised(domain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a domain with its paths normalised: `texts/` and `./texts` become `texts`."""
    return {**domain, **{key: [Path(path).as_posix() for path in domain[key]] for key in ("paths", "valid")}}


def _names(domains: list[dict[str, Any]]) -> str:
    return ", ".join(domain["name"] for domain in domains) or "none"
