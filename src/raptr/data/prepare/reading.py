"""The inputs of a preparation: files, streamed datasets and documents in memory, read record by record.

A record is a line of a `.jsonl` file (also `.json`, `.ndjson`), or a row of a `.parquet` file or a dataset. Any other
file is plain text: a record is the whole file, a paragraph or a line, as requested. Files may be compressed: `.gz`,
`.xz`, `.zst`. A record that cannot be read is yielded as a problem, a sentence that names file and line; the caller
decides whether to stop there. Only the current record is held in memory (of a parquet file: the current row group),
and reading can start again at record n without parsing the records before it.
"""

import json
import logging
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, Protocol, final

from raptr.data.prepare.compression import COMPRESSED, decompressed, extra
from raptr.data.prepare.corpus import Document

LINES = (".jsonl", ".ndjson", ".json")
# The most bytes of a document, since each is held in memory as a whole.
LONGEST = 2**26
ROWS = 256
NEWLINE = b"\n"
# Parse integers as floats: their values are not used, and Python refuses integers of thousands of digits.
JSON = json.JSONDecoder(parse_int=float)
UTF16 = (b"\xff\xfe", b"\xfe\xff")

# What can be one document of a plain text file (`--documents`), and its name in messages.
DOCUMENTS = {"file": "text file", "blank-line": "paragraph", "line": "line of text"}


class Record(NamedTuple):
    """A text, or the problem that prevented reading it; and how many bytes of the input have been read."""

    text: str
    problem: str
    position: int


class Input(Protocol):
    """A source of records that gives the same ones every time it is read."""

    @property
    def size(self) -> int:
        """Bytes to read; 0 if unknown."""

    @property
    def unit(self) -> str:
        """What one of its documents is, in words, such as "row"."""

    def identity(self) -> str:
        """Return a string that identifies the input and its content."""

    def records(self, start: int) -> Iterator[Record]:
        """Yield the records from number `start` (from 0) on."""


@final
@dataclass(frozen=True)
class FileInput:
    """A file: lines of JSON, a parquet table, or text; `documents` says what a document of text is, see DOCUMENTS."""

    path: Path
    size: int
    modified: int
    field: str
    documents: str = "file"

    @classmethod
    def of(cls, path: Path, field: str, documents: str = "file") -> "FileInput":
        """Describe the file as it is now; a file that cannot be accessed is reported when it is read."""
        try:
            facts = path.stat()
        except OSError:
            return cls(path, 0, 0, field, documents)
        return cls(path, facts.st_size, facts.st_mtime_ns, field, documents)

    @property
    def unit(self) -> str:
        kind, _ = self._kinds()
        return {"table": "row", "json": "line of JSON", "text": DOCUMENTS[self.documents]}[kind]

    def identity(self) -> str:
        """Return path, size and time of the last change."""
        return f"{self.path.as_posix()}\t{self.size}\t{self.modified}"

    def records(self, start: int) -> Iterator[Record]:
        """Yield the records from number `start` on; a file that cannot be opened yields one problem."""
        kind, compression = self._kinds()
        if kind == "table":
            yield from self._table(start)
            return
        try:
            raw = self.path.open("rb")
        except OSError as error:
            yield from islice([self._broken("", "a file that can be read", str(error.strerror))], start, None)
            return
        with raw:
            stream = decompressed(raw, compression, self.path)
            if kind == "json":
                yield from self._lines(stream, raw, start)
            elif self.documents == "file":
                yield from islice(self._whole(stream), start, None)
            else:
                yield from islice(self._passages(stream, raw), start, None)

    def _kinds(self) -> tuple[Literal["table", "json", "text"], str]:
        """Return the kind of file, and the suffix of its compression or an empty string, both from its name."""
        name = self.path.name.lower()
        if name.endswith(".parquet"):
            return "table", ""
        inner, compression = os.path.splitext(name)
        if compression not in COMPRESSED:
            inner, compression = name, ""
        return ("json" if inner.endswith(LINES) else "text"), compression

    def _whole(self, stream: BinaryIO) -> Iterator[Record]:
        try:
            data = stream.read(LONGEST + 1)
        except Exception as error:
            yield self._broken("", "a whole file", f"a damaged one ({_damage(error)})")
            return
        if len(data) > LONGEST:
            yield self._broken(
                "", f"a document of at most {LONGEST} bytes", "more; --documents blank-line makes each paragraph one"
            )
        else:
            yield self._decoded(data, 1, self.size)

    def _passages(self, stream: BinaryIO, raw: BinaryIO) -> Iterator[Record]:
        """Yield the paragraphs, which blank lines separate, or the lines that are not blank."""
        passage, first = bytearray(), 1
        for number, line, problem in self._raw_lines(stream):
            passage += line
            if self.documents == "line" or problem or line.isspace() or len(passage) > LONGEST:
                if passage and not passage.isspace():
                    yield self._decoded(bytes(passage), first, raw.tell())
                passage, first = bytearray(), number + 1
            if problem:
                yield self._broken(f", line {number}", *problem)._replace(position=raw.tell())
        if passage:
            yield self._decoded(bytes(passage), first, raw.tell())

    def _decoded(self, data: bytes, first: int, position: int) -> Record:
        """Decode a passage that begins in line `first`; bytes that are not text are a problem."""
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return self._broken(f", line {first + data.count(NEWLINE, 0, error.start)}", "UTF-8", _byte(error))
        if "\0" in text:
            line = first + text.count("\n", 0, text.index("\0"))
            return self._broken(f", line {line}", "text", "a zero byte, as in binary files and in UTF-16")
        return Record(text if self.documents == "file" else text.rstrip("\r\n"), "", position)

    def _lines(self, stream: BinaryIO, raw: BinaryIO, start: int) -> Iterator[Record]:
        for number, line, problem in self._raw_lines(stream):
            if number > start:
                parsed = ("", *problem) if problem else self._parsed(line)
                yield _record(f"{self.path}, line {number}", parsed, raw.tell())

    def _raw_lines(self, stream: BinaryIO) -> Iterator[tuple[int, bytes, tuple[str, str] | None]]:
        """Yield the lines with their numbers, from 1; for a broken one, also what was expected and what was found."""
        number = 0
        while True:
            number += 1
            try:
                line = stream.readline(LONGEST + 1)
                longer = len(line) > LONGEST and not line.endswith(NEWLINE)
                while longer and (rest := stream.readline(LONGEST)):
                    longer = not rest.endswith(NEWLINE)
            except Exception as error:
                yield number, b"", ("a whole file", f"a damaged one ({_damage(error)})")
                return
            if not line:
                return
            if len(line) > LONGEST:
                yield number, b"", (f"a line of at most {LONGEST} bytes", "a longer one")
            else:
                yield number, line, None

    def _parsed(self, line: bytes) -> tuple[str, str, str]:
        """Return the text in a line of JSON, or an empty text with what was expected and what was found."""
        if line.isspace():
            return "", "", ""
        try:
            value = JSON.decode(line.rstrip(NEWLINE).decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            return "", "UTF-8", _byte(error)
        except json.JSONDecodeError as error:
            return "", "one JSON object per line", f"text that is none ({error.msg}, column {error.colno})"
        except RecursionError:
            return "", "a JSON object", "brackets nested too deep to be read"
        if not isinstance(value, dict):
            return "", f"one JSON object per line, with the field {self.field!r}", _kind(value)
        if self.field not in value:
            return "", *_missing(self.field, value)
        return _string(value[self.field], self.field)

    def _table(self, start: int) -> Iterator[Record]:
        parquet = extra("pyarrow.parquet", "datasets", str(self.path))
        number = 0
        try:
            with parquet.ParquetFile(self.path) as table:
                names = table.schema_arrow.names
                groups: list[int] = []
                for group in range(table.num_row_groups):
                    rows = table.metadata.row_group(group).num_rows
                    if number + rows <= start and not groups:
                        number += rows
                    else:
                        groups.append(group)
                if self.field not in names:
                    if not start:
                        yield self._broken("", *_missing(self.field, names))
                    return
                total = max(1, table.metadata.num_rows)
                batches = table.iter_batches(ROWS, row_groups=groups, columns=[self.field], use_threads=False)
                for value in (value for batch in batches for value in batch.column(0).to_pylist()):
                    number += 1
                    if number > start:
                        place = self.size * number // total
                        yield _record(f"{self.path}, row {number}", _string(value, self.field), place)
        except (OSError, ValueError) as error:  # pyarrow's own errors are subclasses of these
            if number >= start:
                yield self._broken(f", row {number + 1}", "a whole parquet file", _damage(error))

    def _broken(self, where: str, expected: str, found: str) -> Record:
        return _record(f"{self.path}{where}", ("", expected, found), self.size)


@final
@dataclass(frozen=True)
class HubInput:
    """A dataset that the package `datasets` streams, named `hf:NAME[:CONFIG[:SPLIT]]`; its size is unknown."""

    name: str
    field: str
    size: int = 0
    unit: str = "row"

    def identity(self) -> str:
        """Return the name alone, since nothing tells whether the dataset has changed."""
        return self.name

    def records(self, start: int) -> Iterator[Record]:
        """Yield the rows from number `start` on; a network error raises a ValueError, even with `skip_broken`."""
        datasets = extra("datasets", "datasets", self.name)
        path, config, split, *rest = [*self.name.removeprefix("hf:").split(":"), "", ""]
        if not path or any(rest):
            raise ValueError(f"{self.name}: expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
        try:
            _reach_hub(path)
            with _retrying_silently():
                rows = datasets.load_dataset(path, config or None, split=split or "train", streaming=True)
            for number, row in enumerate(rows.skip(start) if start else rows, start + 1):
                known = self.field in row
                parsed = _string(row[self.field], self.field) if known else ("", *_missing(self.field, row))
                yield _record(f"{self.name}, row {number}", parsed)
        except ConnectionError as error:
            raise ValueError(
                f"{self.name}: the Hugging Face hub was not reached ({_damage(error)}). Check the network and its "
                "proxy, or download the dataset elsewhere and give --data its files."
            ) from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.name}: expected a dataset that can be read, found: {_damage(error)}") from error


@final
@dataclass(frozen=True)
class DocumentsInput:
    """Documents in memory; `documents` is called for each reading and gives them from the beginning."""

    documents: Callable[[], Iterable[Document]]
    size: int = 0
    unit: str = "document"

    def identity(self) -> str:
        """Return an empty string, since the documents are not known before they are read."""
        return ""

    def records(self, start: int) -> Iterator[Record]:
        for document in islice(self.documents(), start, None):
            yield _record(f"document {document.name!r}", _string(document.text, "text"))


def _reach_hub(path: str) -> None:
    """Check the hub with one request, to fail early: loading a dataset retries for half a minute before it gives up."""
    hub = import_module("huggingface_hub")  # `datasets` depends on it
    if Path(path).exists() or hub.constants.HF_HUB_OFFLINE:
        return
    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=10)
    except Exception as error:  # the client's own exceptions, which differ between versions
        raise ConnectionError(f"{hub.constants.ENDPOINT}: {error}") from error


@contextmanager
def _retrying_silently() -> Iterator[None]:
    """Silence the warnings of the hub's package about each retry; the last failure still raises an error."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _record(where: str, parsed: tuple[str, str, str], position: int = 0) -> Record:
    """Make a record from a text, or from what was expected and what was found."""
    text, expected, found = parsed
    return Record(text, f"{where}: expected {expected}, found {found}" if expected else "", position)


def _missing(field: str, names: Iterable[str]) -> tuple[str, str]:
    """Return what was expected and what was found in a line, row or table without this field."""
    return f"the field {field!r} (--field names another)", ", ".join(map(repr, names)) or "no field"


def _string(value: object, field: str) -> tuple[str, str, str]:
    if not isinstance(value, str):
        return "", f"a string in the field {field!r}", _kind(value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "", f"Unicode text in the field {field!r}", "half of a surrogate pair"
    return value, "", ""


def _kind(value: object) -> str:
    kinds = {type(None): "null", bool: "a boolean", dict: "an object", list: "a list", str: "a string"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def _byte(error: UnicodeDecodeError) -> str:
    if error.object.startswith(UTF16):
        return "UTF-16; convert the file, for example with iconv -f UTF-16 -t UTF-8"
    return f"the byte 0x{error.object[error.start]:02x} ({error.reason})"


def _damage(error: Exception) -> str:
    """Say in one line what is wrong with a file; re-raise an error that is not about the file, since it is a bug."""
    if not isinstance(error, OSError | EOFError | ValueError | zlib.error | lzma.LZMAError):
        raise error
    return " ".join(str(error).split()) or type(error).__name__
