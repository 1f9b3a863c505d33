"""What the committed records measure of each method: rows for `raptr.train.advice` and for the page which-method."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from evidence.queue import LEAST, QUEUE, read_queue
from raptr.comparison.outcomes import FULL, REDUCED
from raptr.comparison.record import read_rows
from raptr.comparison.table import Row, finals
from raptr.report.statistics import Mean
from raptr.train.advice import Difference, Measured, Place, place_of, plain_settings
from raptr.train.config import Config
from raptr.train.idle import needed

ROOT = Path(__file__).resolve().parents[1]
ITEMS = read_queue(ROOT / QUEUE)
SOURCES = {item.name: str(item.record) for item in ITEMS} | {"compare": "docs/results/compare.json"}
DECAY = 0.25  # decay of the runs that advice rests on: the default
EPOCHS = 5.0  # most epochs of full training; with more, the repetition of text would influence the result


def read_records() -> dict[str, Any]:
    """Return the records by name; None for a record that does not exist yet."""
    paths = {name: ROOT / path for name, path in SOURCES.items()}
    return {name: json.loads(path.read_text("utf-8")) if path.exists() else None for name, path in paths.items()}


def measurements(records: Mapping[str, Any]) -> list[Measured]:
    """Return a row for each method at each place.

    If several records measure the same, the row comes from the one with equal terms and then with more seeds.
    """
    best: dict[str, Measured] = {}
    for name, record in records.items():
        for row in [] if record is None else _rows(name, record):
            key = json.dumps([asdict(row.place), row.method], sort_keys=True)
            known = best.get(key)
            if known is None or (known.older, -known.to_full.seeds) > (row.older, -row.to_full.seeds):
                best[key] = row
    return list(best.values())


def full_training(records: Mapping[str, Any]) -> dict[Place, Difference]:
    """Return, by place, how far full training of all steps ends below that with the FLOPs of the other entries."""
    best: dict[Place, tuple[tuple[bool, int], Difference]] = {}
    for name, record in records.items():
        if record is None or not _rows(name, record):
            continue
        (full,) = [row for row in finals(read_rows(record)) if row.label == FULL]
        configs = {label: _config(record, label) for label in (FULL, REDUCED)}
        difference, place = _difference(full.to_reduced), _place(configs[FULL])
        order = (_older(configs), -difference.seeds)
        if place not in best or order < best[place][0]:
            best[place] = (order, difference)
    return {place: difference for place, (_, difference) in best.items()}


def packaged(records: Mapping[str, Any]) -> str:
    """Return the content of src/raptr/train/measured.json."""
    return "[\n" + ",\n".join(json.dumps(_rounded(asdict(row))) for row in measurements(records)) + "\n]\n"


def _rows(name: str, record: Mapping[str, Any]) -> list[Measured]:
    """Return the entries of a record that advice can rest on, each at its best learning rate."""
    table = read_rows(record)
    final, rates = {row.label: row for row in finals(table)}, Counter(row.label for row in table)
    widened = record["comparison"].get("widen", False)
    whole = [label for label, row in final.items() if searched(row, rates[label], widened=widened)]
    configs = {label: _config(record, label) for label in whole}
    if not {FULL, REDUCED} <= configs.keys() or not _usual(record, configs[FULL]):
        return []
    rows = []
    for label, config in configs.items():
        row = final[label]
        if label in (FULL, REDUCED) or not _alike(config, configs[FULL]):
            continue
        assert row.loss is not None
        assert row.flops is not None
        rows.append(
            Measured(
                record=name,
                entry=label,
                place=_place(configs[FULL]),
                method=plain_settings(config.make_method()),
                steps=row.steps,
                full_steps=final[FULL].steps,
                flops=row.flops,
                loss=row.loss.mean,
                to_full=_difference(row.to_full),
                to_reduced=_difference(row.to_reduced),
                older=_older(configs),
            )
        )
    return rows


def searched(row: Row, rates: int, *, widened: bool) -> bool:
    """Return whether the search for the entry's learning rate has ended, with its best rate inside the grid."""
    return row.best and row.loss is not None and not row.edge and (rates >= LEAST or not widened)


def _usual(record: Mapping[str, Any], full: Config) -> bool:
    """Return whether the comparison is of plain models at equal FLOPs, with the usual decay and few epochs (EPOCHS).

    A comparison that judges models by tasks takes its learning rates from others, so advice rests on those.
    """
    if "evaluate" in record["comparison"]:
        return False
    if full.dimensions.residual_multiplier != 1 or full.dimensions.norm_scaling:
        return False
    epochs = max((run.get("epochs", 0.0) for run in record["runs"] if run["label"] == FULL), default=0.0)
    return "flops" in record["comparison"] and full.optimizer.decay == DECAY and epochs <= EPOCHS


def _older(configs: Mapping[str, Config]) -> bool:
    """Return whether all runs decayed over the same number of steps, not over the same fraction of their own."""
    return configs[REDUCED].optimizer.decay != configs[FULL].optimizer.decay


def _alike(config: Config, full: Config) -> bool:
    """Return whether an entry differs from full training only in its method, its steps and its learning rate."""
    same = replace(config.optimizer, peak=full.optimizer.peak, decay=full.optimizer.decay, idle=None)
    usual = config.idle(method := config.make_method()) == needed(method)
    return (
        usual
        and same == replace(full.optimizer, idle=None)
        and config.train.precision == full.train.precision
        and config.dimensions == full.dimensions
    )


def _config(record: Mapping[str, Any], label: str) -> Config:
    return Config.read(record["configs"][label])


def _place(config: Config) -> Place:
    return place_of(config)


def _difference(mean: Mean | None) -> Difference:
    assert mean is not None
    return Difference(mean.mean, mean.interval, mean.n)


def _rounded(value: Any) -> Any:
    """Round numbers to six digits: enough to choose by, and the same on every machine."""
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
