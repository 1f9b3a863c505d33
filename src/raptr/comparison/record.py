"""The record of a comparison: every number of its finished runs as JSON, enough to draw its page and to resume it.

A run in a record counts as finished even if its folder is gone, so one small file is enough to resume a comparison on
another machine. Entries, seeds and learning rates can be added to a record, but no runs with other settings or data.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from raptr.comparison.outcomes import FULL, REDUCED, Outcome
from raptr.comparison.spec import Comparison, Entry, PlannedRun, at
from raptr.comparison.table import Row, finals, rows
from raptr.report.units import plain
from raptr.settings import flat
from raptr.train.config import ROUNDING, Config, differences

Key = tuple[str, float, int]  # label, peak, seed


@dataclass(frozen=True)
class Finished:
    """A finished run: its outcome, its configuration, and the environment it was trained in."""

    outcome: Outcome
    config: Mapping[str, Any]
    environment: Mapping[str, Any]

    @property
    def key(self) -> Key:
        return self.outcome.label, self.outcome.peak, self.outcome.seed

    def fits(self, run: PlannedRun) -> bool:
        """Return whether this is the run that `run` describes, under whatever label."""
        same = (self.outcome.peak, self.outcome.seed, self.outcome.steps) == run.terms
        return same and not changes(Config.read(self.config), run.config)

    def named(self, label: str) -> "Finished":
        return replace(self, outcome=replace(self.outcome, label=label))


def load_record(path: Path) -> dict[str, Any] | None:
    """Return the record in a file, or None if there is no file; ValueError if it holds anything else."""
    if not path.exists():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record["runs"], list) or not isinstance(record["configs"], dict):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"record is {str(path)!r}, which is not the record of a comparison") from None
    return record


def read_finished_runs(record: Mapping[str, Any]) -> list[Finished]:
    """Return the runs of a record, each with its full configuration."""
    runs = []
    for outcome, run in zip(read_outcomes(record), record["runs"], strict=True):
        config = record["configs"][outcome.label]
        run_config = {
            **config,
            "optimizer": {**config["optimizer"], "peak": outcome.peak},
            "train": {**config["train"], "seed": outcome.seed},
        }
        runs.append(Finished(outcome, run_config, record["environments"][run["environment"]]))
    return runs


def read_outcomes(record: Mapping[str, Any]) -> list[Outcome]:
    """Return the outcomes of a record's runs."""
    names = {entry.name for entry in fields(Outcome)} - {"curve"}
    return [
        Outcome(
            **{key: value for key, value in run.items() if key in names},
            curve=tuple((step, flops, float("nan") if loss is None else loss) for step, flops, loss in run["curve"]),
        )
        for run in record["runs"]
    ]


def read_rows(record: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a record's table, with their statistics."""
    outcomes = read_outcomes(record)
    grids = {label: sorted({run.peak for run in outcomes if run.label == label}) for label in record["configs"]}
    return rows(outcomes, grids, record["full_flops"])


def check_record(path: Path, record: Mapping[str, Any], entries: Iterable[Entry], fingerprint: str | None) -> None:
    """Refuse a record whose runs do not compare with those of `entries`, or have other data (None: any data)."""
    recorded = record.get("data", {}).get("fingerprint")
    changed = []
    if fingerprint is not None and recorded != fingerprint:
        changed.append(f"the data's fingerprint: was {recorded}, now {fingerprint}")
    configs = record["configs"]
    for entry in entries:
        if entry.label in configs:
            begun = Config.read(configs[entry.label])
            wanted = at(entry.config, seed=begun.train.seed, peak=begun.optimizer.peak)
            changed += [f"{entry.label}: {change}" for change in changes(begun, wanted)]
    if changed:
        raise ValueError(
            f"record is {str(path)!r}, whose runs were made with other settings ({'; '.join(changed)}); "
            "go on with the old ones, or name another record"
        )


def check_machine(path: Path, finished: Iterable[Finished], entries: Iterable[Entry]) -> None:
    """Refuse to add runs on another device, or in another precision, than the runs that an entry already has."""
    known = {run.outcome.label: Config.read(run.config).mapping() for run in finished}
    for entry in entries:
        if entry.label in known:
            here = entry.config.resolved().mapping()
            changed = {key: change for key, change in differences(known[entry.label], here).items() if key in ROUNDING}
            if changed:
                listed = "; ".join(f"{key}: {change}" for key, change in changed.items())
                raise ValueError(
                    f"record is {str(path)!r}, whose runs were made with other arithmetic ({entry.label}: {listed}); "
                    "go on where they were made, set the same device and precision, or name another record"
                )


def check_scores(path: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to mix scores of different `evaluate` sections; the paths of their data may differ."""
    before, after = (flat(section, "evaluate.") for section in (was, now))
    names = [name for name in {**before, **after} if not name.endswith(".data")]
    changed = [name for name in names if before.get(name) != after.get(name)]
    if changed:
        listed = "; ".join(f"{name}: was {before.get(name)!r}, now {after.get(name)!r}" for name in changed)
        raise ValueError(
            f"record is {str(path)!r}, which has scores made in another way ({listed}) by models that are not here; "
            "go on with the old settings, or name another record"
        )


def changes(begun: Config, wanted: Config) -> list[str]:
    """List the settings in which a run that was begun differs from the one that is wanted."""
    old, new = begun.mapping(), wanted.following(begun).mapping()
    changed = [f"{key}: {change}" for key, change in differences(old, new).items()]
    samples = [mapping["train"]["eval_samples"] for mapping in (old, new)]
    if samples[0] != samples[1]:  # a single run may change this, but losses on different samples do not compare
        changed.append(f"train.eval_samples: was {samples[0]}, now {samples[1]}")
    return changed


def assembled(
    comparison: Comparison, runs: Sequence[Finished], *, finished: int, planned: int, data: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of these runs. `finished` and `planned` count the runs that the comparison wants."""
    environments: list[Mapping[str, Any]] = []
    configs: dict[str, Mapping[str, Any]] = {}
    run_dicts = []
    for run in runs:
        if run.environment not in environments:
            environments.append(run.environment)
        configs.setdefault(run.outcome.label, run.config)
        size = _size(run, sum(data["tokens"].values()))
        run_dicts.append({**asdict(run.outcome), **size, "environment": environments.index(run.environment)})
    record: dict[str, Any] = {
        "comparison": dict(comparison.given),
        "budget": budget(comparison),
        "finished": finished,
        "planned": planned,
        "full_flops": comparison.full_flops,
        "data": dict(data),
        "configs": configs,  # of each entry's first run; its other runs differ in peak and seed
        "environments": environments,
        "runs": run_dicts,
    }
    record = plain(record)
    table = read_rows(record)
    record |= plain({"best": [asdict(row) for row in finals(table)], "rows": [asdict(row) for row in table]})
    return record


def budget(comparison: Comparison) -> str:
    """Describe in words how long the runs are."""
    full = next(entry for entry in comparison.entries if entry.label == FULL)
    decay = f"Learning rates decay over the last {full.config.optimizer.decay:.0%} of every run's steps."
    flops = comparison.given.get("flops")
    if flops is not None:
        text = f"Every entry spends {flops:g} of the FLOPs of full training over {full.steps:,} steps"
        return f"{text}, as nearly as whole steps allow. {decay}"
    text = f"Every entry takes {full.steps:,} steps"
    if comparison.fraction is not None:
        reduced = next(entry for entry in comparison.entries if entry.label == REDUCED)
        text += f"; {REDUCED} takes {reduced.steps:,} and spends {reduced.flops / full.flops:.3f} of full's FLOPs, "
        text += f"at most the mean of the entries that cost less, {comparison.fraction:.3f}"
    return f"{text}. {decay}"


def _size(run: Finished, unique: int) -> dict[str, Any]:
    """Return the size of the run's model, and how much text it was trained on."""
    config = Config.read(run.config)
    model = config.dimensions
    weights = model.layers * model.layer_weights(model.shape.heads, model.shape.parts)
    tokens = run.outcome.steps * config.train.batch * config.data.length
    return {
        "layers": model.layers,
        "width": model.width,
        "tokens": tokens,
        "tokens_per_weight": tokens / weights,
        "unique_tokens": unique,
        "epochs": tokens / unique,
    }
