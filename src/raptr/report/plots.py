"""Plots of losses over steps and over FLOPs, side by side, to show both quality and cost."""

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from raptr.files import new_file
from raptr.report.runs import EvalRecord, Run, TrainRecord, labels
from raptr.report.speed import running
from raptr.report.units import FLOP_PREFIXES, scale, short

WIDTH, HEIGHT, DPI = 1600, 650, 160  # pixels, pixels, pixels per inch

# Okabe and Ito's palette, which people with any common colour blindness can tell apart. Seven colours and six
# markers have no common factor, so 42 runs look different.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P")
INK, GREY = "#222222", "#777777"

CLIFF_SHARE = 0.1
SMOOTHING_SHARE = 0.02
MARKERS_PER_LINE = 25
LEGEND_ROWS = 6
LABELLED_STAGE_SHARE = 0.08


Place = Callable[[TrainRecord | EvalRecord], float]  # maps a record to its position on an axis


def look(index: int) -> dict[str, Any]:
    """Return the colour and marker of the line with this index."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG at its intended size, whole or not at all."""
    FigureCanvasAgg(figure)
    with new_file(path) as partial:
        # Passed explicitly, so that a user's matplotlibrc cannot crop or tint the file.
        figure.savefig(partial, format="png", dpi=DPI, bbox_inches=figure.bbox_inches, facecolor="white")


def draw_losses(runs: Sequence[Run]) -> Figure:
    """Draw the runs' losses: over steps on the left, over FLOPs on the right."""
    if not runs:
        raise ValueError("A plot needs at least one run, and none was given.")
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout="constrained", facecolor="white")
    by_step, by_flops = figure.subplots(1, 2, sharey=True)
    divisor, prefix = scale(max(run.last.flops for run in runs), FLOP_PREFIXES)
    panels: list[tuple[Axes, Place]] = [
        (by_step, lambda record: float(record.step)),
        (by_flops, lambda record: record.flops / divisor),
    ]
    for axes, place in panels:
        # The first run is drawn last, on top, since the others are compared with it.
        for index, run in reversed(list(enumerate(runs))):
            _draw_run(axes, place, run, index)
        if len(runs) == 1:
            _label_stages(axes, place, runs[0])
        clean(axes)
    by_step.set_ylim(*_limits(runs))
    by_step.set_ylabel("loss", color=INK)
    by_step.set_xlabel("steps", color=INK)
    by_flops.set_xlabel(f"training compute of the whole model ({prefix}FLOP)", color=INK)
    by_step.set_xlim(0, 1.02 * max(1, *(run.last.step for run in runs)))
    by_flops.set_xlim(0, 1.02 * max(1e-9, *(run.last.flops / divisor for run in runs)))
    by_step.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    by_step.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10], integer=True))
    by_flops.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    by_flops.tick_params(axis="y", left=False)
    figure.suptitle(
        "Held-out loss by steps and by training compute",
        x=0.012,
        horizontalalignment="left",
        fontsize=12,
        fontweight="bold",
        color=INK,
    )
    _legend_of_runs(figure, runs)
    _legend_of_lines(by_flops, runs)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(wspace=0.05, h_pad=0.06)
    return figure


def smooth(values: Sequence[float], stages: Sequence[int]) -> list[float]:
    """Return the centred moving average within each stage; its window is 2% of all values, but at least five."""
    # Averages do not cross from one stage to the next, since the loss really jumps there.
    half = max(2, int(SMOOTHING_SHARE * len(values) / 2))
    smoothed: list[float] = []
    for _, group in groupby(zip(stages, values, strict=True), key=lambda pair: pair[0]):
        part = np.array([value for _, value in group], dtype=float)
        finite = np.isfinite(part)
        sums = np.concatenate([[0.0], np.cumsum(np.where(finite, part, 0.0))])
        counts = np.concatenate([[0], np.cumsum(finite)])
        middle = np.arange(len(part))
        low, high = np.maximum(0, middle - half), np.minimum(len(part), middle + half + 1)
        means = (sums[high] - sums[low]) / np.maximum(1, counts[high] - counts[low])
        smoothed += np.where(finite, means, np.nan).tolist()
    return smoothed


def _draw_run(axes: Axes, place: Place, run: Run, index: int) -> None:
    colour = look(index)["color"]
    train = smooth([record.loss for record in run.train], [record.stage for record in run.train])
    evals = [record.loss for record in run.evals]
    # Counted from the end, so that the final loss gets a marker.
    every = max(1, -(-len(evals) // MARKERS_PER_LINE))
    marked = list(range(len(evals) - 1, -1, -every))
    for transition in run.transitions:
        axes.axvline(place(transition), color=colour, alpha=0.45, linewidth=1.0, linestyle=":", zorder=1, gid="stage")
    axes.plot([*map(place, run.train)], train, color=colour, alpha=0.35, linewidth=0.9, zorder=2, gid="train")
    edges: dict[str, Any] = {"markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.5, "markevery": marked}
    axes.plot([*map(place, run.evals)], evals, linewidth=1.6, zorder=3, gid="eval", **look(index), **edges)


def _limits(runs: Sequence[Run]) -> tuple[float, float]:
    """Return the range of losses to show: everything after the early cliff, but no divergence above the start."""
    late: list[float] = []
    starts: list[float] = []
    for run in runs:
        train = smooth([record.loss for record in run.train], [record.stage for record in run.train])
        curves = (
            [(record.step, record.loss) for record in run.evals],
            [(record.step, loss) for record, loss in zip(run.train, train, strict=True)],
        )
        for curve in curves:
            points = [(step, loss) for step, loss in curve if np.isfinite(loss)]
            starts += [loss for _, loss in points[:1]]
            late += [loss for step, loss in points if step >= CLIFF_SHARE * run.last.step]
    if not late:
        return 0.0, 1.0
    low, high = min(late), min(max(late), max(starts))
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + margin


def clean(axes: Axes) -> None:
    """Give the axes the style that all plots share."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=INK, labelsize=9)
    axes.tick_params(axis="both", color=GREY)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)


def _label_stages(axes: Axes, place: Place, run: Run) -> None:
    """Write above each stage of a staged run what runs in it."""
    if not run.transitions:
        return
    edges = [0.0, *map(place, (*run.transitions, run.last))]
    texts = [running(list(group)) for _, group in groupby(run.train, key=lambda record: record.stage)]
    for text, (left, right) in zip(texts, pairwise(edges), strict=False):
        # In a narrower stage the text would run into its neighbour's.
        if right - left < LABELLED_STAGE_SHARE * edges[-1]:
            continue
        axes.annotate(
            text,
            ((left + right) / 2, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            horizontalalignment="center",
            fontsize=8,
            color=GREY,
        )


def _legend_of_runs(figure: Figure, runs: Sequence[Run]) -> None:
    """Add a legend below both panels: each run with its final held-out loss and the FLOPs it took."""
    texts = []
    for label, run in zip(labels(runs), runs, strict=True):
        reached = run.evals[-1] if run.evals else None
        texts.append(
            f"{label}: {reached.loss:.3f} at {short(reached.flops, FLOP_PREFIXES, ' ')}FLOP" if reached else label
        )
    handles = [Line2D([], [], linewidth=1.6, markersize=4.5, **look(index)) for index in range(len(runs))]
    # A character of this size is about 5.5 points wide, a handle with its padding about 50.
    columns = max(1, min(len(runs), int(72 * WIDTH / DPI / (5.5 * max(map(len, texts)) + 50))))
    room = LEGEND_ROWS * columns
    if len(runs) > room:
        handles = [*handles[: room - 1], Line2D([], [], linestyle="none")]
        texts = [*texts[: room - 1], f"and {len(runs) - room + 1} more"]
    legend_below(figure, handles, texts, columns)


def legend_below(figure: Figure, handles: Sequence[Line2D], texts: Sequence[str], columns: int) -> None:
    """Add a legend below all panels, with its texts shown literally."""
    legend = figure.legend(
        handles,
        [str(number) for number in range(len(handles))],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    # Texts are set afterwards: `_run` would be left out of a legend and `$` be read as maths.
    for text, written in zip(legend.get_texts(), texts, strict=True):
        text.set_parse_math(False)
        text.set_text(written)


def _legend_of_lines(axes: Axes, runs: Sequence[Run]) -> None:
    """Add a legend of the kinds of lines, in the corner that falling losses leave free."""
    handles = []
    if any(run.evals for run in runs):
        held_out: dict[str, Any] = {"marker": "o", "markersize": 4.5, "label": "held-out loss, whole model"}
        handles.append(Line2D([], [], color=GREY, linewidth=1.6, **held_out))
    if any(run.train for run in runs):
        handles.append(Line2D([], [], color=GREY, alpha=0.6, linewidth=0.9, label="training loss, layers that ran"))
    if any(run.transitions for run in runs):
        handles.append(Line2D([], [], color=GREY, linewidth=1.0, linestyle=":", label="end of a stage"))
    box: dict[str, Any] = {"frameon": True, "framealpha": 1.0, "edgecolor": "none"}
    axes.legend(handles=handles, loc="upper right", fontsize=9, labelcolor=INK, **box)
