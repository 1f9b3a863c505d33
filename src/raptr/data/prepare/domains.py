"""Domains: which files each one consists of, and what share of the mixture it gets."""

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
    """A domain's name, its paths (files, folders, patterns, `hf:` datasets), and its weight, if given.

    `valid` has the paths of its held-out text; if there are none, documents are held out by their hash.
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
        """Return the inputs behind all paths, those of held-out text included, in order and each once.

        A text file is one document unless `documents` says otherwise. A domain of a single text file could then not be
        split, so without `documents` that file is cut at blank lines.
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
                # Several patterns, or a link, may lead to the same file.
                inputs.setdefault(os.path.realpath(file), FileInput.of(Path(file), field, documents))
        return tuple(inputs.values())

    def request(self, inputs: Sequence[Input]) -> dict[str, Any]:
        """Return the domain as requested, with the number, bytes and digest of its files as they are now."""
        digest = hashlib.sha256("\n".join(source.identity() for source in inputs).encode("utf-8", "surrogateescape"))
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
        if files := [file for group in inside for file in group if _readable(file)]:
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
    """Read `[NAME=]PATH[:WEIGHT]`; a path that exists is taken as one, even if it contains `=` or `:`."""
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
    """Raise a ValueError for domains that cannot be combined."""
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
    """Refuse a folder `out` inside the text of a domain: a second start would read what the first one wrote."""
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
    """Return the domains with held-out text from `NAME=PATH`, or from `PATH` if there is only one domain."""
    checked(domains)
    named = {domain.name: domain for domain in domains}
    for text in texts:
        source = parse_domain(text)
        if source.weight is not None:
            raise ValueError(f"valid is {text!r}. Held-out text has no weight; it goes to --data.")
        name = domains[0].name if len(domains) == 1 and source.paths == (text,) else source.name
        if name not in named:
            raise ValueError(f"valid is {text!r}. Give NAME=PATH with one of these names: {', '.join(named)}.")
        named[name] = replace(named[name], valid=(*named[name].valid, *source.paths))
    return list(named.values())


def _named_after(path: str) -> str:
    """Derive a domain's name from its path, without suffixes and without the parts that are patterns."""
    if path.startswith(HUB):
        path = path.removeprefix(HUB).split(":")[0]
    parts = [part for part in Path(path).absolute().parts if not set(part) & set("*?[")]
    name = parts[-1] if parts else ""
    for endings in (COMPRESSED, (*LINES, ".parquet", ".txt")):
        for ending in endings:
            name = name.removesuffix(ending)
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "text"


def _within(folder: str) -> Iterator[str]:
    """Yield every file below a folder, following links. Hidden files are left out, since nobody means them as text."""
    entered: set[str] = set()
    for path, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        real = os.path.realpath(path)
        folders[:] = [] if real in entered else sorted(name for name in folders if not name.startswith("."))
        if real not in entered:
            yield from (os.path.join(path, name) for name in files if not name.startswith("."))
        entered.add(real)


def _readable(file: str) -> bool:
    """Return True for files, and for broken links, which are reported when read; False for pipes and sockets."""
    return os.path.isfile(file) or not os.path.exists(file)


def _raise(error: OSError) -> None:
    raise error
