"""Read a run folder: its configuration, its environment and the records of its training.

`metrics.jsonl` is append-only, so a resumed run writes some steps twice and a killed one may leave half a line: the
last record of each (kind, step) wins, and a torn last line is dropped. Lines that are no records, or hold an impossible
count, are ignored; the report lists them.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

EVALUATION = "evaluation"  # the folder in a run's folder to which `raptr finetune` and `raptr fewshot` write scores
LARGEST_COUNT = 2**63  # of steps or tokens
LARGEST_AMOUNT = 1e36  # of FLOPs or seconds; a loss beyond it counts as infinite


@dataclass(frozen=True)
class TrainRecord:
    """Training after `step` steps; the loss is that of the subnetwork that ran."""

    step: int
    stage: int
    stages: int
    size: float
    loss: float
    tokens: int
    flops: float
    flops_layers: float
    seconds: float
    lr: float | None = None
    grad_norm: float | None = None
    heads: float | None = None  # heads in a running layer, if not all run or exist yet; likewise `parts`
    parts: float | None = None


@dataclass(frozen=True)
class EvalRecord:
    """The full model's held-out loss after `step` steps, also by domain and denoiser; `sizes`: of random subnetworks.

    `loss` is the mean over held-out windows; `loss_mixture` weighs the losses of the domains as training does.
    Perplexity and bits per byte are recorded if the objective gives the likelihood of text.
    """

    step: int
    loss: float
    tokens: int
    flops: float
    flops_layers: float
    seconds: float
    loss_mixture: float | None = None
    perplexity: float | None = None
    bits_per_byte: float | None = None
    domains: Mapping[str, float] = field(default_factory=dict)
    denoisers: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One run folder, with its records sorted by step; `ignored` holds the numbers of malformed lines."""

    path: Path
    name: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    train: tuple[TrainRecord, ...]
    evals: tuple[EvalRecord, ...]
    ignored: tuple[int, ...] = ()
    data: str | None = None  # the fingerprint of its data, which older runs did not record
    scores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # on tasks, by column (`read_scores`)

    @property
    def method(self) -> str:
        """The method's name, or a question mark if the configuration has none."""
        return str(_section(self.config, "method").get("name", "?"))

    @property
    def schedule(self) -> str | None:
        """The schedule as written in the configuration, such as `6-8-10-12` or `6-9-12, heads 6-9-12`."""
        method = _section(self.config, "method")
        axes = (("schedule", ""), ("heads", "heads "), ("parts", "MLP "))
        sizes = {name: _schedule(method.get(key)) for key, name in axes}
        return ", ".join(f"{name}{text}" for name, text in sizes.items() if text is not None) or None

    @property
    def planned(self) -> int | None:
        """The number of steps in the configuration, or None if it has none."""
        steps = _section(self.config, "train").get("steps")
        return steps if type(steps) is int else None

    @property
    def last(self) -> TrainRecord | EvalRecord:
        """The record of the largest step: how far the run has come."""
        records: tuple[TrainRecord | EvalRecord, ...] = (*self.train, *self.evals)
        return max(records, key=lambda record: record.step)

    @property
    def transitions(self) -> tuple[TrainRecord, ...]:
        """The last record of every stage but the last, at or before the step at which the stage changes."""
        return tuple(old for old, new in pairwise(self.train) if old.stage != new.stage)


def read_run(path: Path) -> Run:
    """Read a run folder."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a run folder: there is no such folder.")
    for file in ("config.yaml", "environment.json", "metrics.jsonl"):
        if not (path / file).is_file():
            raise ValueError(f"{path} is not a run folder: {file} is missing.")
    train, evals, ignored = _records((path / "metrics.jsonl").read_bytes())
    if not train and not evals:
        lines = f", and {malformed(ignored)} of it is malformed" if ignored else ""
        raise ValueError(f"{path} has no records yet: metrics.jsonl holds no train or eval record{lines}.")
    starts = _starts(path / "environment.json")
    return Run(
        path=path,
        name=path.resolve().name,
        config=_mapping(path / "config.yaml"),
        environment=_environment(starts),
        train=train,
        evals=evals,
        ignored=ignored,
        data=None if starts[-1].get("data") is None else str(starts[-1]["data"]),
        scores=read_scores(path),
    )


def read_scores(run: Path) -> dict[str, dict[str, Any]]:
    """Return the scores noted for a run's model, by column; damaged files are left out.

    A file holds {"columns": {"SST-2": {"score": 0.87, "interval": 0.01, "constant": 0.51, ...}}}.
    """
    columns: dict[str, dict[str, Any]] = {}
    for path in sorted((run / EVALUATION).glob("*.json")):
        try:
            for name, cell in json.loads(path.read_text(encoding="utf-8"))["columns"].items():
                columns[str(name)] = {**cell, "score": float(cell["score"]), "constant": float(cell["constant"])}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return columns


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, with scores that do not compare with earlier runs' scores moved to columns of their own.

    `made` in a cell identifies data and recipe; a cell in a column `SST-2 (2)` says that it is `unlike` SST-2.
    """
    ways: dict[str, list[Any]] = {}
    renamed = []
    for run in runs:
        scores: dict[str, Mapping[str, Any]] = {}
        for name, cell in run.scores.items():
            known = ways.setdefault(name, [])
            if cell.get("made") not in known:
                known.append(cell.get("made"))
            place = known.index(cell.get("made")) + 1
            scores.update({name: cell} if place == 1 else {f"{name} ({place})": {**cell, "unlike": name}})
        renamed.append(replace(run, scores=scores))
    return renamed


def malformed(lines: Sequence[int]) -> str:
    """List line numbers for a message, such as `line 3` or `line 3, 5, 8 and 2 more`."""
    shown = ", ".join(map(str, lines[:3]))
    return f"line {shown}" + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a label for each run: its name, preceded by the parent folder if two runs share a name."""
    count = Counter(run.name for run in runs)
    return [run.name if count[run.name] == 1 else f"{run.path.resolve().parent.name}/{run.name}" for run in runs]


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _mapping(path: Path) -> Mapping[str, Any]:
    value = _parsed(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a mapping, not {type(value).__name__}.")
    return value


def _starts(path: Path) -> list[Mapping[str, Any]]:
    starts = _parsed(path)
    if not isinstance(starts, list) or not starts or not all(isinstance(start, dict) for start in starts):
        raise ValueError(f"{path} must hold a list of mappings, one for each start.")
    return starts


def _environment(starts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Merge the environments of a run's starts; a value that changed reads `a, then b`."""
    environment: dict[str, Any] = {}
    for key in dict.fromkeys(key for start in starts for key in start if key not in ("step", "data")):
        values = [start.get(key) for start in starts]
        turns = [value for number, value in enumerate(values) if number == 0 or value != values[number - 1]]
        environment[key] = turns[0] if len(turns) == 1 else ", then ".join(map(str, turns))
    return environment


def _parsed(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        language = "JSON" if path.suffix == ".json" else "YAML"
        raise ValueError(f"{path} cannot be read: it is not valid {language}.") from error


def _records(content: bytes) -> tuple[tuple[TrainRecord, ...], tuple[EvalRecord, ...], tuple[int, ...]]:
    """Return the train and eval records of a metrics file, and the numbers of its malformed lines."""
    train: dict[int, TrainRecord] = {}
    evals: dict[int, EvalRecord] = {}
    ignored: list[int] = []
    *lines, unfinished = content.split(b"\n")
    for number, line in enumerate([*lines, unfinished], start=1):
        if not line.strip():
            continue
        try:
            record = _parse(line)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            if number <= len(lines):
                ignored.append(number)
            continue
        if isinstance(record, TrainRecord):
            train[record.step] = record
        elif isinstance(record, EvalRecord):
            evals[record.step] = record
    return (
        tuple(train[step] for step in sorted(train)),
        tuple(evals[step] for step in sorted(evals)),
        tuple(ignored),
    )


def _parse(line: bytes) -> TrainRecord | EvalRecord | None:
    """Return the record in a line, or None for a kind that this reader does not know."""
    values = json.loads(line)
    if not isinstance(values, dict):
        raise TypeError("a record is a mapping")
    if not isinstance(values["kind"], str):
        raise TypeError("a kind is a word")
    kind = {"train": TrainRecord, "eval": EvalRecord}.get(values["kind"])
    if kind is None:
        return None
    needed = {entry.name for entry in fields(kind) if entry.default is entry.default_factory is MISSING}
    known = {entry.name for entry in fields(kind) if entry.name in values} | needed
    record: TrainRecord | EvalRecord = kind(**{name: _READERS.get(name, _optional)(values[name]) for name in known})
    return record


def _schedule(schedule: object) -> str | None:
    if isinstance(schedule, list | tuple):
        return "-".join(str(size) for size in schedule)
    return None if schedule is None else str(schedule)


def _losses(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise TypeError("not a mapping")
    return {key: _number(loss) for key, loss in value.items()}


def _losses_by_size(value: object) -> dict[int, float]:
    return {_whole(int(size)): loss for size, loss in _losses(value).items()}


def _number(value: object) -> float:
    """Return any number as a float, since a loss may be infinite; numbers too large to plot become infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("not a number")
    number = float(value)
    return math.copysign(math.inf, number) if abs(number) > LARGEST_AMOUNT else number


def _optional(value: object) -> float | None:
    return None if value is None else _number(value)


def _amount(value: object) -> float:
    """Return a number that counts something, such as FLOPs."""
    amount = _number(value)
    if not 0 <= amount <= LARGEST_AMOUNT:
        raise ValueError("not an amount")
    return amount


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
        raise ValueError("not a count")
    return value


# How the fields of a record are read; all other fields are numbers or None.
_READERS: dict[str, Callable[[object], object]] = {
    **dict.fromkeys(("step", "stage", "stages", "tokens"), _whole),
    **dict.fromkeys(("size", "flops", "flops_layers", "seconds"), _amount),
    **dict.fromkeys(("domains", "denoisers"), _losses),
    "sizes": _losses_by_size,
    "loss": _number,
}
