"""Statistics and tables of a comparison.

A row is an entry at one learning rate: its mean over seeds with a 95% interval, and its paired differences to full
training and to reduced full training, each at its best learning rate, over the seeds that both have finished. An
entry's best learning rate has the lowest mean loss over the seeds that all its learning rates have finished; a rate at
which a run diverged is never the best.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from raptr.comparison.outcomes import FULL, REDUCED, Outcome
from raptr.report.columns import Column, fixed, markdown_table
from raptr.report.scores import AVERAGE, averaged
from raptr.report.statistics import Mean, mean, pooled, shown
from raptr.report.units import duration


@dataclass(frozen=True)
class Row:
    """An entry at one learning rate. FLOPs are relative to full training's; times are given both ways."""

    label: str
    peak: float
    steps: int
    loss: Mean | None
    diverged: Mapping[int, int]  # by seed: the step in which its run diverged
    flops: float | None
    seconds: float | None
    relative_time: float | None
    to_full: Mean | None
    to_reduced: Mean | None
    best: bool
    edge: bool  # the best learning rate is the lowest or the highest that was tried
    denoisers: Mapping[str, Mean] = field(default_factory=dict)  # the loss of each denoiser, with UL2
    scores: Mapping[str, Mean] = field(default_factory=dict)  # on each task, and their average; n counts models


def rows(outcomes: Sequence[Outcome], grids: Mapping[str, Sequence[float]], full_flops: float) -> list[Row]:
    """Return a row for every entry and learning rate that has a finished run, in the order of `grids`."""
    table = {label: {peak: runs_at(outcomes, label, peak) for peak in grid} for label, grid in grids.items()}
    best = {label: best_peak(by_peak) for label, by_peak in table.items()}
    references = {label: table[label][peak] for label in (FULL, REDUCED) if (peak := best.get(label)) is not None}
    full_seconds = _seconds(references.get(FULL, ()))
    finished = {(label, peak): runs for label, by_peak in table.items() for peak, runs in by_peak.items() if runs}
    scores = dict(zip(finished, _scores(list(finished.values())), strict=True))
    result = []
    for (label, peak), runs in finished.items():
        by_peak, seconds = table[label], _seconds(runs)
        result.append(
            Row(
                label=label,
                peak=peak,
                steps=runs[0].steps,
                loss=mean(run.loss for run in runs if run.loss is not None),
                diverged={run.seed: run.diverged for run in runs if run.diverged is not None},
                flops=_average(run.flops / full_flops for run in runs if run.loss is not None),
                seconds=seconds,
                relative_time=seconds / full_seconds if seconds and full_seconds else None,
                to_full=None if label == FULL else difference(runs, references.get(FULL, ())),
                to_reduced=None if label == REDUCED else difference(runs, references.get(REDUCED, ())),
                best=peak == best[label],
                edge=peak == best[label] and len(by_peak) > 1 and peak in (min(by_peak), max(by_peak)),
                denoisers=_denoisers(runs),
                scores=scores[label, peak],
            )
        )
    return result


def _denoisers(runs: Sequence[Outcome]) -> dict[str, Mean]:
    names = dict.fromkeys(name for run in runs for name in run.denoisers)
    means = {name: mean(run.denoisers[name] for run in runs if name in run.denoisers) for name in names}
    return {name: value for name, value in means.items() if value is not None}


def _score_columns(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the tasks on which every scored run was scored."""
    judged = [run.scores for run in outcomes if run.scores]
    return [name for name in judged[0] if all(name in scores for scores in judged)] if judged else []


def _scores(runs: Sequence[Sequence[Outcome]]) -> list[dict[str, Mean]]:
    """Return each row's mean score over seeds on every task, and the mean of the seeds' averages; n counts models.

    A row with one model has that model's own errors; the other rows' errors are pooled (`statistics.pooled`).
    """
    tasks = _score_columns(run for row in runs for run in row)
    if not tasks:
        return [{} for _ in runs]
    names = [*tasks, AVERAGE] if len(tasks) > 1 else tasks
    judged = [[_own(run.scores, tasks) for run in row if run.scores] for row in runs]
    several = [models if len(models) > 1 else [] for models in judged]
    columns = [pooled([[model[number] for model in row] for row in several]) for number in range(len(names))]
    result = []
    for place, models in enumerate(judged):
        means: Sequence[Mean | None] = [column[place] for column in columns]
        if len(models) == 1:
            means = [replace(score, n=1) for score in models[0]]
        result.append({name: value for name, value in zip(names, means, strict=False) if value is not None})
    return result


def _own(scores: Mapping[str, Mapping[str, Any]], tasks: Sequence[str]) -> list[Mean]:
    """Return a model's scores with their own errors, and their average."""
    means = [Mean(scores[name]["score"], scores[name].get("interval"), scores[name].get("n", 1)) for name in tasks]
    return [*means, averaged(means)]


def best_peak(by_peak: Mapping[float, Sequence[Outcome]]) -> float | None:
    """Return the learning rate with the lowest mean loss over the seeds that all rates have.

    A rate at which a run diverged is never the best. None if there is no other rate, or no seed that all rates have.
    """
    losses = {
        peak: {run.seed: math.inf if run.loss is None else run.loss for run in runs}
        for peak, runs in by_peak.items()
        if runs
    }
    shared = set.intersection(*map(set, losses.values())) if losses else set()
    whole = {peak: by_seed for peak, by_seed in losses.items() if shared and math.inf not in by_seed.values()}
    means = {peak: fmean(by_seed[seed] for seed in shared) for peak, by_seed in whole.items()}
    return min(means, key=means.__getitem__, default=None)


def difference(runs: Iterable[Outcome], reference: Iterable[Outcome]) -> Mean | None:
    """Return the mean difference to the reference's losses, paired by seed; None without a common seed."""
    base = {run.seed: run.loss for run in reference}
    pairs = ((run.loss, base.get(run.seed)) for run in runs)
    return mean(loss - other for loss, other in pairs if loss is not None and other is not None)


def markdown(table: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    return markdown_table(_columns(table), table)


def tasks_markdown(table: Sequence[Row]) -> str:
    """Return the rows' scores on tasks as a Markdown table."""
    return markdown_table(_task_columns(table), table)


def denoisers_markdown(table: Sequence[Row]) -> str:
    """Return the rows' held-out losses by denoiser as a Markdown table."""
    names = dict.fromkeys(name for row in table for name in row.denoisers)
    columns: list[Column[Row]] = [
        Column("entry", lambda row: row.label, text=True),
        Column("held-out loss", _loss),
        *(Column(name, lambda row, name=name: shown(row.denoisers.get(name), 4)) for name in names),  # type: ignore[misc]
    ]
    return markdown_table(columns, table)


def rich_table(table: Sequence[Row], title: str, caption: str) -> Group:
    """Return tables for the terminal: the rows, their scores on tasks if there are any, and the caption."""
    judged = (
        [_rich(table, _task_columns(table), "Scores on tasks, percent")] if any(row.scores for row in table) else []
    )
    return Group(_rich(table, _columns(table), title), *judged, Text(caption))


def _rich(table: Sequence[Row], columns: Sequence[Column[Row]], title: str) -> Table:
    result = Table(title=Text(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.text else "right"
        result.add_column(column.heading, justify=justify, overflow="fold", min_width=10 if column.text else None)
    for row in table:
        result.add_row(*(Text(column.cell(row)) for column in columns))
    return result


def notes(table: Sequence[Row]) -> list[str]:
    """Return the sentences that explain the table's marks."""
    ratio = "; ratio is that of times to full's" if timed(table) else ""
    sentences = [f"± is a 95% interval over the seeds (Student's t); differences are paired by seed{ratio}."]
    if any(row.edge for row in table):
        sentences.append(
            "Marked *: the best learning rate lies at the edge of its grid; a wider one may give a lower loss."
        )
    for row in table:
        steps = ", ".join(f"seed {seed} in step {step:,}" for seed, step in sorted(row.diverged.items()))
        if steps:
            sentences.append(f"Diverged: {row.label} at peak {row.peak:g}, {steps}.")
    return sentences


def timed(table: Sequence[Row]) -> bool:
    """Return whether any run had the machine to itself, so that its time is meaningful."""
    return any(row.seconds is not None for row in table)


def finals(table: Sequence[Row]) -> list[Row]:
    """Return each entry's row at its best learning rate, or at its lowest rate if it has no best one."""
    chosen: dict[str, Row] = {}
    for row in sorted(table, key=lambda row: row.peak):
        if row.best or row.label not in chosen:
            chosen[row.label] = row
    return [chosen[label] for label in dict.fromkeys(row.label for row in table)]


def _columns(table: Sequence[Row]) -> list[Column[Row]]:
    every: list[Column[Row]] = [
        Column("entry", lambda row: row.label, text=True),
        Column("peak", lambda row: f"{row.peak:g}{'*' if row.edge else ''}"),
        Column("steps", lambda row: f"{row.steps:,}"),
        Column("FLOPs", lambda row: fixed(row.flops, 3)),
        Column("held-out loss", _loss),
        Column("n", lambda row: str(row.loss.n if row.loss else 0)),
        Column("to full", lambda row: shown(row.to_full, 4, sign="+")),
        Column("to reduced", lambda row: shown(row.to_reduced, 4, sign="+")),
        Column("time", lambda row: "–" if row.seconds is None else duration(row.seconds)),
        Column("ratio", lambda row: fixed(row.relative_time, 2)),
    ]
    unused = set() if any(row.to_reduced for row in table) else {"to reduced"}
    unused |= set() if timed(table) else {"time", "ratio"}
    return [column for column in every if column.heading not in unused]


def _task_columns(table: Sequence[Row]) -> list[Column[Row]]:
    """Return the columns, as in the paper: an entry's cost, its loss, its score on each task, and their average."""
    names = next((list(row.scores) for row in table if row.scores), [])
    return [
        Column("entry", lambda row: row.label, text=True),
        Column("FLOPs", lambda row: fixed(row.flops, 3)),
        Column("held-out loss", _loss),
        *(Column(name, lambda row, name=name: shown(row.scores.get(name), 1, factor=100)) for name in names),  # type: ignore[misc]
    ]


def runs_at(outcomes: Iterable[Outcome], label: str, peak: float) -> list[Outcome]:
    """Return an entry's runs at one learning rate."""
    return [run for run in outcomes if (run.label, run.peak) == (label, peak)]


def _seconds(runs: Iterable[Outcome]) -> float | None:
    return _average(run.seconds for run in runs if run.loss is not None and run.seconds is not None)


def _average(values: Iterable[float]) -> float | None:
    averaged = mean(values)
    return averaged.mean if averaged else None


def _loss(row: Row) -> str:
    lost = f"{len(row.diverged)} diverged" if row.diverged else ""
    return ", ".join(filter(None, (shown(row.loss, 4) if row.loss else "", lost)))
