"""Files and folders that are complete or absent: atomic writes, fsync, locks and checksums.

A file or folder is written beside its place, and renamed to its place when it is complete:

    .NAME.partial    being written; ignored by readers
    .NAME.replaced   the earlier folder NAME while a new one takes its place; read instead while there is no NAME
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
    """Return the path of a file or folder while it is being written, replaced or removed."""
    return place.with_name(f".{place.name}.{kind}")


@contextmanager
def new_file(place: Path) -> Iterator[Path]:
    """Yield a path to write a file at; after the body, the file is synced to disk and renamed to its place."""
    partial = hidden(place, "partial")
    yield partial
    sync(partial)
    os.replace(partial, place)
    sync(place.parent)


def write_text(place: Path, text: str) -> None:
    """Write a file atomically: a kill leaves either the old file or the new one."""
    with new_file(place) as partial:
        partial.write_bytes(text.encode())


def write_json(place: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_text(place, json.dumps(value, indent=1, allow_nan=False) + "\n")


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Create a folder and its parents; after the body, remove those of the new folders that are empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in new:
            with contextlib.suppress(OSError):  # it is not empty, or was never created
                path.rmdir()


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """Yield a folder to write in; after the body, it is renamed to its place, and an earlier folder is removed.

    The body must sync its files to disk. If it fails, everything is as before. A second process that tries to write the
    same folder meanwhile gets a ValueError.
    """
    partial, replaced = hidden(place, "partial"), hidden(place, "replaced")
    refusal = f"{place} is being written by another process; wait for it, or name another folder"
    with made(place.parent), ExitStack() as held:
        with contextlib.suppress(FileExistsError):  # one left by a killed process is reused
            partial.mkdir()
        held.enter_context(locked(partial, refusal, folder=True))
        try:
            if place.is_dir():  # its writer locks it until the replaced folder is removed
                held.enter_context(locked(place, refusal, folder=True))
            _clear(partial)
            _restore(place)
            yield partial
            if place.exists():
                # A folder cannot be renamed onto one with files. Between the two renames, readers use the replaced one.
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
    """Clean up after an interrupted `new_folder` or `remove`; a folder that was being replaced gets its name back."""
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
    """Delete a folder that is or was at `place`. It is renamed first, so that nobody reads a half-deleted folder."""
    os.rename(path, removing := hidden(place, "removing"))
    sync(place.parent)
    shutil.rmtree(removing)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk."""
    if os.name == "nt" and path.is_dir():  # Windows has no way to sync a folder, and does not need it
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush(file: BinaryIO) -> None:
    """Write an open file's bytes to disk, through the buffers of Python and of the system."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def locked(path: Path, refusal: str, *, folder: bool = False) -> Iterator[None]:
    """Lock a folder, or a file (created if necessary); a second process gets a ValueError with the message `refusal`.

    With `folder` it must be a folder, and one that another process has just renamed is refused too. The system releases
    the lock when the process ends. On Windows, and if the file system has no locks, nothing is locked.
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
        try:
            renamed = not os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            renamed = True
        if renamed:
            raise ValueError(refusal)  # the process that held the lock removed or renamed it meanwhile
        yield
    finally:
        os.close(descriptor)


def refuse_strange(folder: Path, kind: str, mark: str, ours: Callable[[Path], bool]) -> None:
    """Raise a ValueError if a folder holds files other than `ours`, unless the file `mark` shows it to be a `kind`."""
    paths = sorted(folder.iterdir()) if folder.exists() else []
    others = [path.name for path in paths if not ours(path)]
    if others and folder / mark not in paths:
        raise ValueError(
            f"out is {str(folder)!r}, a folder without a {kind} that holds {', '.join(others[:4])}. "
            "Name a new or an empty folder."
        )


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, which is read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
