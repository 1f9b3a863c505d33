"""Fine-tune an encoder at every learning rate and seed; each is a job with a small file, so nothing is done twice.

OUT/settings.json           what all jobs share: model, data and recipe; other ones are refused
OUT/jobs/RATE-SEED.json     the result of a job
OUT/finetune.json, .png     the record over all jobs, and its chart
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raptr.evaluation.encoder import Encoder, load_encoder
from raptr.evaluation.jobs import Judged, read_json, refuse_changed, write_json
from raptr.evaluation.noting import note_scores
from raptr.evaluation.reading import TaskData, read_task
from raptr.evaluation.summary import as_json, best_rate, draw, rows
from raptr.evaluation.tasks import Task, find_task
from raptr.evaluation.tuning import Recipe, Tuning, constant_answer
from raptr.files import locked, new_file
from raptr.report.plots import save
from raptr.train.run import environment, find_device
from raptr.train.safety import StopRequest
from raptr.train.workers import PATIENCE, Workers

NAME = "finetune"
SEEDS = 3
NO_MEMORY = "out of memory on the GPU. Lower --batch or --length."


def finetune(
    model: Path,
    task: str,
    data: Path,
    out: Path | None = None,
    *,
    recipe: Recipe | None = None,
    rates: Sequence[float] = (),
    seeds: int = SEEDS,
    tune: int | None = None,
    texts: Sequence[str] = (),
    label: str | None = None,
    dev: str | None = None,
    device: str = "auto",
    jobs: int = 1,
    console: Console | None = None,
    stop: StopRequest | None = None,
) -> Judged:
    """Fine-tune the encoder at every rate and seed that is not done yet, and write the record.

    `texts` and `label` name columns of the files, `dev` the dev file; what is not named is looked for. Without
    `rates` the encoder's width decides (`Encoder.rates`). With `tune` the rates are compared on so many seeds, and the
    other seeds run at the best one only. `jobs` fine-tunings are made at once, each in a process.
    """
    console, stop, recipe = console or Console(stderr=True), stop or StopRequest(), recipe or Recipe()
    found = find_task(task)
    where = find_device(device)
    for rate in rates:
        if not 0 < rate <= 1:
            raise ValueError(f"--rate is {rate}; more than 0 and at most 1 is allowed")
    if seeds < 1:
        raise ValueError(f"--seeds is {seeds}; a whole number from 1 on is allowed")
    if tune is not None and not 1 <= tune <= seeds:
        raise ValueError(f"--tune is {tune}; 1 to {seeds}, the number of seeds, is allowed")
    if jobs < 1:
        raise ValueError(f"--jobs is {jobs}; a whole number from 1 on is allowed")
    examples = read_task(found, data, texts=texts, label=label, dev=dev)
    encoder = load_encoder(model)
    folder = out or Path("runs") / NAME / f"{encoder.folder.name}-{found.name}"
    tried, compared = sorted(set(rates or encoder.rates)), tune or seeds
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", f"{folder} is used by another process; wait for it, or name another --out"):
        settings = _settle(folder, _settings(encoder, examples, recipe))
        source = _Source(encoder.folder.path, found.name, data, tuple(texts), label, dev, recipe, where)
        while missing := [key for key in _wanted(folder, tried, compared, seeds, found) if _read(folder, key) is None]:
            with stop.listening():
                if min(jobs, len(missing)) == 1:
                    _work(Tuning(encoder, examples, recipe, where), folder, missing, stop, console)
                else:
                    _work_at_once(source, folder, missing, min(jobs, len(missing)), stop, console)
            if stop.asked:
                break
        record = _record(folder, settings, examples)
        if record is not None:
            _note(encoder, found, record)
        planned = _wanted(folder, tried, compared, seeds, found)
        done = [key for key in planned if _read(folder, key) is not None]
        later = seeds - compared if len(done) < len(planned) and len(planned) == len(tried) * compared else 0
    return Judged(folder, record, len(done), len(planned) + later)


def _wanted(folder: Path, rates: Sequence[float], compared: int, seeds: int, task: Task) -> list[tuple[float, int]]:
    """Every rate with the seeds on which they are compared; when these are done, the best rate with the others."""
    first = [(rate, seed) for rate in rates for seed in range(compared)]
    results = [result for key in first if (result := _read(folder, key)) is not None]
    if len(results) < len(first):
        return first
    by_rate = {rate: [result for result in results if result["rate"] == rate] for rate in rates}
    best = best_rate(by_rate, task.metrics[0])
    return first + ([] if best is None else [(best, seed) for seed in range(compared, seeds)])


def _work(tuning: Tuning, folder: Path, keys: Sequence[tuple[float, int]], stop: StopRequest, console: Console) -> None:
    """Do the jobs in turn until asked to stop."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        whole = bar.add_task("steps", total=tuning.steps * len(keys))
        for number, (rate, seed) in enumerate(keys, start=1):
            bar.update(whole, description=f"job {number} of {len(keys)}: rate {rate:g}, seed {seed}")
            try:
                result = tuning.run(rate, seed, stop, lambda: bar.advance(whole))
            except torch.OutOfMemoryError as error:
                raise ValueError(NO_MEMORY) from error
            if result is None:
                return
            _keep(folder, result, console)
            bar.update(whole, completed=tuning.steps * number)  # a job that diverged ends early


@final
@dataclass(frozen=True)
class _Source:
    """What a process needs to read the encoder and the data for itself."""

    model: Path
    task: str
    data: Path
    texts: tuple[str, ...]
    label: str | None
    dev: str | None
    recipe: Recipe
    device: torch.device


@lru_cache(maxsize=1)
def _tuning(source: _Source) -> Tuning:
    examples = read_task(find_task(source.task), source.data, texts=source.texts, label=source.label, dev=source.dev)
    return Tuning(load_encoder(source.model), examples, source.recipe, source.device)


def _tune(stop: StopRequest, source: _Source, rate: float, seed: int) -> dict[str, Any] | None:
    return _tuning(source).run(rate, seed, stop, lambda: None)


def _work_at_once(
    source: _Source, folder: Path, keys: Sequence[tuple[float, int]], jobs: int, stop: StopRequest, console: Console
) -> None:
    """Do the jobs in several processes until asked to stop."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Workers(jobs, source.device) as workers,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        whole = bar.add_task(f"jobs, {jobs} at once", total=len(keys))
        waiting = {workers.submit(_tune, source, rate, seed) for rate, seed in keys}
        while waiting and not stop.asked:
            done, waiting = wait(waiting, PATIENCE, FIRST_COMPLETED)
            for future in done:
                try:
                    result = future.result()
                except torch.OutOfMemoryError as error:
                    raise ValueError(f"{NO_MEMORY} Or lower --jobs.") from error
                if result is not None:
                    _keep(folder, result, bar.console)
                bar.advance(whole)


def _keep(folder: Path, result: dict[str, Any], console: Console) -> None:
    """Write the file of a finished job, and say what it reached."""
    write_json(_path(folder, (result["rate"], result["seed"])), result)
    said = f"rate {result['rate']:g}, seed {result['seed']}: {_reached(result)}"
    console.print(said, highlight=False, markup=False)


def _reached(result: dict[str, Any]) -> str:
    if result["scores"] is None:
        return f"diverged in step {result['diverged']}"
    return ", ".join(f"{name} {100 * value:.2f}" for name, value in result["scores"].items())


def _path(folder: Path, key: tuple[float, int]) -> Path:
    return folder / "jobs" / f"{key[0]!r}-{key[1]}.json"


def _read(folder: Path, key: tuple[float, int]) -> dict[str, Any] | None:
    path = _path(folder, key)
    return read_json(path) if path.is_file() else None


def _settings(encoder: Encoder, data: TaskData, recipe: Recipe) -> dict[str, Any]:
    """What all jobs share."""
    folder = encoder.folder
    return {
        "task": data.task.name,
        "metrics": list(data.task.metrics),
        "model": {"name": folder.name, "type": folder.config.model_type, "sha256": folder.fingerprint},
        "data": data.facts(),
        "recipe": {**asdict(recipe), "dropout_settings": encoder.dropout_settings()},
    }


def _settle(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Write the settings, or refuse those that differ from the ones here; a model's name may change."""
    path = folder / "settings.json"
    if not path.is_file():
        write_json(path, settings)
        return settings
    refuse_changed(folder, read_json(path), settings)
    return settings


def _note(encoder: Encoder, task: Task, record: dict[str, Any]) -> None:
    """Note the score of the best rate in the folder of the run, if the encoder is one's."""
    metric = task.metrics[0]
    for row in record["rows"]:
        if row["best"]:
            facts = {"interval": row["interval"], "n": row["seeds"], "metric": metric, "rate": row["rate"]}
            cell = {"score": row["means"][metric], "constant": record["baseline"][metric], **facts}
            note_scores(encoder.folder, f"{NAME}-{task.name}", {task.title: cell})


def _record(folder: Path, settings: dict[str, Any], data: TaskData) -> dict[str, Any] | None:
    """Write the record over all jobs of the folder, those of earlier commands too, and its chart."""
    jobs = [read_json(path) for path in sorted((folder / "jobs").glob("*.json"))]
    if not jobs:
        return None
    record = {
        **settings,
        "baseline": constant_answer(data),
        "rows": as_json(rows(jobs, data.task.metrics)),
        "jobs": sorted(jobs, key=lambda job: (job["rate"], job["seed"])),
        "environment": environment(),
    }
    write_json(folder / f"{NAME}.json", record)
    with new_file(folder / f"{NAME}.png") as partial:
        save(draw(record), partial)
    return record
