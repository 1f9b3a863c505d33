"""The folder in which a preparation works: used by one process at a time, with nothing but files that raptr wrote."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from raptr.data.prepare.journal import JOURNAL, Journal, read_journal
from raptr.data.prepare.request import difference
from raptr.data.store import MANIFEST, TOKENIZER, TokenStore, open_store
from raptr.data.tokenizer import CONFIG
from raptr.files import locked

OURS = (".tokens", ".documents", ".partial", ".new")  # .new: written by an earlier version


def work_folder(out: Path) -> Path:
    """Return the folder in which `out` is prepared."""
    return out.with_name(f"{out.name}.partial")


@contextmanager
def naming(work: Path) -> Iterator[None]:
    """Add the folder's name to an error in writing, and what to do about it if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = ". Free some space and give the same command again to continue" if full else ""
        raise OSError(error.errno, f"{error.strerror or error}{hint}", str(work)) from error


@contextmanager
def alone(work: Path) -> Iterator[None]:
    """Create the work folder if necessary, and lock it; the lock is released when the process ends, even by a kill."""
    work.mkdir(exist_ok=True)
    with locked(work, f"{work} is being written by another process. Wait for it, or stop it."):
        yield


def resume(work: Path, request: dict[str, Any], say: Callable[[str], None]) -> Journal | None:
    """Return the journal to continue from, or None. Empty a work folder that cannot be used, and `say` the reason."""
    names = {path.name for path in work.iterdir()}
    if not names:
        return None
    if strange := sorted(name for name in names if not _ours(name)):
        raise ValueError(f"{work} holds {strange[0]}, which raptr did not write. Give another --out.")
    journal = read_journal(work)
    if MANIFEST in names:
        reason = _finished(work, request)
    elif journal is None:
        reason = "it was stopped before its tokenizer was made, or by another version of raptr"
    else:
        reason = difference(journal.request, request)
        if not reason and journal.version != tokenizers.__version__:
            reason = f"tokenizers was {journal.version}, is {tokenizers.__version__}"
    if not reason:
        say(f"{work}: going on where it stopped")
        return journal
    say(f"{work}: starting over: {reason}")
    for path in work.iterdir():
        path.unlink()
    return None


def reuse(out: Path, request: dict[str, Any], say: Callable[[str], None]) -> TokenStore:
    """Return the finished folder if the same request made it; otherwise raise a ValueError."""
    if not out.is_dir():
        raise ValueError(f"out is {out}, which is a file. Give a new folder.")
    if not (out / MANIFEST).is_file():
        other = min(path.name for path in out.iterdir())
        raise ValueError(f"out is {out}, which holds other files ({other}). Give a new or an empty folder.")
    store = open_store(out)
    if reason := difference(store.manifest.request, request):
        raise ValueError(f"out is {out}, which was prepared differently: {reason}. Name a new folder, or remove it.")
    say(f"{out}: already prepared")
    return store


def clear(work: Path) -> None:
    """Remove what a preparation left that has no journal yet, since none of it can be used again."""
    if not work.is_dir() or any((work / name).exists() for name in (JOURNAL, MANIFEST)):
        return
    for path in work.iterdir():
        if _ours(path.name):
            path.unlink()
    if not any(work.iterdir()):
        work.rmdir()


def _finished(work: Path, request: dict[str, Any]) -> str:
    """Say why a complete work folder, which only needs renaming, cannot be used; empty if it can."""
    try:
        return difference(open_store(work).manifest.request, request)
    except ValueError as error:
        return str(error)


def _ours(name: str) -> bool:
    return name in (JOURNAL, MANIFEST, TOKENIZER, CONFIG) or name.endswith(OURS)
