"""The page's tables as text: results, scores, speed by stage, speed-ups, settings and environments.

A sheet has headings, a flag for each column that says whether it holds words, lines of cells, and notes. A cell is
text, or text with the index of its run (it is shown in the run's colour) and maybe the length of a bar behind it, from
0 to 1.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from raptr.report.runs import Run, labels
from raptr.report.scores import at_chance
from raptr.report.speed import speed_ups, stages
from raptr.report.tables import notes, summary, table_columns
from raptr.report.units import short, step_time

NONE = "–"

Cell = str | dict[str, Any]


def sheets(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Return every table of the page, by the name of its place there."""
    return {
        "results": _results(runs),
        "scores": _scores(runs),
        "stages": _stages(runs),
        "speedups": _speed_ups(runs),
        "differences": _differences(runs),
        "settings": _compared("setting", runs, [run.config for run in runs]),
        "environment": _compared("", runs, [run.environment for run in runs]),
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested settings into texts by dotted names; settings that are None are left out."""
    texts: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            texts |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            texts[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return texts


def _sheet(
    headings: Sequence[Cell], words: Sequence[bool], lines: Sequence[Sequence[Cell]], notes: Sequence[str] = ()
) -> dict[str, Any]:
    return {"headings": list(headings), "words": list(words), "lines": list(lines), "notes": list(notes)}


def _results(runs: Sequence[Run]) -> dict[str, Any]:
    rows = summary(runs)
    name, *others = columns = table_columns(rows)
    lines: list[list[Cell]] = [
        [{"text": name.cell(row), "run": index}, *(column.cell(row) for column in others)]
        for index, row in enumerate(rows)
    ]
    return _sheet([column.heading for column in columns], [column.text for column in columns], lines, notes(rows))


def _scores(runs: Sequence[Run]) -> dict[str, Any]:
    """Return a line per run that has scores, with a column per task, in percent; the bar is the score."""
    columns = list(dict.fromkeys(chain(*(run.scores for run in runs))))
    shared = [name for name in columns if all(name in run.scores for run in runs if run.scores)]
    lines: list[list[Cell]] = []
    for index, (name, run) in enumerate(zip(labels(runs), runs, strict=True)):
        if run.scores:
            own = run.scores
            cells = [_score(own[column], index) if column in own else NONE for column in columns]
            whole = [run.scores[column]["score"] for column in shared]
            average = f"{100 * sum(whole) / len(whole):.1f}" if whole else NONE
            lines.append([{"text": name, "run": index}, *cells, average])
    constants = {name: cell["constant"] for run in runs for name, cell in run.scores.items()}
    listed = ", ".join(f"{name} {100 * constants[name]:.1f}" for name in columns)
    notes = [f"Percent, with 95% intervals. The best constant answer scores: {listed}."] if lines else []
    unlike = {name: cell["unlike"] for run in runs for name, cell in run.scores.items() if "unlike" in cell}
    notes += [f"{name}: other data, or another recipe, than {first}." for name, first in unlike.items()]
    return _sheet(["run", *columns, "Avg."], [True, *[True] * len(columns), False], lines, notes)


def _score(cell: Mapping[str, Any], run: int) -> Cell:
    error = cell.get("interval")
    text = f"{100 * cell['score']:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
    text += " (chance)" if at_chance(cell) else ""
    return {"text": text, "run": run, "bar": min(1.0, max(0.0, cell["score"]))}


def _stages(runs: Sequence[Run]) -> dict[str, Any]:
    """Return a line per run and stage; the bar is the speed relative to the fastest stage of all."""
    measured = [stages(run) for run in runs]
    fastest = max((stage.tokens_per_second or 0 for stage in chain(*measured)), default=0)
    lines: list[list[Cell]] = []
    for index, (name, run_stages) in enumerate(zip(labels(runs), measured, strict=True)):
        for stage in run_stages:
            speed = stage.tokens_per_second
            lines.append(
                [
                    {"text": name, "run": index},
                    str(stage.number),
                    stage.running,
                    {"text": short(speed), "run": index, "bar": speed / fastest} if speed else NONE,
                    NONE if stage.seconds_per_step is None else step_time(stage.seconds_per_step),
                    f"{stage.steps:,}",
                    str(stage.intervals),
                ]
            )
    headings = ["run", "stage", "what runs", "tokens/s", "time per step", "steps", "intervals"]
    return _sheet(headings, [True, False, False, True, False, False, False], lines)


def _speed_ups(runs: Sequence[Run]) -> dict[str, Any]:
    names = labels(runs)
    lines: list[list[Cell]] = [
        [
            {"text": names[speed_up.run], "run": speed_up.run},
            speed_up.reference,
            _times(speed_up.theoretical),
            _times(speed_up.realised),
            NONE if speed_up.share is None else f"{speed_up.share:.0%}",
            speed_up.note,
        ]
        for speed_up in speed_ups(runs)
    ]
    headings = ["run", "compared with", "theoretical", "realised", "realised of theoretical", "note"]
    shown = len(headings) if any(line[-1] for line in lines) else -1
    return _sheet(headings[:shown], [True, True, False, False, False, True], [line[:shown] for line in lines])


def _differences(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the settings in which the runs differ, with one column per run."""
    sheet = _compared("setting", runs, [run.config for run in runs])
    return {**sheet, "lines": [line for line in sheet["lines"] if len(set(line[1:])) > 1]}


def _compared(heading: str, runs: Sequence[Run], values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a line per name that occurs in any of the values, with one column per run."""
    columns = [flat(value) for value in values]
    lines = [[key, *(column.get(key, NONE) for column in columns)] for key in dict.fromkeys(chain(*columns))]
    headings: list[Cell] = [heading, *({"text": name, "run": index} for index, name in enumerate(labels(runs)))]
    return _sheet(headings, [True] * len(headings), lines)


def _times(value: float | None) -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:.2f}×"
