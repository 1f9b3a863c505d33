"""The contract of a study, which reproduces a table or figure of the paper: run() writes numbers, plot() draws them.

    OUT/NAME/job-KEY.json     one file for each independent job (a seed, a depth, a setting), written atomically
    OUT/NAME/result.json      the results of all jobs: setting, environment, numbers
    OUT/NAME/NAME.png         the figure, drawn from result.json alone

A finished job is not computed again, so a stopped study continues where it was. A folder whose jobs have another
setting, such as another checkpoint of a run, is refused.
"""

import json
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from raptr.files import locked, made, refuse_strange, write_json
from raptr.settings import refuse_changed
from raptr.train.config import find_device
from raptr.train.run import environment

RESULT = "result.json"
MOST_SEEDS = 1000  # more is surely a typing error
# What the folder of a study without a result may hold: jobs, a snapshot, folders named after lengths, partial files.
BEGUN = re.compile(r"job-.+\.json|unfinished\.safetensors|\d+|\..+\.partial")


class Run(Protocol):
    """Computes a study's numbers, and keeps its finished jobs in `folder`.

    `seeds` is the number of repetitions; `small` chooses a setting that takes minutes on two cores.
    """

    def __call__(self, folder: Path, *, seeds: int, small: bool, device: str, console: Console) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Study:
    """A study: its name, how its numbers are computed, and how they are drawn."""

    name: str
    run: Run
    plot: Callable[[dict[str, Any]], Figure]
    seeds: int = 5  # default number of repetitions
    run_at: Callable[[Sequence[int]], Run] | None = None  # for a study of lengths: returns `run` at others


def conduct(
    study: Study,
    out: Path,
    *,
    seeds: int | None,
    small: bool,
    device: str,
    console: Console,
    steps: Sequence[int] = (),
) -> Path:
    """Run a study, draw its figure and return its folder.

    `steps` replaces the lengths of the study's runs; empty: the study's own lengths.
    """
    run = study.run_at(steps) if study.run_at and steps else study.run
    if steps and study.run_at is None:
        raise ValueError(f"steps is {steps[0]}; the study {study.name} has a fixed number of steps. Leave --steps out.")
    if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
        raise ValueError(f"seeds is {seeds}; a whole number from 1 to {MOST_SEEDS} is allowed")
    device = find_device(device).type
    repetitions = study.seeds if seeds is None else seeds
    with study_folder(out / (f"{study.name}-small" if small else study.name)) as folder:
        numbers = run(folder, seeds=repetitions, small=small, device=device, console=console)
        result = {"study": study.name, "small": small, "seeds": repetitions, "environment": environment(), **numbers}
        write_json(folder / RESULT, result)
        study.plot(result).savefig(folder / f"{study.name}.png", dpi=150)
    return folder


@contextmanager
def study_folder(folder: Path) -> Iterator[Path]:
    """Yield a study's folder, created if needed and locked. A folder with anything else in it is refused."""
    refuse_strange(folder, "study", RESULT, lambda path: BEGUN.fullmatch(path.name) is not None)
    refusal = f"out is {str(folder)!r}, where another process computes the study; wait for it, or name another --out"
    with made(folder), locked(folder, refusal):  # two would repeat all work and mix up snapshots
        yield folder


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM stop a study as Ctrl-C does: KeyboardInterrupt is raised, and finished jobs are kept."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_jobs(
    folder: Path,
    setting: Mapping[str, Any],
    keys: Sequence[str],
    compute: Callable[[str], Any],
    console: Console,
    label: str,
) -> dict[str, Any]:
    """Return each job's result by its key. Only missing jobs are computed; jobs of other settings are refused."""
    return run_together(folder, setting, keys, lambda key: {key[0]: compute(key[0])}, console, label, at_once=1)


def run_together(
    folder: Path,
    setting: Mapping[str, Any],
    keys: Sequence[str],
    compute: Callable[[Sequence[str]], dict[str, Any]],
    console: Console,
    label: str,
    *,
    at_once: int,
) -> dict[str, Any]:
    """Do what `run_jobs` does, but compute up to `at_once` missing jobs in one call."""
    described = json.loads(json.dumps(setting))
    entries = {key: entry for key in keys if (entry := _read(folder, key))}
    for entry in entries.values():
        refuse_changed(folder, entry["setting"], described)
    done = {key: entry["result"] for key, entry in entries.items()}
    missing = [key for key in keys if key not in done]
    with Progress(console=console) as bar:
        task = bar.add_task(label, total=len(keys), completed=len(done))
        for start in range(0, len(missing), at_once):
            chunk = missing[start : start + at_once]
            for key, result in compute(chunk).items():
                write_json(folder / f"job-{key}.json", {"setting": described, "result": result})
                done[key] = json.loads(json.dumps(result))
            bar.update(task, advance=len(chunk))
    return {key: done[key] for key in keys}


def mean_and_deviation(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation (0 for a single value)."""
    listed = list(values)
    return fmean(listed), stdev(listed) if len(listed) > 1 else 0.0


def _read(folder: Path, key: str) -> Any:
    path = folder / f"job-{key}.json"
    if not path.exists():
        return None
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    whole = isinstance(entry, dict) and isinstance(entry.get("setting"), dict) and "result" in entry
    return entry if whole else None
