"""Safeguards against losing work: a lock on a run's folder, an orderly stop, an end at the first non-finite number."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import final

import torch
from torch import Tensor

from raptr import files
from raptr.train import checkpoint
from raptr.train.diverged import Diverged

LOCK = ".lock"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


# What torch's messages say when memory runs out, besides those of torch.OutOfMemoryError.
NO_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")


class OutOfMemory(ValueError):
    """The settings need more memory than the machine has."""


@contextmanager
def memory_named(checkpoints: Path) -> Iterator[None]:
    """Turn an error for lack of memory into OutOfMemory, which says what to change and which checkpoint is kept."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        place = _lacking(error)
        if place is None:
            raise
        kept = checkpoint.newest(checkpoints)
        saved = (
            "No checkpoint was written yet."
            if kept is None
            else f"{kept} is kept; going on from it, train.recompute and, without dropout, train.accumulate may "
            "change, and the others need a new run."
        )
        raise OutOfMemory(
            f"out of memory on the {place}. Set train.recompute=true, raise train.accumulate, lower train.batch or "
            f"data.length, or choose a smaller model.size. {saved}"
        ) from error


def _lacking(error: BaseException | None) -> str | None:
    """Return whose memory ran out according to an error or its causes, CPU or GPU; None if neither did."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return "CPU"
        if isinstance(error, torch.OutOfMemoryError):
            return "GPU"
        if isinstance(error, RuntimeError) and any(sign in text for sign in NO_MEMORY):
            return "CPU" if "cpu" in text else "GPU"
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def locked(folder: Path, refusal: str) -> Iterator[None]:
    """Lock the folder for this process; a second one gets a ValueError with `refusal`.

    The system releases the lock when the process ends. If nothing was written, as when a start is refused, no trace of
    the lock is left.
    """
    with files.made(folder):
        before = set(os.listdir(folder))
        with files.locked(folder / LOCK, refusal):
            try:
                yield
            finally:
                if set(os.listdir(folder)) - before == {LOCK}:
                    (folder / LOCK).unlink()


@contextmanager
def reproducible(wanted: bool) -> Iterator[None]:
    """Within the context, make a GPU give the same bits for the same operations, if `wanted`."""
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Within the context, handle SIGINT and SIGTERM with this handler."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@final
class StopRequest:
    """Whether SIGTERM or Ctrl-C has asked the run to save and leave; after that, another Ctrl-C interrupts it at once.

    A second SIGTERM changes nothing: Slurm sends one to every process, and torchrun forwards its own.
    """

    def __init__(self) -> None:
        self.asked = False

    def listening(self) -> AbstractContextManager[None]:
        """Return a context that handles the signals and restores the previous handlers at its end."""
        return handled(self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True


@final
class FiniteCheck:
    """Remembers on the device the first step whose loss or gradient was not finite, so that no step waits for it."""

    def __init__(self, device: torch.device, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self.first = torch.full((), -1, device=device)

    def watch(self, step: int, *values: Tensor) -> None:
        finite = torch.stack([value.isfinite() for value in values]).all()
        self.first = torch.where((self.first < 0) & ~finite, step, self.first)

    def check(self) -> None:
        """Raise Diverged if any number so far was not finite; waits for the device."""
        self.refuse(int(self.first))

    def refuse(self, first: int) -> None:
        """Raise Diverged if `first`, the first such step as read back earlier, is a step and not -1."""
        if first >= 0:
            raise Diverged(first, checkpoint.newest(self._checkpoints))
