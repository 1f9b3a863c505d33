"""What a comparison found: its record as JSON, and the tables and the plot that are drawn from that record alone.

The record holds every number of the finished runs, the configuration of each entry and where the runs were made, so
`redraw` makes the page and the picture again at any time, without the run folders.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group

from raptr.comparison.outcomes import Outcome
from raptr.comparison.plot import draw
from raptr.comparison.spec import FULL, REDUCED, Comparison, PlannedRun
from raptr.comparison.table import Row, finals, markdown, notes, plain, rich_table, rows, timed
from raptr.data import TokenStore
from raptr.files import write_text
from raptr.report.plots import save
from raptr.report.runs import Run

NAME = "compare"
MACHINE = ("processor", "gpu", "threads")
Finished = Sequence[tuple[PlannedRun, Run, Outcome]]


def write_results(
    comparison: Comparison, finished: Finished, planned: int, store: TokenStore, out: Path
) -> Group | None:
    """Write the record, the tables and the plot over the finished runs; returns the final table (None: no run is)."""
    if not finished:
        return None
    record = plain(_record(comparison, finished, planned, store))
    table = read_rows(record)
    record |= plain({"best": [asdict(row) for row in finals(table)], "rows": [asdict(row) for row in table]})
    write_text(out / f"{NAME}.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    redraw(record, out)
    caption = " ".join([record["budget"], *notes(table)])
    return rich_table(finals(table), f"Comparison: {_title(record)}", caption)


def redraw(record: Mapping[str, Any], out: Path) -> None:
    """Make the page and the plot of a comparison's record."""
    save(picture(record), out / f"{NAME}.png")
    write_text(out / f"{NAME}.md", _page(record, read_rows(record)))


def picture(record: Mapping[str, Any]) -> Any:
    """The figure of a comparison's record."""
    return draw(read_rows(record), read_outcomes(record), record["full_flops"], full=FULL, reduced=REDUCED)


def read_rows(record: Mapping[str, Any]) -> list[Row]:
    """The statistics of a comparison's record."""
    outcomes = read_outcomes(record)
    grids = {label: sorted({run.peak for run in outcomes if run.label == label}) for label in record["configs"]}
    return rows(outcomes, grids, full=FULL, reduced=REDUCED, full_flops=record["full_flops"])


def read_outcomes(record: Mapping[str, Any]) -> list[Outcome]:
    """The runs of a comparison's record."""
    return [
        Outcome(
            **{key: value for key, value in run.items() if key not in ("curve", "environment", "tokens")},
            curve=tuple((step, flops, float("nan") if loss is None else loss) for step, flops, loss in run["curve"]),
        )
        for run in record["runs"]
    ]


def _record(comparison: Comparison, finished: Finished, planned: int, store: TokenStore) -> dict[str, Any]:
    environments: list[Mapping[str, Any]] = []
    configs: dict[str, Mapping[str, Any]] = {}
    runs = []
    for planned_run, run, outcome in finished:
        if run.environment not in environments:
            environments.append(run.environment)
        configs.setdefault(outcome.label, run.config)
        train, data = planned_run.config.train, planned_run.config.data
        tokens = outcome.steps * train.batch * data.length
        runs.append({**asdict(outcome), "tokens": tokens, "environment": environments.index(run.environment)})
    return {
        "comparison": dict(comparison.given),
        "budget": budget(comparison),
        "finished": len(finished),
        "planned": planned,
        "full_flops": comparison.full_flops,
        "data": {
            "fingerprint": store.fingerprint,
            "tokens": {part.name: part.total("train") for part in store.manifest.domains},
        },
        "configs": configs,  # of each entry's first run; others have their own peak and seed
        "environments": environments,
        "runs": runs,
    }


def budget(comparison: Comparison) -> str:
    """How long each run is, in a sentence."""
    full = next(entry for entry in comparison.entries if entry.label == FULL)
    decay = f"Learning rates decay over the last {full.config.optimizer.decay:.0%} of every run's steps."
    given = comparison.given.get("flops")
    if given is not None:
        said = f"Every entry spends {given:g} of the FLOPs of full training over {full.steps:,} steps"
        return f"{said}, as nearly as whole steps allow. {decay}"
    said = f"Every entry takes {full.steps:,} steps"
    if comparison.fraction is not None:
        reduced = next(entry for entry in comparison.entries if entry.label == REDUCED)
        said += f"; {REDUCED} takes {reduced.steps:,} and spends {reduced.flops / full.flops:.3f} of full's FLOPs, "
        said += f"at most the mean of the entries that cost less, {comparison.fraction:.3f}"
    return f"{said}. {decay}"


def _title(record: Mapping[str, Any]) -> str:
    finished, planned = record["finished"], record["planned"]
    return f"{finished} runs" if finished == planned else f"PARTIAL: {finished} of {planned} runs"


def _page(record: Mapping[str, Any], table: list[Row]) -> str:
    parts = [f"# Comparison: {_title(record)}", record["budget"]]
    times = "times are training alone" if timed(table) else "runs were made several at once, so no times are given"
    parts.append(f"FLOPs are the whole model's, relative to full training over all its steps; {times}.")
    parts += ["## Each entry at its best learning rate", markdown(finals(table)).rstrip(), *notes(table)]
    parts.append(f"![each entry's final loss, and losses at every learning rate]({NAME}.png)")
    if len(table) > len(finals(table)):
        chosen = "The best learning rate of an entry is chosen by these same losses, on the seeds that all rates have."
        parts += ["## Every learning rate", chosen, markdown(table).rstrip()]
    parts += ["## Where", _where(record["environments"])]
    written = yaml.safe_dump(dict(record["comparison"]), sort_keys=False, allow_unicode=True).rstrip()
    parts += ["## What was asked", f"```yaml\n{written}\n```"]
    return "\n\n".join(parts) + "\n"


def _where(environments: Sequence[Mapping[str, Any]]) -> str:
    """The machines, versions and commits of the runs."""
    shown = ("processor", "gpu", "cores", "threads", "python", "torch", "commit")
    lines = dict.fromkeys(", ".join(f"{key} {e[key]}" for key in shown if e.get(key) is not None) for e in environments)
    said = "\n".join(f"- {line}" for line in lines)
    if len({tuple(e.get(key) for key in MACHINE) for e in environments}) > 1:
        said += "\n\nThe runs were made on different machines: their times do not compare."
    return said
