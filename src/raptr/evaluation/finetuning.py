"""One encoder fine-tuned on one task: the jobs that are wanted, those that are finished, and their record.

OUT/settings.json           what all jobs share: model, data and recipe; a folder with other settings is refused
OUT/jobs/RATE-SEED.json     the result of a job
OUT/finetune.json, .png     the record of all jobs, and its chart
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from raptr.evaluation.encoder import Encoder
from raptr.evaluation.grid import widened
from raptr.evaluation.jobs import RENAMED, Judged, read_json
from raptr.evaluation.noting import note_scores
from raptr.evaluation.reading import TaskData, read_task
from raptr.evaluation.summary import Row, at_chance, best_rate, draw, rows
from raptr.evaluation.tasks import Task, find_task
from raptr.evaluation.tuning import Recipe, constant_answer
from raptr.files import refuse_strange, write_json
from raptr.report.plots import save
from raptr.settings import refuse_changed
from raptr.train.run import environment
from raptr.train.safety import LOCK

NAME = "finetune"
SETTINGS = "settings.json"
RESULT = ("rate", "seed", "scores")  # the keys that every job's file has
MOST_SEEDS = 1000  # more must be a mistake
HIGHEST = 1  # learning rate

Key = tuple[float, int]  # learning rate, seed


@final
@dataclass(frozen=True)
class Request:
    """A model to fine-tune, and the task to score it on.

    `texts` and `label` name columns of the files, and `dev` the dev file; if not given, they are looked for. Without
    `rates` the encoder's width decides (`Encoder.rates`). With `tune` the rates are compared on that many seeds, and
    the other seeds run at the best rate only. With `widen` rates are added until the best lies inside the grid
    (grid.py).
    """

    model: Path
    task: str
    data: Path
    out: Path | None = None
    recipe: Recipe = field(default_factory=Recipe)
    rates: Sequence[float] = ()
    seeds: int = 3
    tune: int | None = None
    widen: bool = False
    texts: Sequence[str] = ()
    label: str | None = None
    dev: str | None = None

    def __post_init__(self) -> None:
        for rate in self.rates:
            if not 0 < rate <= HIGHEST:
                raise ValueError(f"--rate is {rate}; more than 0 and at most {HIGHEST} is allowed")
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise ValueError(f"--seeds is {self.seeds}; a whole number from 1 to {MOST_SEEDS} is allowed")
        if self.tune is not None and not 1 <= self.tune <= self.seeds:
            raise ValueError(f"--tune is {self.tune}; 1 to {self.seeds}, the number of seeds, is allowed")

    @property
    def files(self) -> tuple[object, ...]:
        """The settings that decide which examples are read."""
        return (self.task, self.data, *self.texts, self.label, self.dev)

    def examples(self) -> TaskData:
        """Read the task's files."""
        return read_task(find_task(self.task), self.data, texts=self.texts, label=self.label, dev=self.dev)


@final
class Finetuning:
    """A request with its encoder and examples. Call `open`, lock the folder and call `settle` before anything else."""

    def __init__(self, request: Request, encoder: Encoder, examples: TaskData) -> None:
        self.request, self.encoder, self.examples = request, encoder, examples
        self.folder = request.out or Path("runs") / NAME / f"{encoder.folder.name}-{self.task.name}"
        self._rates, self._compared = sorted(set(request.rates or encoder.rates)), request.tune or request.seeds
        self._settings = _settings(encoder, examples, request.recipe)

    @property
    def task(self) -> Task:
        """The task that the encoder is scored on."""
        return self.examples.task

    def open(self) -> None:
        """Make the folder; refuse one that holds something other than a fine-tuning."""
        refuse_strange(self.folder, "fine-tuning", SETTINGS, _begun)
        (self.folder / "jobs").mkdir(parents=True, exist_ok=True)

    def settle(self) -> None:
        """Write the settings, or refuse a folder whose settings differ; only the model's name may change."""
        path = self.folder / SETTINGS
        if path.is_file():
            refuse_changed(self.folder, read_json(path), self._settings, free=RENAMED)
        else:
            write_json(path, self._settings)

    def missing(self) -> list[Key]:
        """Return the jobs that are wanted so far and not finished."""
        jobs = self._jobs()
        done = {(job["rate"], job["seed"]) for job in jobs}
        return [key for key in self._wanted(jobs) if key not in done]

    def keep(self, result: dict[str, Any]) -> None:
        """Write the file of a finished job."""
        write_json(self._path((result["rate"], result["seed"])), result)

    def judged(self) -> Judged:
        """Write the record and chart of all jobs in the folder, also those of earlier commands; return the outcome."""
        jobs = self._jobs()
        record = self._record(jobs)
        if record is not None:
            self._note(record)
        planned, missing = self._wanted(jobs), len(self.missing())
        undecided = missing and all(seed < self._compared for _, seed in planned)
        later = self.request.seeds - self._compared if undecided else 0
        return Judged(self.folder, record, len(planned) - missing, len(planned) + later)

    def _wanted(self, jobs: Sequence[Mapping[str, Any]]) -> list[Key]:
        """Return the wanted jobs: all rates on the first seeds and, when these are done, the best rate on the rest."""
        rates, best = self._search(jobs)
        first = [(rate, seed) for rate in rates for seed in range(self._compared)]
        return first + ([] if best is None else [(best, seed) for seed in range(self._compared, self.request.seeds)])

    def _search(self, jobs: Sequence[Mapping[str, Any]]) -> tuple[list[float], float | None]:
        """Return the rates to compare, and the best one; None until all are compared, and if all diverged.

        Every seed of a rate counts: a rate that diverges on a later seed is no longer the best.
        """
        by_rate: dict[float, list[Mapping[str, Any]]] = {}
        added = self._rates
        while True:
            for rate in added:
                by_rate[rate] = [job for job in jobs if job["rate"] == rate]
            if any({*range(self._compared)} - {job["seed"] for job in rate_jobs} for rate_jobs in by_rate.values()):
                return list(by_rate), None
            best = best_rate(by_rate, self.task.metrics[0])
            wider = widened(list(by_rate), len(self._rates), best) if self.request.widen else []
            added = [rate for rate in wider if rate <= HIGHEST]
            if not added:
                return list(by_rate), best

    def _path(self, key: Key) -> Path:
        return self.folder / "jobs" / f"{key[0]!r}-{key[1]}.json"

    def _jobs(self) -> list[dict[str, Any]]:
        """Return the results of all jobs in the folder, also those of earlier commands."""
        return [read_json(path, *RESULT) for path in sorted((self.folder / "jobs").glob("*.json"))]

    def _record(self, jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        if not jobs:
            return None
        record = {
            **self._settings,
            "baseline": constant_answer(self.examples),
            "rows": [asdict(row) for row in rows(jobs, self.task.metrics)],
            "jobs": sorted(jobs, key=lambda job: (job["rate"], job["seed"])),
            "environment": environment(),
        }
        write_json(self.folder / f"{NAME}.json", record)
        save(draw(record), self.folder / f"{NAME}.png")
        return record

    def _note(self, record: dict[str, Any]) -> None:
        """Write the score at the best rate into the run's folder, if the encoder is a run's export."""
        metric = self.task.metrics[0]
        facts_and_recipe = json.dumps([self.examples.facts(), asdict(self.request.recipe)], sort_keys=True)
        digest = hashlib.sha256(facts_and_recipe.encode()).hexdigest()[:16]
        for row in record["rows"]:
            if row["best"]:
                constant, examples = record["baseline"][metric], record["data"]["dev"]["examples"]
                facts = {"interval": row["interval"], "n": row["seeds"], "metric": metric, "made": digest}
                chosen = {"rate": row["rate"], "edge": row["edge"]}
                chance = at_chance(Row(**row), metric, constant, examples)
                scored = {"score": row["means"][metric], "constant": constant, "chance": chance}
                cell = {**scored, **facts, **chosen}
                note_scores(self.encoder.folder, f"{NAME}-{self.task.name}", {self.task.title: cell})


def _begun(path: Path) -> bool:
    """Return whether a command that was killed before it wrote its settings may have left this path."""
    return path.name in (LOCK, f".{SETTINGS}.partial") or (path.name == "jobs" and not any(path.iterdir()))


def _settings(encoder: Encoder, data: TaskData, recipe: Recipe) -> dict[str, Any]:
    """Return the settings that all jobs share."""
    folder = encoder.folder
    return {
        "task": data.task.name,
        "metrics": list(data.task.metrics),
        "model": {"name": folder.name, "type": folder.config.model_type, "sha256": folder.fingerprint},
        "data": data.facts(),
        "recipe": {**asdict(recipe), "dropout_settings": encoder.dropout_settings()},
    }
