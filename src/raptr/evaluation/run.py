"""Fine-tune an encoder at every learning rate and seed; each is a job with a small file, so nothing is done twice.

OUT/settings.json           what all jobs share: model, data and recipe; other ones are refused
OUT/jobs/RATE-SEED.json     the result of a job
OUT/finetune.json, .png     the record over all jobs, and its chart
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raptr.evaluation.encoder import Encoder, load_encoder
from raptr.evaluation.jobs import find_device, read_json, refuse_changed, write_json
from raptr.evaluation.reading import TaskData, read_task
from raptr.evaluation.summary import as_json, draw, rows
from raptr.evaluation.tasks import find_task
from raptr.evaluation.tuning import Recipe, Tuning, constant_answer
from raptr.files import locked, new_file
from raptr.report.plots import save
from raptr.train.run import environment
from raptr.train.safety import StopRequest

NAME = "finetune"
SEEDS = 3


@final
@dataclass(frozen=True)
class Finetuned:
    """What came out; `record` is None where no job is finished."""

    folder: Path
    record: dict[str, Any] | None
    finished: int
    planned: int

    @property
    def stopped(self) -> bool:
        """Whether it was asked to stop before the last job."""
        return self.finished < self.planned


def finetune(
    model: Path,
    task: str,
    data: Path,
    out: Path | None = None,
    *,
    recipe: Recipe | None = None,
    rates: Sequence[float] = (),
    seeds: int = SEEDS,
    texts: Sequence[str] = (),
    label: str | None = None,
    dev: str | None = None,
    device: str = "auto",
    console: Console | None = None,
    stop: StopRequest | None = None,
) -> Finetuned:
    """Fine-tune the encoder at every rate and seed that is not done yet, and write the record.

    `texts` and `label` name columns of the files, `dev` the dev file; what is not named is looked for. Without
    `rates` the encoder's width decides (`Encoder.rates`).
    """
    console, stop, recipe = console or Console(stderr=True), stop or StopRequest(), recipe or Recipe()
    found = find_task(task)
    where = find_device(device)
    for rate in rates:
        if not 0 < rate <= 1:
            raise ValueError(f"--rate is {rate}; more than 0 and at most 1 is allowed")
    if seeds < 1:
        raise ValueError(f"--seeds is {seeds}; a whole number from 1 on is allowed")
    examples = read_task(found, data, texts=texts, label=label, dev=dev)
    encoder = load_encoder(model)
    folder = out or Path("runs") / NAME / f"{encoder.folder.name}-{found.name}"
    planned = [(rate, seed) for rate in sorted(set(rates or encoder.rates)) for seed in range(seeds)]
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", f"{folder} is used by another process; wait for it, or name another --out"):
        settings = _settle(folder, _settings(encoder, examples, recipe))
        missing = [key for key in planned if _read(folder, key) is None]
        if missing:
            with stop.listening():
                _work(Tuning(encoder, examples, recipe, where), folder, missing, stop, console)
        record = _record(folder, settings, examples)
        done = [key for key in planned if _read(folder, key) is not None]
    return Finetuned(folder, record, len(done), len(planned))


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
                raise ValueError("out of memory on the GPU. Lower --batch or --length.") from error
            if result is None:
                return
            write_json(_path(folder, (rate, seed)), result)
            bar.update(whole, completed=tuning.steps * number)  # a job that diverged ends early
            console.print(f"rate {rate:g}, seed {seed}: {_reached(result)}", highlight=False, markup=False)


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
