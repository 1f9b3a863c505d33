"""The built-in corpus: the documentation and the sources that come with the running Python.

It is text that every machine has, so a first run downloads nothing. Left out are the tests (half of the
bytes, mostly data), installed packages, and what is generated when Python is built, which differs from
machine to machine.
"""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# The topics are documents of their own: their file again could put one text on both sides of the split.
SKIPPED_FILES = frozenset({"pydoc_data/topics.py"})
# Written when Python is built: folders and compiler flags of one machine.
BUILD_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class Document:
    """A text and a name that tells it from all others."""

    name: str
    text: str


def builtin() -> Iterator[Document]:
    """Python's help topics by name, then the standard library's files by path; always in the same order."""
    for name in sorted(topics):
        yield Document(f"topics/{name}", topics[name])
    yield from python_files(Path(sysconfig.get_path("stdlib")))


def python_files(root: Path) -> Iterator[Document]:
    """The `.py` files under `root` that are neither tests nor generated, empty or undecodable."""
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
