"""A summary of a few-shot evaluation: rows with intervals and paired differences, a table and a bar chart.

Intervals are over the examples. Differences are to the first model with the same attention, paired by example. A score
is called chance if it is not above the best constant answer's by more than its error, also paired by example. Bits per
byte are those of the gold answers, all bits over all bytes; their errors are those of a ratio.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any, TypedDict

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from raptr.evaluation.fewshot.suite import SUPERGLUE
from raptr.report.plots import DPI, INK, WIDTH, clean, legend_below, look
from raptr.report.scores import AVERAGE, averaged, draw_bar, draw_constant
from raptr.report.statistics import Mean, mean, shown

LUCK = 0.05  # at most this fraction of scores lies above chance by luck
GROUP = "superglue"
PERCENT, BITS = (100, 1), (1, 3)  # the factor and the decimals that tables show


class Value(TypedDict):
    """A mean and the half-width of its interval."""

    mean: float
    interval: float | None


def summed_up(jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rows of the jobs, and the averages over the tasks that all models have finished."""
    firsts = {(job["attention"], job["task"], job["shots"]): job for job in reversed(jobs)}
    rows = [_row(job, firsts[job["attention"], job["task"], job["shots"]]) for job in jobs]
    averages = [average for shots in dict.fromkeys(row["shots"] for row in rows) for average in _averages(rows, shots)]
    return {"rows": rows, "averages": averages}


def _row(job: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    own, base = job["examples"], first["examples"]
    sizes = [example["bytes"] for example in own]
    bits = [example["nats"] / math.log(2) for example in own]
    other = None if job is first else first["model"]
    above = _value(mean(example["score"] - example["constant"] for example in own))
    return {
        **{key: job[key] for key in ("model", "attention", "task", "shots", "metric", "scores", "constant", "cut")},
        "n": len(own),
        "score": _share([example["score"] for example in own]),
        "above_constant": above,
        "chance": _at_chance(above),
        "bits_per_byte": ratio(bits, sizes),
        "compared_with": other,
        "difference": None
        if other is None
        else _share([a["score"] - b["score"] for a, b in zip(own, base, strict=True)]),
        "bits_difference": None
        if other is None
        else ratio([a["nats"] / math.log(2) - b["nats"] / math.log(2) for a, b in zip(own, base, strict=True)], sizes),
    }


def _at_chance(above: Value) -> bool:
    """Return whether a score is not above the constant answer's by more than its error; always true for one example."""
    return above["interval"] is None or above["mean"] <= above["interval"]


def _value(found: Mean | None) -> Value:
    assert found is not None
    return {"mean": found.mean, "interval": found.interval}


def _share(values: Sequence[float]) -> Value:
    """Return a mean of scores. If all n are equal, as when all are wrong, its error is 3/n (the rule of three)."""
    value = _value(mean(values))
    return value if value["interval"] else {"mean": value["mean"], "interval": min(1.0, 3 / len(values))}


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Value:
    """Return the sum over the sum, with the error of a ratio of means."""
    whole = sum(numerators) / sum(denominators)
    size = fmean(denominators)
    rest = mean((top - whole * bottom) / size for top, bottom in zip(numerators, denominators, strict=True))
    assert rest is not None
    return {"mean": whole, "interval": rest.interval}


def _averages(rows: Sequence[Mapping[str, Any]], shots: int) -> list[dict[str, Any]]:
    """Return, for every model and attention, the mean over SuperGLUE (if several of its tasks were run) and over all.

    SuperGLUE counts as one task among the others, as in the paper.
    """
    here = [row for row in rows if row["shots"] == shots]
    systems = list(dict.fromkeys((row["model"], row["attention"]) for row in here))
    by_system = {
        system: {row["task"]: row for row in here if (row["model"], row["attention"]) == system} for system in systems
    }
    shared = [task for task in by_system[systems[0]] if all(task in own for own in by_system.values())]
    members = [task for task in shared if task in SUPERGLUE]
    grouped = members if len(members) > 1 else []
    averages = []
    for (model, attention), own in by_system.items():
        values = {
            key: [own[task][key] for task in shared if task not in grouped]
            for key in ("score", "above_constant", "difference", "bits_per_byte", "bits_difference")
        }
        common = {"model": model, "attention": attention, "shots": shots}
        if grouped:
            group = {key: _together(own[task][key] for task in grouped) for key in values}
            averages.append({**common, "name": GROUP, "tasks": grouped, **_judged(group)})
            values = {key: [*listed, group[key]] for key, listed in values.items()}
        if len(values["score"]) > 1:
            whole = {key: _together(listed) for key, listed in values.items()}
            averages.append({**common, "name": AVERAGE, "tasks": shared, **_judged(whole)})
    return averages


def _judged(average: dict[str, Value | None]) -> dict[str, Any]:
    above = average["above_constant"]
    assert above is not None
    return {**average, "chance": _at_chance(above)}


def _together(values: Iterable[Value | None]) -> Value | None:
    """Return the mean of independent values, or None if one is missing."""
    listed = list(values)
    known = [Mean(**value, n=1) for value in listed if value is not None]
    return _value(averaged(known)) if known and len(known) == len(listed) else None


def column(task: str, shots: int, attention: str) -> str:
    """Return the name of a score in tables of several evaluations."""
    return f"{task}, {shots}-shot" + (", prefix" if attention == "prefix" else "")


def columns(record: Mapping[str, Any], model: str) -> dict[str, dict[str, Any]]:
    """Return a model's scores by column; SuperGLUE is one column if several of its tasks were run."""
    cells: dict[str, dict[str, Any]] = {}
    groups = [row for row in record["averages"] if row["model"] == model and row["name"] == GROUP]
    inside = {(row["shots"], row["attention"], task) for row in groups for task in row["tasks"]}
    rows = {(row["shots"], row["attention"], row["task"]): row for row in record["rows"] if row["model"] == model}
    for (shots, attention, task), row in rows.items():
        if (shots, attention, task) not in inside:
            cells[column(task, shots, attention)] = _cell(row, _constant(row), row["metric"], row["n"])
    for group in groups:
        shots, attention = group["shots"], group["attention"]
        members = [rows[shots, attention, task] for task in group["tasks"]]
        constant, n = fmean(map(_constant, members)), sum(row["n"] for row in members)
        cells[column(GROUP, shots, attention)] = _cell(group, constant, "mean", n)
    return cells


def _constant(row: Mapping[str, Any]) -> float:
    return float(row["constant"]["scores"][row["metric"]])


def _cell(row: Mapping[str, Any], constant: float, metric: str, n: int) -> dict[str, Any]:
    facts = {"constant": constant, "chance": row["chance"], "metric": metric, "n": n, "made": f"{n} examples"}
    return {"score": row["score"]["mean"], "interval": row["score"]["interval"], **facts}


def label(record: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return a model's label, with its attention if the record has several kinds."""
    several = len({other["attention"] for other in record["rows"]}) > 1
    return f"{row['model']}, {row['attention']}" if several else str(row["model"])


def rich_tables(record: Mapping[str, Any]) -> Group:
    """Return the record for an 80-column terminal: a table for each number of exemplars, or two for several models."""
    tables: list[Table] = []
    for shots in dict.fromkeys(row["shots"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["shots"] == shots]
        by_task = [[row for row in rows if row["task"] == task] for task in dict.fromkeys(row["task"] for row in rows)]
        means = [named for name in (GROUP, AVERAGE) if (named := _named(record, name, shots))]
        if len({label(record, row) for row in rows}) == 1:
            tables.append(_of_one(f"{label(record, rows[0])}, {shots}-shot", [own[0] for own in (*by_task, *means)]))
        else:
            tables += [_of_several(record, shots, [*by_task, *means], key) for key in ("score", "bits_per_byte")]
    return Group(*tables, Text(" ".join(notes(record))))


def _of_one(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return one model's table, with a line for each task and average."""
    table = _headed(title, ("task", "metric"), ("n", "score, %", "constant", "", "bits/byte"))
    table.box, table.padding = box.SIMPLE_HEAD, (0, 1, 0, 0)
    for row in rows:
        table.add_row(
            *_task(row),
            _shown(row["score"], PERCENT),
            f"{100 * _constant(row):.1f}" if "constant" in row else "",
            "chance" if row["chance"] else "",
            _shown(row["bits_per_byte"], BITS),
        )
    return table


def _of_several(record: Mapping[str, Any], shots: int, tasks: Sequence[Sequence[Mapping[str, Any]]], key: str) -> Table:
    """Return a table of scores or bits per byte, with a line for each model and the task's facts beside them."""
    scored = key == "score"
    other, form, heading = ("difference", PERCENT, "score, %") if scored else ("bits_difference", BITS, "bits/byte")
    first = next((row["compared_with"] for own in tasks for row in own if row.get("compared_with")), None)
    title = f"{shots}-shot, {'score in %' if scored else heading}" + (f"; differences to {first}" if first else "")
    compared = ["difference"] if first else []
    table = _headed(title, ("task", "model"), (heading, *compared, *([""] if scored else [])))
    for own in tasks:
        lines = [
            [
                label(record, row),
                _shown(row[key], form),
                *([_shown(row[other], form, "+")] if first else []),
                *(["chance" if row["chance"] else ""] if scored else []),
            ]
            for row in own
        ]
        if scored and "constant" in own[0]:
            lines.append(["best constant answer", f"{100 * _constant(own[0]):.1f}"])
        name, metric, count = _task(own[0])
        beside = [name, metric, *([f"n {count}"] if count else [])] if scored else [name]
        for about, line in zip_longest(beside, lines, fillvalue=""):
            table.add_row(*map(Text, (about, *line)))
        table.add_section()
    return table


def _headed(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=Text(title))
    for heading in (*left, *right):
        table.add_column(heading, justify="right" if heading in right and heading else "left", overflow="fold")
    return table


def _task(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the name, the metric and the number of examples of a task; an average has no number."""
    return (row["task"], row["metric"], f"{row['n']:,}") if "task" in row else (row["name"], "mean", "")


def _named(record: Mapping[str, Any], name: str, shots: int) -> list[Mapping[str, Any]]:
    return [row for row in record["averages"] if (row["name"], row["shots"]) == (name, shots)]


def _shown(value: Value | None, form: tuple[int, int], sign: str = "") -> str:
    factor, digits = form
    mean_value = None if value is None else Mean(**value, n=1)
    return shown(mean_value, digits, factor=factor, sign=sign)


def notes(record: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know about the table, as sentences."""
    rows = record["rows"]
    compared = any(row["compared_with"] for row in rows)
    sentences = [
        "± is a 95% interval over the examples" + ("; differences are paired by example." if compared else ".")
    ]
    lucky = sum(row["chance"] for row in rows)
    if lucky:
        which = "All" if lucky == len(rows) else f"{lucky} of {len(rows)}"
        sentences.append(
            f"{which} scores are at chance: not above the best constant answer by more than their error. Bits per byte "
            "of the gold answers still tell models apart."
        )
    if 0 < len(rows) - lucky <= math.ceil(LUCK * len(rows)):
        sentences.append(f"{len(rows) - lucky} above it are no more than luck gives among so many.")
    if any(row["cut"] for row in rows):
        worst: dict[str, Mapping[str, Any]] = {}
        for row in rows:
            if row["cut"] > worst.get(row["task"], {"cut": 0})["cut"]:
                worst[row["task"]] = row
        cuts = [f"{task} {row['cut']:,} of {row['n']:,} ({row['shots']}-shot)" for task, row in worst.items()]
        sentences.append(f"Prompts longer than the model's sequences lost their beginning: {', '.join(cuts)}.")
    if record["not_run"]:
        sentences.append(f"Not run, since the folder has no data for them: {', '.join(record['not_run'])}.")
    return sentences


def draw(record: Mapping[str, Any]) -> Figure:
    """Draw the scores, and bits per byte beside them, for each number of exemplars; whiskers are intervals."""
    shots = list(dict.fromkeys(row["shots"] for row in record["rows"]))
    size = (WIDTH / DPI, (120 + 330 * len(shots)) / DPI)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor="white")
    panels = figure.subplots(len(shots), 2, squeeze=False)
    names = list(dict.fromkeys(label(record, row) for row in record["rows"]))
    for (left, right), count in zip(panels, shots, strict=True):
        rows = [row for row in record["rows"] if row["shots"] == count]
        means = [*_named(record, GROUP, count), *_named(record, AVERAGE, count)]
        _bars(left, record, [*rows, *means], names, "score", 100)
        _bars(right, record, rows, names, "bits_per_byte", 1)
        left.set_ylabel(f"{count}-shot score, percent", color=INK, fontsize=9)
        right.set_ylabel(f"{count}-shot bits per byte", color=INK, fontsize=9)
    handles = [Line2D([], [], color=look(i)["color"], marker="s", linestyle="none") for i in range(len(names))]
    legend_below(figure, handles, names, min(4, len(names)))
    title = "Few-shot tasks; whiskers are 95% intervals, dashes the best constant answer"
    figure.suptitle(title, fontsize=10, color=INK)
    return figure


def _bars(
    axes: Axes, record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], names: Sequence[str], key: str, unit: int
) -> None:
    clean(axes)
    tasks = list(dict.fromkeys(row.get("task", row.get("name")) for row in rows))
    for row in rows:
        place, name = tasks.index(row.get("task", row.get("name"))), names.index(label(record, row))
        error = None if row[key]["interval"] is None else unit * row[key]["interval"]
        draw_bar(axes, place, (name, len(names)), unit * row[key]["mean"], error)
        if key == "score" and "constant" in row:
            draw_constant(axes, place, unit * _constant(row))
    axes.set_xticks(np.arange(len(tasks)), tasks, rotation=45, ha="right", fontsize=7, parse_math=False)
    axes.set_ylim(bottom=0)
    if key == "score":
        axes.set_ylim(top=min(axes.get_ylim()[1], 105.0))  # with few examples, whiskers reach beyond 100%
