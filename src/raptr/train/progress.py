"""What a person sees while a run trains: a progress bar in a terminal, elsewhere a line at each evaluation.

The time left is estimated from FLOPs, since later stages have slower steps. The first step is not timed, since it
compiles and allocates.
"""

import sys
import time
from collections.abc import Mapping
from typing import Self, final

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from raptr.subnetworks import Shape, Subnetwork
from raptr.subnetworks.value import WIDTHS
from raptr.train.flops import Flops

WIDE = 110  # columns that a terminal needs to show a bar beside the text
LONG = 600  # seconds: longer runs are announced, and without a bar a line is printed after this much silence
SURE = 5  # seconds of steps before the duration is estimated well enough to be announced


@final
class TrainingBar:
    """Shows how far a run is, as a context manager."""

    def __init__(
        self,
        console: Console,
        *,
        steps: int,
        stages: int,
        target: Shape,
        planned: Flops,
        device: torch.device,
        step: int = 0,
    ) -> None:
        self._console, self._steps, self._stages, self._target = console, steps, stages, target
        self._planned, self._device, self._step = planned.total, device, step
        self._live = console.is_terminal
        columns = (BarColumn(bar_width=10), TaskProgressColumn()) if console.width >= WIDE else ()
        self._bar = Progress(*columns, TextColumn("{task.fields[text]}", markup=False), console=console)
        self._task = self._bar.add_task("", total=steps, completed=step, text="")
        self._stage, self._size, self._loss, self._held_out, self._rate = "", "", "", "", ""
        self._began: tuple[float, float, int] | None = None  # the time, FLOPs and step from which the pace is measured
        self._left: float | None = None
        self._announced, self._spoke = False, time.monotonic()

    def __enter__(self) -> Self:
        if self._live:
            self._show()
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bar.stop()

    def advance(self, step: int, *, stage: int, counts: Mapping[str, int], spent: float) -> None:
        """Show that `step` steps are done (on a GPU: launched), which took `spent` FLOPs in all.

        `counts` says how much of the model ran in the last one, as `ran` returns it.
        """
        self._step = step
        self._stage, self._size = f"stage {stage} of {self._stages}", running(counts, self._target)
        if self._device.type != "cuda":
            self._time(step, spent)
        self._show()
        if not self._live and time.monotonic() - self._spoke > LONG:
            self._line(self._stage, self._size, self._loss)

    def measured(self, step: int, *, loss: float, rate: float, spent: float) -> None:
        """Show the loss of a step that was read back from the device, and the speed `rate` in tokens per second."""
        self._loss, self._rate = f"loss {loss:.3f}", f"{_thousands(rate)} tokens/s"
        if self._device.type == "cuda":  # steps are launched ahead of the device, but this one is done
            self._time(step, spent)
        self._show()

    def evaluated(self, loss: float, *, ended: bool) -> None:
        """Print the held-out loss, at the end of a stage (`ended`) or, if there is no bar, at any evaluation."""
        self._held_out = f"held-out {loss:.3f}"
        if ended and self._stages > 1:
            self._line(f"{self._stage} done", self._size, f"held-out loss {loss:.3f}")
        elif not self._live:
            self._line(self._stage, self._size, f"held-out loss {loss:.3f}")
        self._show()

    def _line(self, *facts: str) -> None:
        """Print a line, above the bar if there is one."""
        self._spoke = time.monotonic()
        facts = (self._position, *facts, *(() if self._live else (self._rate, self._time_left)))
        self._say(", ".join(fact for fact in facts if fact))

    def _say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _show(self) -> None:
        if not self._live:
            return
        room = self._console.width - (20 if self._bar.columns[1:] else 0)
        self._bar.update(self._task, completed=self._step, text=self.text(room))

    def text(self, room: int) -> str:
        """Return the state of the run, shortened to fit `room` characters: what matters least goes first."""
        losses, left = (self._loss, self._held_out), self._time_left or "time left: ?"
        facts = [self._position, self._stage, self._size, *losses, self._rate, left]
        short = self._size.replace(" of ", "/")
        shorter = ((self._rate, ""), (self._stage, ""), (self._size, short), (self._held_out, ""), (short, ""))
        for least, instead in (*shorter, (self._loss, "")):
            if len("  ".join(fact for fact in facts if fact)) <= room:
                break
            facts[facts.index(least)] = instead
        return "  ".join(fact for fact in facts if fact)

    @property
    def _position(self) -> str:
        return f"step {self._step:,} of {self._steps:,}"

    @property
    def _time_left(self) -> str:
        return "" if self._left is None else f"{_clock(self._left)} left"

    def _time(self, step: int, spent: float) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = (now, spent, step)
            return
        seconds, done = now - self._began[0], spent - self._began[1]
        if done <= 0:
            return
        self._left = seconds / done * max(0.0, self._planned - spent)
        if not self._announced and seconds >= SURE and step >= self._began[2] + 2:
            self._announced = True
            if self._left > LONG:
                peak = peak_memory(self._device) / 2**30
                memory = f" Memory: {peak:.2g} GiB in this stage." if peak else ""
                self._say(f"This run will take about {duration(self._left)} more{self._where}.{memory}")

    @property
    def _where(self) -> str:
        if self._device.type == "cuda":
            return ""
        return " on the CPU" if torch.cuda.is_available() else " on the CPU; no GPU was found"


def ran(subnetwork: Subnetwork, shape: Shape, target: Shape) -> dict[str, int]:
    """Return how much ran, by axis: the layers, and heads and MLP parts if fewer ran than the final model has.

    `target` is the final model's shape. A model that is still to grow has a smaller `shape`, so its heads may all
    run and still be fewer.
    """
    lacking = [axis for axis in WIDTHS if getattr(shape, axis) < getattr(target, axis)]
    return {"size": subnetwork.size, **{axis: getattr(shape, axis) for axis in lacking}, **subnetwork.counts}


def running(counts: Mapping[str, int], target: Shape) -> str:
    """Return how much of a model runs as text, such as `6 of 12 layers, 9 of 12 heads`."""
    of = {"size": (target.layers, "layers"), "heads": (target.heads, "heads"), "parts": (target.parts, "MLP parts")}
    return ", ".join(f"{count} of {of[axis][0]} {of[axis][1]}" for axis, count in counts.items())


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of tensors on a GPU, of the whole process on the CPU; 0 if it is unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # not available on Windows
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def duration(seconds: float) -> str:
    """Return seconds as text in a fitting unit: `40 seconds`, `12 minutes`, `3.5 hours`, `12 days`, `3.1 years`."""
    for unit, size in (("years", 365 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"
    return "1 second" if round(seconds) == 1 else f"{seconds:.0f} seconds"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _thousands(rate: float) -> str:
    return f"{rate / 1e6:.2f}M" if rate >= 1e6 else f"{rate / 1e3:.1f}k"
