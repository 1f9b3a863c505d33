"""A summary of the jobs of a fine-tuning: a row for each learning rate, a table and a bar chart.

The best rate has the highest mean over the seeds that the compared rates have; a rate at which a job diverged is never
the best. Intervals are Student's, over the seeds, as in comparisons.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any, final

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from raptr.report.plots import COLOURS, DPI, GREY, INK, clean
from raptr.report.statistics import mean

Z95 = 1.96


@final
@dataclass(frozen=True)
class Row:
    """The results of one learning rate over the seeds. `means` has every metric; other numbers are of the first."""

    rate: float
    seeds: int
    means: Mapping[str, float]
    deviation: float | None
    median: float | None
    interval: float | None  # half the width of the 95% interval
    diverged: int
    best: bool
    edge: bool  # the best rate is the lowest or the highest that was tried


def rows(jobs: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> list[Row]:
    """Return a row for every learning rate that has a finished job."""
    by_rate: dict[float, list[Mapping[str, Any]]] = {}
    for job in sorted(jobs, key=lambda job: (job["rate"], job["seed"])):
        by_rate.setdefault(job["rate"], []).append(job)
    best = best_rate(by_rate, metrics[0])
    result = []
    for rate, group in by_rate.items():
        scores = [job["scores"] for job in group if job["scores"] is not None]
        values = [by_metric[metrics[0]] for by_metric in scores]
        summary = mean(values)
        result.append(
            Row(
                rate=rate,
                seeds=len(group),
                means={name: fmean(by_metric[name] for by_metric in scores) for name in metrics} if scores else {},
                deviation=stdev(values) if len(values) > 1 else None,
                median=median(values) if values else None,
                interval=summary.interval if summary else None,
                diverged=len(group) - len(scores),
                best=rate == best,
                edge=rate == best and len(by_rate) > 1 and rate in (min(by_rate), max(by_rate)),
            )
        )
    return result


def best_rate(by_rate: Mapping[float, Sequence[Mapping[str, Any]]], metric: str) -> float | None:
    """Return the rate with the highest mean over the seeds that all rates have; None if a job diverged at every rate.

    A rate with fewer seeds that is not the best on those is left out, so that the other rates are compared on more
    seeds. Among equally good rates, one inside the grid is taken. If all are equal, as at chance, it is the highest
    rate, since even higher ones may still learn.
    """
    left = {
        rate: {job["seed"]: job["scores"][metric] for job in group}
        for rate, group in sorted(by_rate.items())
        if all(job["scores"] is not None for job in group)
    }
    while left and (shared := set.intersection(*map(set, left.values()))):
        means = {rate: fmean(scores[seed] for seed in shared) for rate, scores in left.items()}
        if len({*means.values()}) == 1 and max(means.values()) < 1:
            best = max(means)
        else:
            best = max(means, key=lambda rate: (means[rate], min(means) < rate < max(means)))
        most = max(map(len, left.values()))
        beaten = [rate for rate in left if rate != best and len(left[rate]) == len(shared) < most]
        if not beaten:
            return best
        left = {rate: scores for rate, scores in left.items() if rate not in beaten}
    return None


def standard_error(metric: str, value: float, examples: int) -> float:
    """Return the standard error of a share, or of a correlation, on a dev set of this size."""
    variance = max(0.0, value * (1 - value)) if metric == "accuracy" else (1 - value**2) ** 2
    return math.sqrt(variance / examples)


def at_chance(row: Row, metric: str, baseline: float, examples: int) -> bool:
    """Return whether the mean is not above the constant answer by more than its errors, over seeds and examples."""
    margin = max(row.interval or 0.0, Z95 * standard_error(metric, baseline, examples))
    return row.means[metric] <= baseline + margin


def rich_table(record: Mapping[str, Any]) -> Table:
    """Return the record as a table for the terminal, in percent."""
    metrics, baseline, examples = record["metrics"], record["baseline"], record["data"]["dev"]["examples"]
    title = f"{record['model']['name']} on {record['task']}: {metrics[0]} on the dev set, in percent"
    table = Table(title=Text(title))
    headings = ["rate", "seeds", "mean", "± 95%", "deviation", "median", *metrics[1:]]
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in (Row(**fields) for fields in record["rows"]):
        note = f" ({row.diverged} diverged)" if row.diverged else ""
        cells = [
            f"{row.rate:g}",
            f"{row.seeds}{note}",
            _percent(row.means.get(metrics[0])),
            "–" if row.interval is None else f"{100 * row.interval:.2f}",
            _percent(row.deviation),
            _percent(row.median),
            *(_percent(row.means.get(name)) for name in metrics[1:]),
        ]
        table.add_row(*cells, style="bold" if row.best else "")
    table.add_section()
    constants = [_percent(baseline[name]) for name in metrics]
    table.add_row("constant", "", constants[0], *["–"] * 3, *constants[1:])
    table.caption = " ".join(notes(record, examples))
    return table


def notes(record: Mapping[str, Any], examples: int) -> list[str]:
    """Return what a reader must know about the table, as sentences."""
    metric, baseline = record["metrics"][0], record["baseline"][record["metrics"][0]]
    best = next((Row(**fields) for fields in record["rows"] if fields["best"]), None)
    if best is None:
        return ["A job diverged at every learning rate: try lower ones with --rate."]
    error = standard_error(metric, best.means[metric], examples)
    sentences = [f"With {examples:,} dev examples the standard error of one score is {100 * error:.1f} points."]
    if len(record["rows"]) > 1:
        sentences.insert(0, f"Best rate: {best.rate:g}, chosen on this dev set, so its score is slightly optimistic.")
    if at_chance(best, metric, baseline, examples):
        sentences.append("That is chance: it is not above the best constant answer by more than its errors.")
    if best.edge:
        sentences.append("The best rate lies at the edge of the grid: widen it with --widen or --rate.")
    return sentences


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def draw(record: Mapping[str, Any]) -> Figure:
    """Draw a bar for each learning rate, from the constant answer to the mean, with its 95% interval and every seed."""
    metric = record["metrics"][0]
    shown = [row for row in (Row(**fields) for fields in record["rows"]) if row.means]
    baseline = 100 * record["baseline"][metric]
    figure = Figure(figsize=(900 / DPI, 600 / DPI), dpi=DPI, layout="constrained", facecolor="white")
    axes = figure.subplots()
    clean(axes)
    ends = [baseline]
    for place, row in enumerate(shown):
        middle, half = 100 * row.means[metric], 100 * (row.interval or 0.0)
        axes.bar(place, middle - baseline, bottom=baseline, color=COLOURS[0], alpha=0.9 if row.best else 0.4, width=0.7)
        if row.interval is not None:
            axes.errorbar(place, middle, yerr=half, color=INK, capsize=3)
        dots = [100 * job["scores"][metric] for job in record["jobs"] if job["rate"] == row.rate and job["scores"]]
        axes.plot([place] * len(dots), dots, "o", color=COLOURS[1], markersize=3)
        ends += [middle - half, middle + half, *dots]
    axes.axhline(baseline, color=GREY, linestyle="--", linewidth=1.0)
    axes.set_xticks(range(len(shown)), [f"{row.rate:g}" for row in shown])
    bars = "learning rate; bars are means, whiskers 95% intervals, dots seeds"
    axes.set_xlabel(f"{bars};\nthe dashed line is the best constant answer", color=INK, fontsize=9)
    axes.set_ylabel(f"{metric}, percent", color=INK)
    axes.set_title(f"{record['model']['name']} on {record['task']}", fontsize=10, color=INK, parse_math=False)
    room = max(1.0, 0.08 * (max(ends) - min(ends)))
    axes.set_ylim(max(min(ends) - room, -100.0 if metric != "accuracy" else 0.0), min(max(ends) + room, 100.0))
    return figure
