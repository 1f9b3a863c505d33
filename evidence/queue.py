"""The queue of comparisons (queue.yaml): which there are, where their records lie, and how far each one is."""

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
CORPUS = "corpus"  # how comparisons name the text that is prepared for masked language modelling
# FLOPs a second by width: seven runs at once on an NVIDIA H200, 12 layers, 32,768 tokens a step in sequences of 64.
# These are 7.0, 3.3 and 0.83 million tokens a second of full training.
SPEED = {128: 1.14e14, 256: 2.01e14, 768: 4.34e14}
LEAST = 3  # learning rates that a widened grid has


@dataclass(frozen=True)
class Item:
    """A comparison of the queue; paths are relative to the project's root."""

    name: str
    question: str
    means: str  # what each outcome would say
    file: Path
    record: Path
    held: bool = False  # not taken with the others: its own command runs it

    def spec(self, data: Path | None) -> dict[str, Any]:
        """The comparison's content with its text at `data`; None: nowhere, to plan without it and without tasks."""
        settings, source = self.given["settings"], None if data is None else str(self.text(data))
        spec = {**self.given, "settings": {**settings, "data": {**settings["data"], "source": source}}}
        return {key: value for key, value in spec.items() if data is not None or key != "evaluate"}

    @cached_property
    def given(self) -> dict[str, Any]:
        """The comparison's file, read once: all items look at each other's."""
        return read_file(self.file)

    def text(self, data: Path) -> Path:
        """Where the comparison's text is: for one that names `corpus-causal`, beside `data` as DATA-causal."""
        source = self.source
        return data.with_name(data.name + source.removeprefix(CORPUS)) if source.startswith(CORPUS) else data

    def ready(self, data: Path) -> bool:
        """Whether its text is there and, where models are judged by tasks, the tasks' folder."""
        judged = self.given.get("evaluate", {})
        return self.text(data).exists() and all(Path(section["data"]).exists() for section in judged.values())

    @property
    def judges(self) -> bool:
        """Whether it judges its models by tasks."""
        return "evaluate" in self.given

    @property
    def source(self) -> str:
        """What the comparison calls its text."""
        return str(self.given["settings"]["data"]["source"])

    def asked(self, items: Sequence["Item"], data: Path, out: Path) -> Asked:
        """What to run; runs that other records of the queue have are taken from there."""
        return Asked(self.spec(data), out / self.name, self.record, _others(self, items))


@dataclass(frozen=True)
class Standing:
    """How far a comparison is; `seconds` is what is left, estimated."""

    finished: int
    planned: int
    seconds: float
    refused: str | None = None  # why this version of raptr cannot run it

    @property
    def done(self) -> bool:
        """Whether nothing is left to run."""
        return self.refused is None and self.finished == self.planned


def read_queue(path: Path = QUEUE) -> list[Item]:
    """The comparisons, the most useful first."""
    return [_item(entry) for entry in read_yaml(path, "queue")]


def standing(item: Item, items: Sequence[Item], out: Path, data: Path | None = None) -> Standing:
    """Where a comparison is by the records and its run folders; without its text a vocabulary of 8,192 is assumed."""
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
    return Item(name, question, means, Path(file), Path(record), entry.get("held", False))


def _others(item: Item, items: Sequence[Item]) -> tuple[Path, ...]:
    """The records of the other comparisons on the same text; none for one that needs the models themselves."""
    if item.judges:
        return ()
    return tuple(other.record for other in items if other != item and other.source == item.source)


def _expected(comparison: Comparison, progress: Progress) -> float:
    """FLOPs of runs that are not wanted yet but will be: more learning rates, and other seeds at the best one."""
    tried: dict[str, set[float]] = {}
    seeds: dict[str, set[int]] = {}
    for run in (one.run for one in progress.wanted_runs()):
        tried.setdefault(run.entry.label, set()).add(run.peak)
        seeds.setdefault(run.entry.label, set()).add(run.seed)
    expected = 0.0
    for entry in comparison.entries:
        rates = max(0, LEAST - len(tried[entry.label])) if comparison.widen else 0
        others = len(set(comparison.seeds) - seeds[entry.label])
        expected += entry.flops * (rates * len(comparison.tune) + others)
    return expected


def _speed(comparison: Comparison) -> float:
    """FLOPs a second, as measured for the width that is nearest."""
    width = comparison.entries[0].config.mapping()["model"]["width"]
    return SPEED[min(SPEED, key=lambda measured: max(measured / width, width / measured))]
