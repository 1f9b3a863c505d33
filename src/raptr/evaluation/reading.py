"""Read a task's files (tsv or jsonl, plain or compressed) into texts and labels.

A tsv file is read as GLUE writes it: tabs separate the fields, and quotation marks have no meaning.
"""

import gzip
import io
import json
import lzma
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from raptr.data.prepare.compression import COMPRESSED, decompressed
from raptr.evaluation.tasks import LABELS, TASKS, Task
from raptr.files import sha256_of

KINDS = (".tsv", ".jsonl")
TRAIN = ("train",)
DEV = ("dev", "dev_matched", "valid", "validation", "validation_matched")


@final
@dataclass(frozen=True)
class Split:
    """The examples of one file. Targets are the labels' numbers or, for regression, the values themselves."""

    path: Path
    sha256: str  # of the file, when it was read
    texts: tuple[tuple[str, ...], ...]  # one or two for each example
    targets: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.targets)


@final
@dataclass(frozen=True)
class TaskData:
    """A task with the examples of its files."""

    task: Task
    train: Split
    dev: Split
    labels: tuple[str, ...]  # in the order of their numbers; empty for regression

    @property
    def outputs(self) -> int:
        """The number of outputs that the model has for an example."""
        return len(self.labels) or 1

    def facts(self) -> dict[str, Any]:
        """Return what distinguishes this data from other data: files, checksums and labels."""
        files = {
            name: {"file": split.path.name, "examples": len(split), "sha256": split.sha256}
            for name, split in (("train", self.train), ("dev", self.dev))
        }
        return {**files, "labels": list(self.labels)}


def read_task(
    task: Task, folder: Path, *, texts: Sequence[str] = (), label: str | None = None, dev: str | None = None
) -> TaskData:
    """Read the training file and the dev file in a folder, or in the task's own folder inside it.

    `texts` and `label` name columns, and `dev` a file; if not given, they are looked for.
    """
    if len(texts) > 2:
        raise ValueError(f"--text is given {len(texts)} times; one or two texts are allowed")
    for option, names in (("text", texts), ("label", [label]), ("dev", [dev])):
        if "" in names:
            raise ValueError(f"--{option} is ''; the name of a {'file' if option == 'dev' else 'column'} is allowed")
    if not folder.is_dir():
        raise ValueError(f"--data is {str(folder)!r}, which is not a folder; name the folder with the task's files")
    subfolders = (task.folder, task.name) if task.folder else ()
    folder = next((folder / name for name in subfolders if (folder / name).is_dir()), folder)
    paths = (_find(folder, TRAIN, "training"), _find(folder, (dev,) if dev else DEV, "dev"))
    sums = [sha256_of(path) for path in paths]
    train, held = (list(_examples(path, task, tuple(texts), label)) for path in paths)
    for path, rows in zip(paths, (train, held), strict=True):
        if not rows:
            raise ValueError(f"{path} has no examples")
    labels = () if task.regression else _labels(task, paths[0], train)
    numbers = {name: float(number) for number, name in enumerate(labels)}
    train_split, dev_split = (
        Split(path, sha256, tuple(row.texts for row in rows), tuple(_target(row, numbers) for row in rows))
        for path, sha256, rows in zip(paths, sums, (train, held), strict=True)
    )
    return TaskData(task, train_split, dev_split, labels)


@final
@dataclass(frozen=True)
class _Example:
    where: str  # file and line
    texts: tuple[str, ...]
    label: str


def file_named(folder: Path, stems: Sequence[str]) -> Path | None:
    """Return the first file with one of these names, which may lack their endings; None if there is none."""
    endings = [kind + compression for kind in KINDS for compression in ("", *COMPRESSED)]
    for stem in stems:
        for ending in endings:
            if (path := folder / (stem.removesuffix(ending) + ending)).is_file():
                return path
    return None


def _find(folder: Path, stems: Sequence[str], what: str) -> Path:
    if path := file_named(folder, stems):
        return path
    raise ValueError(
        f"{folder} has no {what} file; {' or '.join(stems)} is expected, as {' or '.join(KINDS)}, plain or "
        f"compressed ({', '.join(COMPRESSED)})"
    )


def _labels(task: Task, path: Path, rows: Sequence[_Example]) -> tuple[str, ...]:
    """Return the labels in a fixed order; ValueError if their number is wrong, which mostly means the wrong column."""
    counts = Counter(row.label for row in rows)
    labels = tuple(sorted(counts))
    few = ", ".join(labels[:6]) + (", ..." if len(labels) > 6 else "")
    if task.labels is not None and len(labels) != task.labels:
        raise ValueError(f"{path} has {len(labels)} labels ({few}); task {task.name} has {task.labels}")
    if task.labels is None and not 2 <= len(labels) <= max(2, len(rows) // 2):
        raise ValueError(
            f"{path} has {len(labels)} labels ({few}) in {len(rows)} examples; two to half as many as there are "
            "examples are allowed. Name the column with --label."
        )
    return labels


def _target(row: _Example, numbers: dict[str, float]) -> float:
    """Return the number of the row's label; without `numbers`, for regression, the label's own value."""
    if numbers:
        if row.label not in numbers:
            raise ValueError(f"{row.where}: label is {row.label!r}; the training file has {', '.join(numbers)}")
        return numbers[row.label]
    try:
        value = float(row.label)
    except ValueError:
        raise ValueError(f"{row.where}: label is {row.label!r}; a number is expected") from None
    if not math.isfinite(value):
        raise ValueError(f"{row.where}: label is {row.label!r}; a finite number is expected")
    return value


def _examples(path: Path, task: Task, texts: tuple[str, ...], label: str | None) -> Iterator[_Example]:
    columns: tuple[tuple[str, ...], str] | None = None
    for number, row in read_rows(path, task.unnamed):
        where = f"{path}, line {number}"
        if columns is None:
            columns = _columns(where, row, task, texts, label)
        for column in (*columns[0], columns[1]):
            if column not in row:
                raise ValueError(f"{where}: the column {column!r} is missing; found {_quoted(row)}")
        yield _Example(where, tuple(_text(where, row, name) for name in columns[0]), _label(where, row, columns[1]))


def _columns(
    where: str, row: dict[str, Any], task: Task, texts: tuple[str, ...], label: str | None
) -> tuple[tuple[str, ...], str]:
    """Return the columns of the texts and of the label: those named, or the first choice that the row has."""
    choices = (texts,) if texts else task.texts
    chosen = next((names for names in choices if all(name in row for name in names)), None)
    if chosen is None:
        wanted = ", ".join(" + ".join(map(repr, names)) for names in choices)
        expected = f"one of these is expected: {wanted}" if len(choices) > 1 else f"{wanted} is expected"
        raise ValueError(f"{where}: found the columns {_quoted(row)}; {expected}. Name the texts' columns with --text.")
    pairs = [pair for pair in TASKS["classification"].texts if set(chosen) < set(pair) <= row.keys()]
    if pairs and not texts:
        raise ValueError(
            f"{where}: the columns {' and '.join(pairs[0])} are those of a task on two texts, and {task.name} has one. "
            "Name another task, or the column with --text."
        )
    names = (label,) if label else LABELS
    target = next((name for name in names if name in row), None)
    if target is None:
        raise ValueError(
            f"{where}: found the columns {_quoted(row)}; {' or '.join(map(repr, names))} is expected. Name the label's "
            "column with --label."
        )
    return chosen, target


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _text(where: str, row: dict[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise ValueError(f"{where}: {column} is {value!r}; a text is expected")
    return value


def _label(where: str, row: dict[str, Any], column: str) -> str:
    """Return the label as a text, which is the same for 1, 1.0 and "1"."""
    value = row[column]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str | int | float) and (text := str(value).strip()):
        return text
    raise ValueError(f"{where}: {column} is {value!r}; a label is expected")


def read_rows(path: Path, unnamed: tuple[str, ...] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row's line number, and the row by column; `unnamed` are the columns of a tsv without a header."""
    names: list[str] | None = None
    for number, line in _lines(path):
        if not line.strip():
            continue
        if ".jsonl" in path.suffixes:
            yield number, _object(path, number, line)
            continue
        fields = line.split("\t")
        if names is None:
            named = not unnamed or any(column in fields for column in unnamed)
            names = fields if named else list(unnamed)
            if named:
                continue
        if len(fields) != len(names):
            raise ValueError(f"{path}, line {number}: found {len(fields)} fields; {len(names)} are expected")
        yield number, dict(zip(names, fields, strict=True))


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}, line {number} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}, line {number}: found {line[:40]!r}; a JSON object is expected")
    return value


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    compression = path.suffix if path.suffix in COMPRESSED else ""
    number = 0
    try:
        with path.open("rb") as raw:
            # Only line feeds end lines: texts may contain other characters that Python treats as line ends.
            text = io.TextIOWrapper(decompressed(raw, compression, path), encoding="utf-8-sig", newline="\n")
            for number, line in enumerate(text, start=1):
                yield number, line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, after line {number}: no UTF-8 ({error.reason})") from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); fetch it again") from None
