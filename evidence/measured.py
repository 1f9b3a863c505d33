"""What the committed records say about each method: the rows of `raptr.train.advice`, and of the page about them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from evidence.queue import QUEUE, read_queue
from raptr.comparison.record import read_rows
from raptr.comparison.spec import FULL, REDUCED
from raptr.comparison.table import Mean, Row, finals
from raptr.models.contract import ModelConfig
from raptr.models.registry import FAMILIES
from raptr.train.advice import Difference, Measured, Place, plain_settings

ROOT = Path(__file__).resolve().parents[1]
ITEMS = read_queue(ROOT / QUEUE)
SOURCES = {item.name: str(item.record) for item in ITEMS} | {"compare": "docs/results/compare.json"}
DECAY = 0.25  # of the runs that advice rests on: the default
EPOCHS = 4.0  # of full training; with more, repetition of the text is a part of what is measured


def read_records() -> dict[str, Any]:
    """The records by name; None for one that is not there yet."""
    paths = {name: ROOT / path for name, path in SOURCES.items()}
    return {name: json.loads(path.read_text("utf-8")) if path.exists() else None for name, path in paths.items()}


def measurements(records: Mapping[str, Any]) -> list[Measured]:
    """A row for each method at each place; of the same one in several records, that with equal terms and more seeds."""
    found: dict[str, Measured] = {}
    for name, record in records.items():
        for row in [] if record is None else _rows(name, record):
            key = json.dumps([asdict(row.place), row.method], sort_keys=True)
            known = found.get(key)
            if known is None or (known.older, -known.to_full.seeds) > (row.older, -row.to_full.seeds):
                found[key] = row
    return list(found.values())


def full_training(records: Mapping[str, Any]) -> dict[Place, Difference]:
    """How far full training of all steps ends below that with the FLOPs of the other entries, by place."""
    found: dict[Place, tuple[bool, int, Difference]] = {}
    for record in records.values():
        if record is None or not _rows("", record):
            continue
        (full,) = [row for row in finals(read_rows(record)) if row.label == FULL]
        difference = _difference(full.to_reduced)
        order = (_steps_of_decay(record["configs"][FULL]) is not None, -difference.seeds, difference)
        place = place_of(record)
        if place not in found or order[:2] < found[place][:2]:
            found[place] = order
    return {place: difference for place, (_, _, difference) in found.items()}


def packaged(records: Mapping[str, Any]) -> str:
    """The content of src/raptr/train/measured.json."""
    return "[\n" + ",\n".join(json.dumps(_rounded(asdict(row))) for row in measurements(records)) + "\n]\n"


def place_of(record: Mapping[str, Any]) -> Place:
    """The size and the length of a comparison, those of its full training."""
    config = record["configs"][FULL]
    dimensions = _dimensions(config)
    weights = dimensions.layers * dimensions.layer_weights(dimensions.shape.heads, dimensions.shape.parts)
    tokens = config["train"]["steps"] * config["train"]["batch"] * config["data"]["length"]
    family = config["model"].get("family", next(iter(FAMILIES)))
    objective = config.get("objective", {}).get("name") or FAMILIES[family].objectives[0]
    return Place(family, objective, dimensions.init, dimensions.layers, dimensions.width, tokens / weights)


def _rows(name: str, record: Mapping[str, Any]) -> list[Measured]:
    """The entries of a record that advice can rest on, each at its best learning rate."""
    rates: dict[str, int] = {}
    table = read_rows(record)
    for row in table:
        rates[row.label] = rates.get(row.label, 0) + 1
    final = {row.label: row for row in finals(table)}
    widened = record["comparison"].get("widen", False)
    whole = {label for label, row in final.items() if _searched(row, rates[label], widened)}
    config = record["configs"].get(FULL)
    if not {FULL, REDUCED} <= whole or not _usual(record, config):
        return []
    made = []
    for label in final:
        own, row = record["configs"][label], final[label]
        if label in (FULL, REDUCED) or label not in whole or not _alike(own, config):
            continue
        assert row.loss is not None
        assert row.flops is not None
        made.append(
            Measured(
                record=name,
                entry=label,
                place=place_of(record),
                method=plain_settings(own["method"]["name"], {k: v for k, v in own["method"].items() if k != "name"}),
                steps=row.steps,
                full_steps=final[FULL].steps,
                flops=row.flops,
                loss=row.loss.mean,
                to_full=_difference(row.to_full),
                to_reduced=_difference(row.to_reduced),
                older=_steps_of_decay(config) is not None,
            )
        )
    return made


def _searched(row: Row, rates: int, widened: bool) -> bool:
    """Whether the search for the entry's learning rate has ended, with its best rate inside the grid."""
    return row.best and row.loss is not None and not row.edge and (rates > 2 or not widened)


def _usual(record: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether the comparison is at equal FLOPs, with the usual decay, on text that is not repeated too often."""
    decay = _steps_of_decay(config)
    share = config["optimizer"]["decay"] if decay is None else decay / config["train"]["steps"]
    epochs = max((run.get("epochs", 0.0) for run in record["runs"] if run["label"] == FULL), default=0.0)
    return "flops" in record["comparison"] and share == DECAY and epochs <= EPOCHS


def _steps_of_decay(config: Mapping[str, Any]) -> int | None:
    """The decay in steps, as records had it once; None where it is a fraction."""
    decay = config["optimizer"]["decay"]
    return decay if isinstance(decay, int) and decay > 1 else None


def _alike(config: Mapping[str, Any], full: Mapping[str, Any]) -> bool:
    """Whether an entry differs from full training in nothing but its method, its steps and its learning rate."""
    own, other = ({**each["optimizer"], "peak": None} for each in (config, full))
    precision = [each["train"]["precision"] for each in (config, full)]
    return own == other and precision[0] == precision[1] and _dimensions(config) == _dimensions(full)


def _dimensions(config: Mapping[str, Any]) -> ModelConfig:
    model = config["model"]
    size = FAMILIES[model.get("family", next(iter(FAMILIES)))].sizes[model["size"]]
    named = {entry.name for entry in fields(size)}
    return replace(size, **{key: value for key, value in model.items() if key in named and value is not None})


def _difference(mean: Mean | None) -> Difference:
    assert mean is not None
    return Difference(mean.mean, mean.interval, mean.n)


def _rounded(value: Any) -> Any:
    """Numbers with six digits: enough to choose by, and the same on every machine."""
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
