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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import Progress

from raptr.comparison.spec import PlannedRun, read_comparison, read_file
from raptr.train.config import differences
from raptr.train.loop import open_data, pretrain
from raptr.train.run import RunFolder, write_file
from raptr.train.safety import Diverged, StopRequest, locked

if TYPE_CHECKING:
    from multiprocessing.synchronize import Lock as SharedLock

RUNS = "runs"
OUTCOME = "outcome.json"
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
        outcome = read_outcome(self.folder)
        if outcome is None:
            return "stopped"
        return "finished" if outcome["diverged"] is None else f"diverged in step {outcome['diverged']}"

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
        write_file(self.folder / OUTCOME, json.dumps(outcome) + "\n")
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
    runs, stop = comparison.runs, StopRequest()
    folders = [out / RUNS / run.name for run in runs]
    with locked(out), stop.listening():
        data = open_data(runs[0].config, folders[0], console).fingerprint
        for run, folder in zip(runs, folders, strict=True):
            _refuse_other(run, folder, data)
        tasks = [
            _Task(run, folder, f"{number} of {len(runs)}", data, jobs, keep_models)
            for number, (run, folder) in enumerate(zip(runs, folders, strict=True), start=1)
        ]
        todo = [task for task in tasks if not task.finished]
        for done in (_one_by_one if jobs == 1 else _at_once)(todo, stop, console):
            seed = [task for task in tasks if task.run.seed == done.run.seed]
            if all(task.finished for task in seed) and not all(task.finished for task in tasks):
                write_results(comparison, out)  # what a kill in the next seed leaves
        table = write_results(comparison, out)
    finished = sum(task.finished for task in tasks)
    return Compared(out, finished, len(runs), table, stopped=finished < len(runs))


def read_outcome(folder: Path) -> dict[str, Any] | None:
    """What is known of a finished run beside its metrics: the step it diverged in, its data, how many ran at once."""
    path = folder / OUTCOME
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _one_by_one(tasks: Sequence[_Task], stop: StopRequest, console: Console) -> Iterator[_Task]:
    """Make the runs in turn until asked to stop; gives each that was made."""
    for task in tasks:
        if stop.asked:
            return
        console.print(f"run {task.place}: {escape(str(task.run))}", highlight=False)
        task.train(stop, console)
        yield task


def _at_once(tasks: Sequence[_Task], stop: StopRequest, console: Console) -> Iterator[_Task]:
    """Make the runs in several processes until asked to stop; gives each that was made."""
    if not tasks:
        return
    jobs, device = tasks[0].jobs, tasks[0].run.config.train.resolve_device()
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ear, mouth = context.Pipe(duplex=False)
    given = (ear, context.Lock(), device, max(1, torch.get_num_threads() // jobs))
    with (
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=given) as pool,
        Progress(console=console) as bar,
    ):
        shown = bar.add_task("runs", total=len(tasks))
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which processes inherit: Ctrl-C is for this one to hear
        waiting = {pool.submit(_make, task): task for task in tasks}
        signal.signal(signal.SIGINT, before)
        try:
            while waiting and not stop.asked:
                for future in wait(waiting, PATIENCE, FIRST_COMPLETED).done:
                    task = waiting.pop(future)
                    future.result()
                    bar.console.print(f"run {task.place} {task.state}: {escape(str(task.run))}", highlight=False)
                    bar.advance(shown)
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


def _refuse_other(run: PlannedRun, folder: Path, data: str) -> None:
    """Refuse a run that is there but is not the one wanted."""
    if not RunFolder(folder).config.exists():
        return
    begun = RunFolder(folder).read()
    old, new = begun.mapping(), run.config.following(begun).mapping()
    changed = [f"{key}: {change}" for key, change in differences(old, new).items()]
    judged = [mapping["train"]["eval_samples"] for mapping in (old, new)]
    if judged[0] != judged[1]:  # free in a run of its own, but losses on other samples do not compare
        changed.append(f"train.eval_samples: was {judged[0]}, now {judged[1]}")
    outcome = read_outcome(folder)
    if outcome is not None and outcome["data"] != data:
        changed.append(f"the data's fingerprint: was {outcome['data']}, now {data}")
    if changed:
        raise ValueError(
            f"the run in {str(folder)!r} was made with other settings ({'; '.join(changed)}); "
            "go on with the old ones, compare in another folder, or remove that run"
        )
