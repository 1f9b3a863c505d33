"""Runs a comparison: each run an ordinary run folder, made by `pretrain`, in an order of whole seeds.

    OUT/runs/LABEL-peakP-seedS/   the runs; `outcome.json` in one says that it is finished, or where it diverged
    OUT/compare.md, .json, .png   the tables and the plot, over the runs that are finished

A run that is finished is not run again and one that was stopped goes on, so the same command continues a comparison
that was stopped or killed. A run that diverges is recorded as such and the comparison goes on.

Several runs at once are processes of their own. Each holds one end of a pipe whose other end is the parent's alone:
when the parent closes it, or is gone, they save and leave.
"""

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, final

import torch
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import Progress

from raptr.comparison.outcomes import OUTCOME, RUNS, Outcome, read_finished, read_note
from raptr.comparison.search import wanted
from raptr.comparison.spec import FULL, Comparison, PlannedRun, read_comparison, read_file
from raptr.files import write_text
from raptr.report.runs import Run
from raptr.train.config import differences
from raptr.train.loop import open_data, pretrain
from raptr.train.run import RunFolder
from raptr.train.safety import Diverged, StopRequest, locked

if TYPE_CHECKING:
    from multiprocessing.synchronize import Lock as SharedLock

PATIENCE = 0.5  # seconds between looks at whether to stop


@dataclass(frozen=True)
class _Task:
    """A run of the comparison."""

    run: PlannedRun
    folder: Path
    place: str  # such as 3 of 8
    data: str  # the fingerprint
    jobs: int
    keep_models: bool

    @property
    def finished(self) -> bool:
        """Whether the run came to its end, or diverged."""
        return (self.folder / OUTCOME).exists()

    @property
    def state(self) -> str:
        """How far the run came."""
        note = read_note(self.folder)
        if note is None:
            return "stopped"
        return "finished" if note["diverged"] is None else f"diverged in step {note['diverged']}"

    def train(self, stop: StopRequest, console: Console) -> None:
        """Bring the run to its end, or as far as it comes before a stop."""
        diverged = None
        try:
            if pretrain(self.run.config, self.folder, console=console, stop=stop).stopped:
                return
        except Diverged as error:
            diverged = error.step
            console.print(f"diverged in step {diverged}", highlight=False)
        outcome = {"diverged": diverged, "data": self.data, "jobs": self.jobs}
        write_text(self.folder / OUTCOME, json.dumps(outcome) + "\n")
        if not self.keep_models:
            shutil.rmtree(RunFolder(self.folder).checkpoints, ignore_errors=True)


@dataclass(frozen=True)
class Compared:
    """Where a comparison stands: the runs finished of all, and the table over them (None: no run is finished)."""

    out: Path
    finished: int
    runs: int
    table: Group | None
    stopped: bool = False  # asked to stop by SIGTERM or Ctrl-C


def compare(
    spec: Mapping[str, Any] | Path,
    out: Path,
    *,
    device: str | None = None,
    keep_models: bool = False,
    jobs: int = 1,
    console: Console | None = None,
) -> Compared:
    """Run the comparison that `spec` describes (a YAML file, or its content), or go on with the one in `out`.

    The checkpoints of a run are dropped when it is finished, unless `keep_models` is set. `jobs` runs are made at
    once, and then no times are given: runs beside each other slow each other down.
    """
    from raptr.comparison.results import write_results  # imports matplotlib, which is slow

    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; 1 or more are allowed")
    console = console or Console(stderr=True)
    comparison = read_comparison(read_file(spec) if isinstance(spec, Path) else spec, device=device)
    stop = StopRequest()
    with locked(out), stop.listening():
        store = open_data(comparison.entries[0].config, out / RUNS / FULL, console)
        progress = _Progress(comparison, out, store.fingerprint, jobs, keep_models)
        for task in progress.tasks():
            _refuse_other(task)
        for done in (_one_by_one if jobs == 1 else _at_once)(progress, stop, console):
            seed = [task for task in progress.tasks() if task.run.seed == done.run.seed]
            if all(task.finished for task in seed) and progress.unfinished():
                write_results(comparison, progress.finished(), progress.planned, store, out)  # what a kill leaves
        finished, planned = progress.finished(), progress.planned
        table = write_results(comparison, finished, planned, store, out)
    return Compared(out, len(finished), planned, table, stopped=len(finished) < planned)


@final
class _Progress:
    """Which runs the comparison wants, and which of them are finished; each finished one is read once."""

    def __init__(self, comparison: Comparison, out: Path, data: str, jobs: int, keep_models: bool) -> None:
        self._comparison, self._out, self._data, self.jobs, self._keep = comparison, out, data, jobs, keep_models
        self._read: dict[Path, tuple[Run, Outcome]] = {}

    def tasks(self) -> list[_Task]:
        """Every run that is wanted by now."""
        while True:  # what is finished may make the comparison want more, some of it finished too
            runs = wanted(self._comparison, [outcome for _, outcome in self._read.values()])
            if not self._look(runs):
                break
        return [
            _Task(run, self._folder(run), f"{number} of {len(runs)}", self._data, self.jobs, self._keep)
            for number, run in enumerate(runs, start=1)
        ]

    def unfinished(self) -> list[_Task]:
        """The runs that are wanted and not finished."""
        return [task for task in self.tasks() if not task.finished]

    @property
    def planned(self) -> int:
        """How many runs there will be, as far as that is known by now."""
        known = len(self.tasks())
        return max(known, self._comparison.count) if self.unfinished() else known

    def finished(self) -> list[tuple[PlannedRun, Run, Outcome]]:
        """Every finished run with its records and what it came to."""
        return [(task.run, *self._read[task.folder]) for task in self.tasks() if task.folder in self._read]

    def _look(self, runs: Sequence[PlannedRun]) -> bool:
        """Read the runs that were finished since the last look; whether there were any."""
        before = len(self._read)
        for run in runs:
            folder = self._folder(run)
            if folder not in self._read:
                read = read_finished(folder, label=run.entry.label, peak=run.peak, seed=run.seed, steps=run.entry.steps)
                if read is not None:
                    self._read[folder] = read
        return len(self._read) > before

    def _folder(self, run: PlannedRun) -> Path:
        return self._out / RUNS / run.name


def _one_by_one(progress: _Progress, stop: StopRequest, console: Console) -> Iterator[_Task]:
    """Make the runs in turn until asked to stop; gives each that was made."""
    while not stop.asked and (left := progress.unfinished()):
        task = left[0]
        console.print(f"run {task.place}: {escape(str(task.run))}", highlight=False)
        task.train(stop, console)
        yield task


def _at_once(progress: _Progress, stop: StopRequest, console: Console) -> Iterator[_Task]:
    """Make the runs in several processes until asked to stop; gives each that was made."""
    first = progress.unfinished()
    if not first:
        return
    jobs, device = progress.jobs, first[0].run.config.train.resolve_device()
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ear, mouth = context.Pipe(duplex=False)
    given = (ear, context.Lock(), device, max(1, torch.get_num_threads() // jobs))
    with (
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=given) as pool,
        Progress(console=console) as bar,
    ):
        shown = bar.add_task("runs", total=len(first))
        waiting: dict[Future[None], _Task] = {}
        submitted: set[Path] = set()

        def submit(tasks: Iterable[_Task]) -> None:
            # Processes start here and inherit this: Ctrl-C is for the parent alone to hear.
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            for task in tasks:
                if task.folder not in submitted:
                    submitted.add(task.folder)
                    waiting[pool.submit(_make, task)] = task
            signal.signal(signal.SIGINT, before)

        submit(first)
        try:
            while waiting and not stop.asked:
                for future in wait(waiting, PATIENCE, FIRST_COMPLETED).done:
                    task = waiting.pop(future)
                    future.result()
                    bar.console.print(f"run {task.place} {task.state}: {escape(str(task.run))}", highlight=False)
                    submit(progress.unfinished())
                    bar.update(shown, advance=1, total=len(submitted))
                    yield task
        except BrokenProcessPool:
            raise ValueError(
                f"jobs is {jobs}, but one of the processes ended before its time (killed, perhaps for want of memory; "
                "or jobs came from a script without `if __name__ == '__main__':`); the same command goes on, with "
                "fewer jobs if need be"
            ) from None
        finally:
            mouth.close()
            pool.shutdown(wait=False, cancel_futures=True)


_asked, _busy = StopRequest(), Lock()  # of a process that makes runs for another


def _start(ear: Connection, turn: "SharedLock", device: torch.device, threads: int) -> None:
    torch.set_num_threads(threads)
    Thread(target=_listen, args=(ear,), daemon=True).start()
    with turn:
        torch.zeros(1, device=device)  # processes that ask for a GPU at the same moment may be refused under MPS


def _listen(ear: Connection) -> None:
    ear.poll(None)  # returns when the other end is closed
    _asked.asked = True
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # a parent that is there waits for this process, which ends here
    with _busy:
        os._exit(1)


def _make(task: _Task) -> None:
    with _busy:
        if not _asked.asked:
            task.train(_asked, Console(quiet=True))


def _refuse_other(task: _Task) -> None:
    """Refuse a run that is there but is not the one wanted."""
    folder = RunFolder(task.folder)
    if not folder.config.exists():
        return
    begun = folder.read()
    old, new = begun.mapping(), task.run.config.following(begun).mapping()
    changed = [f"{key}: {change}" for key, change in differences(old, new).items()]
    judged = [mapping["train"]["eval_samples"] for mapping in (old, new)]
    if judged[0] != judged[1]:  # free in a run of its own, but losses on other samples do not compare
        changed.append(f"train.eval_samples: was {judged[0]}, now {judged[1]}")
    note = read_note(task.folder)
    if note is not None and note["data"] != task.data:
        changed.append(f"the data's fingerprint: was {note['data']}, now {task.data}")
    if changed:
        raise ValueError(
            f"the run in {str(task.folder)!r} was made with other settings ({'; '.join(changed)}); "
            "go on with the old ones, compare in another folder, or remove that run"
        )
