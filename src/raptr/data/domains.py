"""Domains: which files make up each named part of the text, and what share of a mixture it gets."""

import glob
import hashlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raptr.data.compression import COMPRESSED
from raptr.data.reading import LINES, FileInput, HubInput, Input

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
HUB = "hf:"


@dataclass(frozen=True)
class DomainSource:
    """A domain's name, its paths (files, folders, patterns, `hf:` datasets), and its weight if it has one.

    `valid` are paths of text that is held out; without any, documents are held out by their hash.
    """

    name: str
    paths: tuple[str, ...]
    weight: float | None = None
    valid: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be a domain."""
        if not NAME.fullmatch(self.name):
            raise ValueError(f"domain is {self.name!r}; a name of letters, digits, '_', '.' and '-' is allowed")
        if not self.paths or not all(self.paths):
            raise ValueError(f"domain {self.name}: no path was given; a file, a folder or a pattern is allowed")
        if self.weight is not None and not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"domain {self.name}: weight is {self.weight:g}; a finite number above 0 is allowed")

    def inputs(self, field: str) -> tuple[Input, ...]:
        """The files behind all paths, in order, each once."""
        return self._inputs((*self.paths, *self.valid), field)

    def held_out(self, field: str) -> tuple[Input, ...]:
        """The files that are held out."""
        return self._inputs(self.valid, field)

    def _inputs(self, paths: Sequence[str], field: str) -> tuple[Input, ...]:
        found: dict[str, Input] = {}
        for path in paths:
            if path.startswith(HUB):
                found[path] = HubInput(path, field)
            else:
                found.update((file, FileInput.of(Path(file), field)) for file in self._files(path))
        return tuple(found.values())

    def request(self, inputs: Sequence[Input]) -> dict[str, Any]:
        """What was asked for, and what the files were at that time."""
        digest = hashlib.sha256("\n".join(one.identity() for one in inputs).encode("utf-8", "surrogateescape"))
        return {
            "name": self.name,
            "weight": self.weight,
            "paths": list(self.paths),
            "valid": list(self.valid),
            "files": len(inputs),
            "bytes": sum(one.size for one in inputs),
            "digest": digest.hexdigest(),
        }

    def _files(self, path: str) -> list[str]:
        if os.path.isfile(path):
            return [path]
        if os.path.isdir(path):
            if not (found := sorted(_within(path))):
                raise ValueError(f"domain {self.name}: {path} is a folder without files; at least one is needed")
            return found
        matches = sorted(glob.glob(path, recursive=True))
        inside = (sorted(_within(match)) if os.path.isdir(match) else [match] for match in matches)
        if not (found := [file for files in inside for file in files]):
            raise ValueError(
                f"domain {self.name}: {path} is no file and no folder, and as a pattern it matches none; "
                "NAME=PATH:WEIGHT, NAME=PATH or PATH is allowed"
            )
        return found


def parse_domain(text: str) -> DomainSource:
    """Read `NAME=PATH:WEIGHT`; the name and the weight may be left out."""
    name, equals, path = text.partition("=")
    if not equals or not NAME.fullmatch(name):
        name, path = "", text
    before, colon, number = path.rpartition(":")
    weight = None
    if colon and before:
        try:
            weight, path = float(number), before
        except ValueError:
            weight = None  # then the colon is part of the path
    if not path:
        raise ValueError(f"domain is {text!r}; NAME=PATH:WEIGHT, NAME=PATH or PATH is allowed")
    return DomainSource(name or _named_after(path), (path,), weight)


def checked(domains: Sequence[DomainSource]) -> None:
    """Refuse domains that do not go together."""
    if not domains:
        raise ValueError("domains: none was given; at least one is needed")
    names = [domain.name.casefold() for domain in domains]  # some file systems ignore case
    for domain in domains:
        if names.count(domain.name.casefold()) > 1:
            raise ValueError(f"domain {domain.name} was given twice; give each a name of its own: NAME=PATH")
    lacking = [domain.name for domain in domains if domain.weight is None]
    if lacking and len(lacking) < len(domains):
        raise ValueError(f"domain {lacking[0]} has no weight but others have; give weights to all or to none")
    lacking = [domain.name for domain in domains if not domain.valid]
    if lacking and len(lacking) < len(domains):
        raise ValueError(f"domain {lacking[0]} has no held-out text but others have; name it for all or for none")


def with_valid(domains: Sequence[DomainSource], texts: Sequence[str]) -> list[DomainSource]:
    """The domains with held-out text given as `NAME=PATH`, or as `PATH` where there is one domain."""
    named = {domain.name: domain for domain in domains}
    for text in texts:
        given = parse_domain(text)
        name = domains[0].name if len(domains) == 1 and "=" not in text else given.name
        if name not in named:
            raise ValueError(f"valid is {text!r}; NAME=PATH with one of these names is allowed: {', '.join(named)}")
        named[name] = replace(named[name], valid=(*named[name].valid, *given.paths))
    return list(named.values())


def _named_after(path: str) -> str:
    """A domain's name from its path: without endings, and without the parts that are patterns."""
    if path.startswith(HUB):
        path = path.removeprefix(HUB).split(":")[0]
    parts = [part for part in Path(path).absolute().parts if not set(part) & set("*?[")]
    name = parts[-1] if parts else ""
    for endings in (COMPRESSED, (*LINES, ".parquet", ".txt")):
        for ending in endings:
            name = name.removesuffix(ending)
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "text"


def _within(folder: str) -> Iterator[str]:
    """Every file below a folder; hidden ones are not text that somebody meant."""
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(path, name) for name in files if not name.startswith("."))
