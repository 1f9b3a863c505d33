"""The folder in which a preparation works: one process at a time, and nothing in it that is not ours."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from raptr.data.journal import JOURNAL, Journal, read_journal
from raptr.data.request import difference
from raptr.data.store import MANIFEST, TOKENIZER, TokenStore, open_store

OURS = (".tokens", ".documents", ".new")


@contextmanager
def alone(work: Path) -> Iterator[None]:
    """The work folder, made if need be and locked; a process that is killed lets go of it."""
    work.mkdir(exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ValueError(f"{work} is being written by another process; wait for it, or stop it") from error
            # Some network file systems have no locks: then the user sees to it.
        yield
    finally:
        os.close(descriptor)


def resume(work: Path, request: dict[str, Any], say: Callable[[str], None]) -> Journal | None:
    """The journal to go on from; a work folder that cannot be used is emptied, and the reason is said."""
    names = {path.name for path in work.iterdir()}
    if not names:
        return None
    if strange := sorted(name for name in names if not _ours(name)):
        raise ValueError(f"{work} holds {strange[0]}, which is no part of a preparation; give another folder")
    journal = read_journal(work)
    if MANIFEST in names:
        reason = _finished(work, request)
    elif journal is None:
        reason = "it was stopped before its tokenizer was made"
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
    """The finished folder, when this very request made it."""
    store = open_store(out)
    if reason := difference(store.manifest.request, request):
        raise ValueError(f"{out} is there already, from another request: {reason}; give another folder or remove it")
    say(f"{out}: already prepared")
    return store


def clear(work: Path) -> None:
    """Remove what a preparation without a journal has left: nothing of it could be used again."""
    if not work.is_dir() or any((work / name).exists() for name in (JOURNAL, MANIFEST)):
        return
    for path in work.iterdir():
        if _ours(path.name):
            path.unlink()
    if not any(work.iterdir()):
        work.rmdir()


def _finished(work: Path, request: dict[str, Any]) -> str:
    """Why a work folder that lacks nothing but its name cannot be used; empty when it can."""
    try:
        return difference(open_store(work).manifest.request, request)
    except ValueError as error:
        return str(error)


def _ours(name: str) -> bool:
    return name in (JOURNAL, MANIFEST, TOKENIZER) or name.endswith(OURS)
