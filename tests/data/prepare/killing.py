"""Run by test_restart.py as a program: prepares the same corpus again and again, and kills it at every moment.

    python killing.py CORPUS WORK FIRST EVERY [deduplicate]

Each try is a child that is made before any thread exists, and sends itself SIGKILL at its n-th event, n from FIRST
on in steps of EVERY. Events are: before and after each fsync, each replaced or removed file, the renaming, and each
chunk. Then it is started again and must end with the bytes of a run that nobody disturbed.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raptr.data.prepare import DomainSource, encoding, prepare_corpus, stream

DONE, KILLED = 0, -signal.SIGKILL


def counted(function: Callable[..., Any], event: Callable[[], None]) -> Callable[..., Any]:
    """The function, with an event before and one after it."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        event()
        result = function(*args, **kwargs)
        event()
        return result

    return wrapper


def attempt(corpus: Path, out: Path, deduplicate: bool, last: int | None) -> int:
    """Prepare in a child that dies at event number `last`; how it ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    events = 0

    def event() -> None:
        nonlocal events
        events += 1
        if events == last:
            os.kill(os.getpid(), signal.SIGKILL)

    patches: list[tuple[Any, str]] = [(os, "fsync"), (Path, "replace"), (Path, "rename"), (Path, "unlink")]
    for owner, name in patches:
        setattr(owner, name, counted(getattr(owner, name), event))
    domains = [DomainSource(name, (str(corpus / name),)) for name in ("wiki", "web")]
    prepare_corpus(
        domains,
        out,
        vocabulary=300,
        shard_tokens=900,
        deduplicate=deduplicate,
        workers=2,
        progress=lambda _: event(),
    )
    os._exit(DONE)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def main() -> None:
    """Kill at every event, then again and again at the same one."""
    corpus, work, deduplicate = Path(sys.argv[1]), Path(sys.argv[2]), len(sys.argv) > 5
    first, every = int(sys.argv[3]), int(sys.argv[4])
    stream.CHUNK, encoding.JOURNAL_EVERY = 900, 0.0
    assert attempt(corpus, work / "whole", deduplicate, None) == DONE
    whole = contents(work / "whole")
    kills = 0
    for last in range(first, 1000, every):
        out = work / "out"
        ended = attempt(corpus, out, deduplicate, last)
        assert ended in (DONE, KILLED), ended
        if ended == KILLED:
            kills += 1
            assert attempt(corpus, out, deduplicate, None) == DONE
        assert contents(out) == whole, last
        assert sorted(path.name for path in work.iterdir()) == ["out", "whole"]
        shutil.rmtree(out)
        if ended == DONE:
            break
    starts = 1
    while attempt(corpus, work / "out", deduplicate, 45) == KILLED:
        starts += 1
        assert starts < 100
    assert contents(work / "out") == whole
    print(kills, starts, len(whole))


if __name__ == "__main__":
    main()
