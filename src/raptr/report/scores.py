"""A plot of models' scores on tasks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from raptr.report.plots import DPI, GREY, INK, WIDTH, clean, legend_below, look
from raptr.report.statistics import Mean

AVERAGE = "Avg."


@dataclass(frozen=True)
class Scored:
    """A model or an entry: its held-out loss, its scores by column, and the best constant answers' scores."""

    label: str
    loss: float | None
    scores: Mapping[str, Mean]
    constants: Mapping[str, float] = field(default_factory=dict)

    def average(self, columns: Sequence[str]) -> Mean:
        """Return the recorded average or, without one, the mean of these columns, taken as independent."""
        return self.scores[AVERAGE] if AVERAGE in self.scores else averaged([self.scores[name] for name in columns])


def averaged(scores: Sequence[Mean]) -> Mean:
    """Return the mean of independent scores with its error, which is None if the error of any of them is."""
    known = [score.interval for score in scores if score.interval is not None]
    error = math.hypot(*known) / len(scores) if len(known) == len(scores) else None
    return Mean(fmean(score.mean for score in scores), error, min(score.n for score in scores))


def scored(label: str, loss: float | None, columns: Mapping[str, Mapping[str, Any]]) -> Scored:
    """Return the scores of one run, with the intervals that its evaluation recorded."""
    means = {name: Mean(cell["score"], cell.get("interval"), cell.get("n", 1)) for name, cell in columns.items()}
    return Scored(label, loss, means, {name: cell["constant"] for name, cell in columns.items()})


def at_chance(cell: Mapping[str, Any]) -> bool:
    """Return whether a model's score is at chance: as its evaluation recorded, or else by its interval."""
    noted = cell.get("chance")
    return noted if isinstance(noted, bool) else cell["score"] - (cell.get("interval") or 0.0) <= cell["constant"]


def draw_scores(models: Sequence[Scored], within: str) -> Figure:
    """Draw bars for every task with their intervals over `within`, and the average score against the held-out loss.

    The average is over the tasks that all models have, since averages over different tasks do not compare.
    """
    columns = [name for name in dict.fromkeys(name for model in models for name in model.scores) if name != AVERAGE]
    figure = Figure(figsize=(WIDTH / DPI, 620 / DPI), dpi=DPI, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    clean(left)
    clean(right)
    _bars(left, models, columns)
    left.set_title(f"whiskers are 95% intervals over {within}, dashes constant answers", fontsize=9, color=INK)
    shared = [name for name in columns if all(name in model.scores for model in models)]
    over = "" if shared == columns else f" ({', '.join(shared)})"
    if shared:
        _against_loss(right, models, shared)
        title = f"average score{over} against held-out loss"
    else:
        right.set_axis_off()
        title = "no average: the runs share no task"
    right.set_title(title, fontsize=9, color=INK, parse_math=False)
    handles = [Line2D([], [], linestyle="none", **look(number)) for number in range(len(models))]
    legend_below(figure, handles, [model.label for model in models], min(4, len(models)))
    return figure


def _bars(axes: Axes, models: Sequence[Scored], columns: Sequence[str]) -> None:
    for number, model in enumerate(models):
        for place, column in enumerate(columns):
            if column not in model.scores:
                continue
            score = model.scores[column]
            error = None if score.interval is None else 100 * score.interval
            draw_bar(axes, place, (number, len(models)), 100 * score.mean, error)
    for place, column in enumerate(columns):
        constant = next((model.constants[column] for model in models if column in model.constants), None)
        if constant is not None:
            draw_constant(axes, place, 100 * constant)
    axes.set_xticks(np.arange(len(columns)), columns, rotation=30, ha="right", fontsize=8, parse_math=False)
    axes.set_ylabel("score, percent", color=INK)
    shown = [score for model in models for score in model.scores.values()]
    tops = [100 * (score.mean + (score.interval or 0.0)) for score in shown]
    lows = [100 * (score.mean - (score.interval or 0.0)) for score in shown if score.mean < 0]  # a correlation
    axes.set_ylim(1.1 * min(lows, default=0.0), min(105.0, 1.1 * max(*tops, 1.0)))


def draw_bar(axes: Axes, place: int, of: tuple[int, int], height: float, error: float | None) -> None:
    """Draw one bar of a group at `place`, with its interval; `of` is the bar's number and the number of bars."""
    number, count = of
    width = 0.8 / count
    x = place + (number - (count - 1) / 2) * width
    axes.bar(x, height, width=width, color=look(number)["color"], alpha=0.8)
    if error is not None:
        axes.errorbar(x, height, yerr=error, color=INK, capsize=2, linewidth=0.8)


def draw_constant(axes: Axes, place: int, height: float) -> None:
    """Draw the best constant answer's score as a dashed line over the bars at `place`."""
    axes.plot([place - 0.45, place + 0.45], [height] * 2, color=GREY, linestyle="--", linewidth=1.0)


def _against_loss(axes: Axes, models: Sequence[Scored], columns: Sequence[str]) -> None:
    for number, model in enumerate(models):
        if model.loss is None:
            continue
        score = model.average(columns)
        axes.errorbar(
            model.loss,
            100 * score.mean,
            yerr=None if score.interval is None else 100 * score.interval,
            capsize=3,
            gid=model.label,
            **look(number),
        )
    axes.set_xlabel("held-out loss", color=INK)
    axes.set_ylabel("average score, percent", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.margins(0.15)
