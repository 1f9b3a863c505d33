"""What a person sees while a run trains: one bar with stage, size, loss, tokens/s and the time left."""

import time
from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from raptr.train.flops import Flops


@final
class TrainingBar:
    """A progress bar over steps. The time left follows FLOPs, since later stages have slower steps."""

    def __init__(self, console: Console, *, label: str, steps: int, planned: Flops, phases: int) -> None:
        self._console, self._planned, self._phases = console, planned.total, phases
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=10),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TextColumn("left {task.fields[left]}"),
            console=console,
        )
        self._task = self._bar.add_task(label, total=steps, status="", left="?")
        self._first: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, highlight=False)

    def advance(self, step: int, *, phase: int, size: int, loss: float, rate: float, spent: float) -> None:
        """Show where the run is; `spent` FLOPs have been used so far, `rate` tokens are trained a second."""
        now = time.monotonic()
        if self._first is None:
            self._first = (now, spent)
        seconds, done = now - self._first[0], spent - self._first[1]
        left = "?" if done <= 0 else _clock(seconds / done * max(0.0, self._planned - spent))
        status = f"stage {phase + 1}/{self._phases}  size {size}  loss {loss:.3f}  {_thousands(rate)} tokens/s"
        self._bar.update(self._task, completed=step, status=status, left=left)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _thousands(rate: float) -> str:
    return f"{rate / 1e6:.2f}M" if rate >= 1e6 else f"{rate / 1e3:.1f}k"
