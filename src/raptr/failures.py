"""Error messages and exit codes of the command line.

0    done
1    the training diverged; also if the reader of the output is gone, as after `| head`
2    wrong input, or a file that cannot be read or written
3    stopped by SIGTERM or Ctrl-C and saved: the same command continues
4    another process of the run failed, was lost, or was about to compute something else
70   an unexpected error: a bug in raptr, or a problem of the environment
130  interrupted with nothing to save

What a user can correct is a ValueError or an OSError, and gives one sentence without a traceback. The traceback of any
other error goes to a file, or to the terminal if RAPTR_TRACEBACK is set.
"""

import errno
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from raptr.distributed.errors import Disagreement, Elsewhere, Lost
from raptr.extras import MissingExtra
from raptr.train.diverged import Diverged

TRACEBACK = "RAPTR_TRACEBACK"
EXIT_CODES = (
    "Exit codes: 0 done, 1 diverged, 2 wrong input or a file problem, 3 stopped and saved (the same command "
    "continues), 4 another process failed or was lost, 70 unexpected error, 130 interrupted."
)

REMEDIES = {
    errno.ENOSPC: "Free some space on the disk.",
    errno.EDQUOT: "Free some space on the disk.",
    errno.ENOENT: "Check the path.",
    errno.EISDIR: "Name a file instead.",
    errno.ENOTDIR: "Name a folder instead.",
    errno.EEXIST: "Name a new folder.",
    errno.EACCES: "Change its permissions, or name another.",
    errno.EROFS: "Name a place that can be written to.",
}


@contextmanager
def reported() -> Iterator[None]:
    """Turn an error into a sentence on stderr and an exit code; print warnings as sentences too."""
    warnings.showwarning = _show_warning
    try:
        yield
    except SystemExit as ended:
        if ended.code == 130:  # typer ends an interrupted command silently
            print("raptr: interrupted", file=sys.stderr)
        raise
    except (ValueError, MissingExtra) as error:
        _leave(_no_utf8(error) or str(error), 2)
    except OSError as error:
        problem, notes = _file_problem(error), _notes(error)
        _leave(" ".join([f"{problem.removesuffix('.')}.", *notes]) if notes else problem, 2)
    except Diverged as error:
        _leave(str(error), 1)
    except (Lost, Disagreement, Elsewhere) as error:
        _leave(str(error), 4)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except Exception as error:
        _leave(" ".join([_unforeseen(error), *_notes(error)]), 70)


@contextmanager
def work_in(folder: Path) -> Iterator[None]:
    """Add a note to errors, other than a ValueError, that says where the work so far is."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        if folder.is_dir():
            error.add_note(f"The work so far is in {folder}{_newest(folder)}; the same command continues from there.")
        raise


@contextmanager
def importing() -> Iterator[None]:
    """Let Ctrl-C end the program at once while packages such as torch are imported, which takes seconds.

    A KeyboardInterrupt in the middle of an import may be swallowed or turned into another exception.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a parent process may have set it to be ignored
        signal.signal(signal.SIGINT, _interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(number: int, frame: FrameType | None) -> None:
    os.write(2, b"raptr: interrupted\n")
    os._exit(130)


def _newest(run: Path) -> str:
    """Say which checkpoint is the newest; empty if there is none."""
    if not (run / "checkpoints").is_dir():
        return ""
    from raptr.train import checkpoint  # imports torch, which writing the checkpoint has imported before

    steps = checkpoint.steps(run / "checkpoints")
    return f", its newest checkpoint is from step {steps[-1]:,}" if steps else ""


def _notes(error: Exception) -> list[str]:
    return getattr(error, "__notes__", [])


def _no_utf8(error: Exception) -> str | None:
    """What to do about a path of bytes that are not UTF-8, which libraries cannot open; None for any other error.

    A terminal that cannot show a character raises the same error, for another encoding.
    """
    if not isinstance(error, UnicodeEncodeError) or error.encoding != "utf-8":
        return None
    return f"{error.object!r} is not UTF-8 text ({error.reason}). Rename the file or folder, or name another."


def _file_problem(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    place = f"{error.filename}: {what}." if error.filename else f"A file could not be read or written: {what}."
    remedy = REMEDIES.get(error.errno) if error.errno else None
    return f"{place} {remedy}" if remedy else place.removesuffix(".")


def _unforeseen(error: Exception) -> str:
    """Write the traceback to a file or the terminal, and return a message that says where it is."""
    trace = "".join(traceback.format_exception(error))
    where = "The traceback is above."
    if os.environ.get(TRACEBACK):
        print(trace, file=sys.stderr)
    else:
        try:
            with tempfile.NamedTemporaryFile("w", prefix="raptr-", suffix=".txt", delete=False) as file:
                file.write(trace)
            where = f"The traceback is in {file.name}; with {TRACEBACK}=1 it is shown here."
        except OSError:  # perhaps the disk is full, which may be the error itself
            print(trace, file=sys.stderr)
    kind = " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())
    return f"unexpected error ({kind}). This is a bug in raptr or a problem of the environment. {where}"


def _leave(message: str, code: int) -> None:
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    print(f"raptr{' (process ' + os.environ.get('RANK', '?') + ')' if several else ''}: {message}", file=sys.stderr)
    sys.exit(code)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as a sentence, without its place in the code, which helps no user."""
    print(f"raptr: warning: {message}", file=sys.stderr)
