"""Files and folders that are whole or not there: atomic writes, fsync, locks and checksums.

What is written stands beside its place until it is whole, and takes the place by a rename:

    .NAME.partial    being written; ignored by readers
    .NAME.replaced   an earlier folder NAME while a new one takes its place; stands for it if the name is free
    .NAME.removing   being deleted; ignored by readers
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

Kind = Literal["partial", "replaced", "removing"]


def hidden(place: Path, kind: Kind) -> Path:
    """What a file or folder is called while it does not have its place."""
    return place.with_name(f".{place.name}.{kind}")


@contextmanager
def new_file(place: Path) -> Iterator[Path]:
    """A path to write a file at; when the body is done, the file is put on the disk and takes its place."""
    partial = hidden(place, "partial")
    yield partial
    sync(partial)
    os.replace(partial, place)
    sync(place.parent)


def write_text(place: Path, text: str) -> None:
    """Write a file as a whole, so that a kill leaves the old or the new one."""
    with new_file(place) as partial:
        partial.write_bytes(text.encode())


def write_json(place: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all."""
    write_text(place, json.dumps(value, indent=1, allow_nan=False) + "\n")


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make a folder and those above it; of the new ones, those that are empty after the body are removed again."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in new:
            with contextlib.suppress(OSError):  # it is not empty, or was not made
                path.rmdir()


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """A folder to write in; when the body is done, it takes its place, and what was there is removed.

    The body puts what it writes on the disk. If it fails, everything is as before. A second process that would write
    the same folder meanwhile gets a ValueError.
    """
    partial, replaced = hidden(place, "partial"), hidden(place, "replaced")
    refusal = f"{place} is being written by another process; wait for it, or name another folder"
    with made(place.parent), ExitStack() as held:
        partial.mkdir(exist_ok=True)  # what a kill left is taken over
        held.enter_context(locked(partial, refusal, folder=True))
        try:
            _clear(partial)
            _restore(place)
            yield partial
            if place.exists():
                # A folder cannot be renamed onto a full one; in between, readers take the replaced one.
                os.rename(place, replaced)
            os.rename(partial, place)
        except BaseException:
            with contextlib.suppress(OSError):
                if replaced.exists() and not place.exists():
                    os.rename(replaced, place)
            shutil.rmtree(partial, ignore_errors=True)
            raise
    sync(place.parent)
    if replaced.exists():
        remove(replaced, place)


def recover(place: Path) -> None:
    """Remove what an interrupted `new_folder` or `remove` left; what was being replaced gets its name back."""
    _restore(place)
    if (partial := hidden(place, "partial")).exists():
        shutil.rmtree(partial)


def _restore(place: Path) -> None:
    replaced = hidden(place, "replaced")
    if replaced.exists() and not place.exists():
        os.rename(replaced, place)
    for path in (replaced, hidden(place, "removing")):
        if path.exists():
            shutil.rmtree(path)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove(path: Path, place: Path) -> None:
    """Delete a folder whose place is or was `place`, renamed first: nothing half-deleted has a name that is read."""
    os.rename(path, removing := hidden(place, "removing"))
    sync(place.parent)
    shutil.rmtree(removing)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows has no way to sync a folder, and does not need it
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush(file: BinaryIO) -> None:
    """Put an open file's bytes on the disk, past the caches of Python and of the system."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def locked(path: Path, refusal: str, *, folder: bool = False) -> Iterator[None]:
    """Hold a folder, or a file that is made if need be, for this process; a second one gets `refusal` as ValueError.

    With `folder` it is one that another process may have renamed just now, which is refused too. The system lets go
    when the process ends. Where the file system has no locks, or on Windows, nothing is held.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY if folder or path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        if folder:
            raise ValueError(refusal) from None
        raise
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ValueError(refusal) from None
        if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise ValueError(refusal)  # who held it removed or renamed it meanwhile
        yield
    finally:
        os.close(descriptor)


def refuse_strange(folder: Path, kind: str, mark: str, ours: Callable[[Path], bool]) -> None:
    """Leave a folder alone that holds other people's files: it is a `kind` by its file `mark`, or has only `ours`."""
    paths = sorted(folder.iterdir()) if folder.exists() else []
    strange = [path.name for path in paths if not ours(path)]
    if strange and folder / mark not in paths:
        raise ValueError(
            f"out is {str(folder)!r}, a folder that is no {kind} but holds {', '.join(strange[:4])}. "
            "Name a new or an empty folder."
        )


def sha256_of(path: Path) -> str:
    """The checksum of a file, read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
