"""The built-in corpus: the documentation and the sources that come with the running Python.

Every machine has this text, so a first run downloads nothing. Left out are the tests (half of the bytes, mostly data),
installed packages, and files generated when Python is built, which differ between machines.

Whole modules are held out, not single files, so all of a package lies on one side. Modules quote each other (licences,
notices, copied functions), so every line that repeats text of the training side is removed from the held-out text.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

from raptr.data.prepare.overlap import without_shared

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# The help topics are documents already; with their file, a text could be on both sides of the split.
SKIPPED_FILES = frozenset({"pydoc_data/topics.py"})
# Generated when Python is built, with folders and compiler flags of one machine.
BUILD_PREFIXES = ("_sysconfigdata", "config-")
# The share of modules held out. Their names decide which, so every version of Python holds out the same ones.
HELD_OUT = 0.05


@dataclass(frozen=True)
class Document:
    """A text with a unique name."""

    name: str
    text: str


def builtin() -> Iterator[Document]:
    """Yield Python's help topics by name, then the standard library's files by path; always in the same order."""
    for name in sorted(topics):
        yield Document(f"topics/{name}", topics[name])
    yield from python_files(Path(sysconfig.get_path("stdlib")))


def split(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """Split documents into training and held-out ones, which share no 63 consecutive bytes."""
    train: list[Document] = []
    valid: list[Document] = []
    for document in documents:
        (valid if _held_out(document.name) else train).append(document)
    texts = without_shared([document.text for document in valid], (document.text for document in train))
    cut = [replace(document, text=text) for document, text in zip(valid, texts, strict=True)]
    return train, [document for document in cut if document.text.strip()]


def _held_out(name: str) -> bool:
    kind, _, path = name.partition("/")
    module = path.split("/")[0].removesuffix(".py").strip("_")  # `_strptime` belongs to `strptime`
    digest = hashlib.sha256(f"{kind}/{module}".encode()).digest()
    return int.from_bytes(digest[:8], "little") < HELD_OUT * 2**64


def python_files(root: Path) -> Iterator[Document]:
    """Yield the `.py` files under `root` that are not tests, generated, empty or undecodable."""
    for name in sorted(_names(root)):
        try:
            text = (root / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield Document(f"library/{name}", text)


def _names(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        # Changing the list in place keeps `walk` out of these folders: site-packages can be huge.
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not _built(name)]
        for file in files:
            path = Path(folder, file)
            name = path.relative_to(root).as_posix()
            if path.suffix == ".py" and path.is_file() and name not in SKIPPED_FILES and not _built(file):
                yield name


def _built(name: str) -> bool:
    return name.startswith(BUILD_PREFIXES)
