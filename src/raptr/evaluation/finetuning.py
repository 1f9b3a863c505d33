"""One encoder fine-tuned on one task: which jobs are wanted, which are finished, and the record over them.

OUT/settings.json           what all jobs share: model, data and recipe; other ones are refused
OUT/jobs/RATE-SEED.json     the result of a job
OUT/finetune.json, .png     the record over all jobs, and its chart
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
RESULT = ("rate", "seed", "scores")  # what every job's file has
MOST_SEEDS = 1000  # more is a slip
HIGHEST = 1  # learning rate

Key = tuple[float, int]  # learning rate, seed


@final
@dataclass(frozen=True)
class Request:
    """A model and the task to judge it by.

    `texts` and `label` name columns of the files, `dev` the dev file; what is not named is looked for. Without
    `rates` the encoder's width decides (`Encoder.rates`). With `tune` the rates are compared on so many seeds, and the
    other seeds run at the best one only. With `widen` rates are added until the best lies inside the grid (grid.py).
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
        """What decides which examples are read."""
        return (self.task, self.data, *self.texts, self.label, self.dev)

    def examples(self) -> TaskData:
        """Read the task's files."""
        return read_task(find_task(self.task), self.data, texts=self.texts, label=self.label, dev=self.dev)


@final
class Finetuning:
    """A request with its encoder and examples; `settle` comes before all else, when the folder is locked."""

    def __init__(self, request: Request, encoder: Encoder, examples: TaskData) -> None:
        self.request, self.encoder, self.examples = request, encoder, examples
        self.folder = request.out or Path("runs") / NAME / f"{encoder.folder.name}-{self.task.name}"
        self._rates, self._compared = sorted(set(request.rates or encoder.rates)), request.tune or request.seeds
        self._settings = _settings(encoder, examples, request.recipe)

    @property
    def task(self) -> Task:
        """What the encoder is judged by."""
        return self.examples.task

    def open(self) -> None:
        """Make the folder; one that is no fine-tuning but holds something is refused."""
        refuse_strange(self.folder, "fine-tuning", SETTINGS, _begun)
        (self.folder / "jobs").mkdir(parents=True, exist_ok=True)

    def settle(self) -> None:
        """Write the settings, or refuse those that differ from the ones here; a model's name may change."""
        path = self.folder / SETTINGS
        if path.is_file():
            refuse_changed(self.folder, read_json(path), self._settings, free=RENAMED)
        else:
            write_json(path, self._settings)

    def missing(self) -> list[Key]:
        """The jobs that are wanted by now and not finished."""
        jobs = self._jobs()
        done = {(job["rate"], job["seed"]) for job in jobs}
        return [key for key in self._wanted(jobs) if key not in done]

    def keep(self, result: dict[str, Any]) -> None:
        """Write the file of a finished job."""
        write_json(self._path((result["rate"], result["seed"])), result)

    def judged(self) -> Judged:
        """Write the record over all jobs of the folder, those of earlier commands too, and its chart."""
        jobs = self._jobs()
        record = self._record(jobs)
        if record is not None:
            self._note(record)
        planned, missing = self._wanted(jobs), len(self.missing())
        undecided = missing and all(seed < self._compared for _, seed in planned)
        later = self.request.seeds - self._compared if undecided else 0
        return Judged(self.folder, record, len(planned) - missing, len(planned) + later)

    def _wanted(self, jobs: Sequence[Mapping[str, Any]]) -> list[Key]:
        """Every rate with the seeds on which they are compared; when these are done, the best rate with the others."""
        rates, best = self._search(jobs)
        first = [(rate, seed) for rate in rates for seed in range(self._compared)]
        return first + ([] if best is None else [(best, seed) for seed in range(self._compared, self.request.seeds)])

    def _search(self, jobs: Sequence[Mapping[str, Any]]) -> tuple[list[float], float | None]:
        """The rates to compare, and the best one once all are compared; None where each diverged, too.

        Every seed of a rate counts: one that diverges on a later seed is not the best any more.
        """
        by_rate: dict[float, list[Mapping[str, Any]]] = {}
        added = self._rates
        while True:
            for rate in added:
                by_rate[rate] = [job for job in jobs if job["rate"] == rate]
            if any({*range(self._compared)} - {job["seed"] for job in found} for found in by_rate.values()):
                return list(by_rate), None
            best = best_rate(by_rate, self.task.metrics[0])
            wider = widened(list(by_rate), len(self._rates), best) if self.request.widen else []
            added = [rate for rate in wider if rate <= HIGHEST]
            if not added:
                return list(by_rate), best

    def _path(self, key: Key) -> Path:
        return self.folder / "jobs" / f"{key[0]!r}-{key[1]}.json"

    def _jobs(self) -> list[dict[str, Any]]:
        """The results of all jobs of the folder, those of earlier commands too."""
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
        """Note the score of the best rate in the folder of the run, if the encoder is one's."""
        metric = self.task.metrics[0]
        how = json.dumps([self.examples.facts(), asdict(self.request.recipe)], sort_keys=True)
        made = hashlib.sha256(how.encode()).hexdigest()[:16]
        for row in record["rows"]:
            if row["best"]:
                constant, examples = record["baseline"][metric], record["data"]["dev"]["examples"]
                facts = {"interval": row["interval"], "n": row["seeds"], "metric": metric, "made": made}
                chosen = {"rate": row["rate"], "edge": row["edge"]}
                chance = at_chance(Row(**row), metric, constant, examples)
                scored = {"score": row["means"][metric], "constant": constant, "chance": chance}
                cell = {**scored, **facts, **chosen}
                note_scores(self.encoder.folder, f"{NAME}-{self.task.name}", {self.task.title: cell})


def _begun(path: Path) -> bool:
    """Whether a command that was killed before it wrote its settings leaves this."""
    return path.name in (LOCK, f".{SETTINGS}.partial") or (path.name == "jobs" and not any(path.iterdir()))


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
