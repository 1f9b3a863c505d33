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

from raptr.data.order import CYCLE, quotas
from raptr.data.prepare.compression import COMPRESSED
from raptr.data.prepare.reading import LINES, FileInput, HubInput, Input

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
        if not NAME.fullmatch(self.name):
            raise ValueError(f"domain is {self.name!r}. A name consists of letters, digits, '_', '.' and '-'.")
        if not self.paths or not all(self.paths):
            raise ValueError(f"domain {self.name} has no path. Give a file, a folder or a pattern.")
        if self.weight is not None and not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"domain {self.name}: weight is {self.weight:g}. It must be a finite number above 0.")

    def inputs(self, field: str, documents: str | None = None) -> tuple[Input, ...]:
        """The files behind all paths, in order, each once.

        A text file is one document unless `documents` says otherwise. A domain of a single text file could not be
        split then, so without `documents` that file is cut at blank lines.
        """
        inputs = self._inputs((*self.paths, *self.valid), field, documents or "file")
        if documents is None and len(inputs) == 1:
            return self._inputs(self.paths, field, "blank-line")
        return inputs

    def held_out(self, field: str, documents: str | None = None) -> tuple[Input, ...]:
        return self._inputs(self.valid, field, documents or "file")

    def _inputs(self, paths: Sequence[str], field: str, documents: str) -> tuple[Input, ...]:
        inputs: dict[str, Input] = {}
        for path in paths:
            if path.startswith(HUB):
                inputs[path] = HubInput(path, field)
                continue
            for file in self._files(path):
                # Two patterns, or a link, may lead to the same file.
                inputs.setdefault(os.path.realpath(file), FileInput.of(Path(file), field, documents))
        return tuple(inputs.values())

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
        matches = [path] if os.path.isdir(path) else sorted(glob.glob(path, recursive=True))
        inside = (sorted(_within(match)) if os.path.isdir(match) else [match] for match in matches)
        if files := [file for some in inside for file in some if _readable(file)]:
            return files
        if os.path.isdir(path):
            raise ValueError(f"domain {self.name}: the folder {path} holds no files.")
        if os.path.exists(path):
            raise ValueError(
                f"domain {self.name}: {path} is neither a file nor a folder. Text is read twice, so write it to a file."
            )
        raise ValueError(
            f"domain {self.name}: there is no file or folder {path}, and no file matches it as a pattern. "
            "--data takes PATH, NAME=PATH or NAME=PATH:WEIGHT."
        )


def parse_domain(text: str) -> DomainSource:
    """Read `NAME=PATH:WEIGHT`; the name and the weight may be left out, and what is a path as it stands is one."""
    name, equals, path = text.partition("=")
    if not equals or not NAME.fullmatch(name) or os.path.exists(text):
        name, path = "", text
    before, colon, number = path.rpartition(":")
    weight = None
    if colon and before and not os.path.exists(path):
        try:
            weight, path = float(number), before
        except ValueError:
            weight = None  # then the colon is part of the path
    if not path:
        raise ValueError(f"domain is {text!r}. Give PATH, NAME=PATH or NAME=PATH:WEIGHT.")
    return DomainSource(name or _named_after(path), (path,), weight)


def checked(domains: Sequence[DomainSource]) -> None:
    """Refuse domains that do not go together."""
    if not domains:
        raise ValueError("No domain was given. At least one is needed.")
    named: dict[str, DomainSource] = {}
    for domain in domains:
        key = domain.name.casefold()  # some file systems ignore case
        if other := named.get(key):
            raise ValueError(
                f"Two domains have the same name: {other.name} ({', '.join(other.paths)}) and "
                f"{domain.name} ({', '.join(domain.paths)}). Give each a name of its own: NAME=PATH."
            )
        named[key] = domain
    if lacking := [domain.name for domain in domains if domain.weight is None]:
        if len(lacking) < len(domains):
            raise ValueError(f"domain {lacking[0]} has no weight but others have. Give weights to all or to none.")
    else:
        _check_weights(domains)
    lacking = [domain.name for domain in domains if not domain.valid]
    if lacking and len(lacking) < len(domains):
        raise ValueError(f"domain {lacking[0]} has no held-out text but others have. Give it to all or to none.")


def check_out(domains: Sequence[DomainSource], out: Path) -> None:
    """Refuse to write where the domains are read: a second start would read what the first one wrote."""
    if out.name in ("", ".."):
        raise ValueError(f"out is {out}. Give the folder by its name.")
    for domain in domains:
        for path in (*domain.paths, *domain.valid):
            if os.path.isdir(path) and out.resolve().is_relative_to(Path(path).resolve()):
                raise ValueError(f"out is {out}, which lies in {path}, the text of domain {domain.name}. Give another.")


def _check_weights(domains: Sequence[DomainSource]) -> None:
    weights = [domain.weight or 0.0 for domain in domains]
    if not math.isfinite(CYCLE * sum(weights)):
        raise ValueError(f"The weights {', '.join(f'{weight:g}' for weight in weights)} are too large to be added.")
    for domain, quota in zip(domains, quotas(weights), strict=True):
        if quota == 0:
            raise ValueError(
                f"domain {domain.name} has weight {domain.weight:g}, less than one sample in {CYCLE}. "
                "Give it a larger weight or leave it out."
            )


def with_valid(domains: Sequence[DomainSource], texts: Sequence[str]) -> list[DomainSource]:
    """The domains with held-out text given as `NAME=PATH`, or as `PATH` where there is one domain."""
    checked(domains)
    named = {domain.name: domain for domain in domains}
    for text in texts:
        given = parse_domain(text)
        if given.weight is not None:
            raise ValueError(f"valid is {text!r}. Held-out text has no weight; it goes to --data.")
        name = domains[0].name if len(domains) == 1 and given.paths == (text,) else given.name
        if name not in named:
            raise ValueError(f"valid is {text!r}. Give NAME=PATH with one of these names: {', '.join(named)}.")
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
    """Every file below a folder, behind links too; hidden ones are left out, since nobody means them as text."""
    entered: set[str] = set()
    for path, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        real = os.path.realpath(path)
        folders[:] = [] if real in entered else sorted(name for name in folders if not name.startswith("."))
        if real not in entered:
            yield from (os.path.join(path, name) for name in files if not name.startswith("."))
        entered.add(real)


def _readable(file: str) -> bool:
    """Whether it is a file, or a link to nothing, which is reported when it is read; pipes and sockets are not."""
    return os.path.isfile(file) or not os.path.exists(file)


def _raise(error: OSError) -> None:
    raise error
