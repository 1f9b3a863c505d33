"""The queue of comparisons (queue.yaml): their questions, files and records, and how far each one has come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from raptr.comparison import Asked, Comparison, read_comparison, read_file
from raptr.comparison.progress import Progress
from raptr.strict_yaml import read_yaml

QUEUE = Path("evidence/queue.yaml")
RECORDS = Path("docs/results/evidence")
CORPUS = "corpus"  # name of the text for masked language modelling in the comparisons' files
# FLOPs a second by width: seven runs at once on an NVIDIA H200, 12 layers, 32,768 tokens a step in sequences of 64.
# In full training these are 7.0, 3.3 and 0.83 million tokens a second.
SPEED = {128: 1.14e14, 256: 2.01e14, 768: 4.34e14}
LEAST = 3  # least number of learning rates in a widened grid


@dataclass(frozen=True)
class Item:
    """A comparison of the queue; paths are relative to the project's root."""

    name: str
    question: str
    means: str  # what each outcome would mean
    file: Path
    record: Path
    held: bool = False  # not run with the others, only by its own command
    jobs: int = 7  # runs at once in the command that docs/results/evidence.md shows

    def spec(self, data: Path | None) -> dict[str, Any]:
        """Return the comparison's content with its text at `data`; None: without text and tasks, to plan only."""
        settings, source = self.given["settings"], None if data is None else str(self.text(data))
        spec = {**self.given, "settings": {**settings, "data": {**settings["data"], "source": source}}}
        return {key: value for key, value in spec.items() if data is not None or key != "evaluate"}

    @cached_property
    def given(self) -> dict[str, Any]:
        """The content of the comparison's file, read only once, since all items look at each other's."""
        return read_file(self.file)

    def text(self, data: Path) -> Path:
        """Return the folder of the comparison's text.

        It is `data` for one that names `corpus`, and DATA-causal, beside `data`, for one that names `corpus-causal`.
        """
        source = self.source
        return data.with_name(data.name + source.removeprefix(CORPUS)) if source.startswith(CORPUS) else data

    def ready(self, data: Path) -> bool:
        """Return whether its text exists and, if models are judged by tasks, the tasks' folders too."""
        judged = self.given.get("evaluate", {})
        return self.text(data).exists() and all(Path(section["data"]).exists() for section in judged.values())

    @property
    def judges(self) -> bool:
        """Whether it judges its models by tasks."""
        return "evaluate" in self.given

    @property
    def source(self) -> str:
        """The name of the text in the comparison's file."""
        return str(self.given["settings"]["data"]["source"])

    def asked(self, items: Sequence["Item"], data: Path, out: Path) -> Asked:
        """Return what to run; runs that other records of the queue have are taken from there."""
        return Asked(self.spec(data), out / self.name, self.record, _others(self, items))


@dataclass(frozen=True)
class Standing:
    """How far a comparison has come; `seconds` is the estimated time that is left."""

    finished: int
    planned: int
    seconds: float
    refused: str | None = None  # why this version of raptr cannot run it

    @property
    def done(self) -> bool:
        """Whether nothing is left to run."""
        return self.refused is None and self.finished == self.planned


def read_queue(path: Path = QUEUE) -> list[Item]:
    """Return the comparisons, the most useful first."""
    return [_item(entry) for entry in read_yaml(path, "queue")]


def standing(item: Item, items: Sequence[Item], out: Path, data: Path | None = None) -> Standing:
    """Return how far a comparison has come, by its record and runs; without its text, assume a vocabulary of 8,192."""
    try:
        comparison = read_comparison(item.spec(data if data is not None and item.ready(data) else None))
        progress = Progress(comparison, out / item.name, None, record=item.record, others=_others(item, items))
    except ValueError as error:
        return Standing(0, 0, 0.0, str(error))
    left = sum(task.run.entry.flops for task in progress.unfinished()) + _expected(comparison, progress)
    return Standing(progress.finished, progress.planned, left / _speed(comparison))


def _item(entry: Mapping[str, Any]) -> Item:
    name = entry["name"]
    file, record = entry.get("file", f"evidence/{name}.yaml"), entry.get("record", RECORDS / f"{name}.json")
    question, means = (" ".join(entry[key].split()) for key in ("question", "means"))
    return Item(name, question, means, Path(file), Path(record), entry.get("held", False), entry.get("jobs", Item.jobs))


def _others(item: Item, items: Sequence[Item]) -> tuple[Path, ...]:
    """Return the records of the other comparisons on the same text; none for one that needs the models themselves."""
    if item.judges:
        return ()
    return tuple(other.record for other in items if other != item and other.source == item.source)


def _expected(comparison: Comparison, progress: Progress) -> float:
    """Return the FLOPs of runs that will be wanted later: more learning rates, and other seeds at the best one."""
    tried: dict[str, set[float]] = {}
    seeds: dict[str, set[int]] = {}
    for run in (wanted.run for wanted in progress.wanted_runs()):
        tried.setdefault(run.entry.label, set()).add(run.peak)
        seeds.setdefault(run.entry.label, set()).add(run.seed)
    expected = 0.0
    for entry in comparison.entries:
        rates = max(0, LEAST - len(tried[entry.label])) if comparison.widen else 0
        others = len(set(comparison.seeds) - seeds[entry.label])
        expected += entry.flops * (rates * len(comparison.tune) + others)
    return expected


def _speed(comparison: Comparison) -> float:
    """Return FLOPs per second, as measured at the nearest width."""
    width = comparison.entries[0].config.mapping()["model"]["width"]
    return SPEED[min(SPEED, key=lambda measured: max(measured / width, width / measured))]
