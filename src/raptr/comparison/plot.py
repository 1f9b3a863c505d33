"""The plot of a comparison: what each entry reached, and how that depends on the learning rate."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from raptr.comparison.outcomes import FULL, REDUCED, Outcome
from raptr.comparison.table import Row, finals, runs_at
from raptr.report.plots import DPI, INK, WIDTH, clean, legend_below, look

HEIGHT, LINE = 440, 26  # pixels: the figure without its entries, and each entry's line
SPREAD = 2.0  # the panel ends above the best loss by this many times the spread of the final losses


Looks = Mapping[str, Mapping[str, Any]]  # the colour and marker of each entry


def draw(table: Sequence[Row], outcomes: Sequence[Outcome], full_flops: float) -> Figure:
    """Draw final losses (left), and losses against learning rates or, if no entry has a grid, loss curves (right).

    The legend belongs to the right panel; the left one names its entries on its axis.
    """
    labels = list(dict.fromkeys(row.label for row in table))
    looks = {label: look(index) for index, label in enumerate(labels)}
    final = finals(table)
    figure = Figure(
        figsize=(WIDTH / DPI, (HEIGHT + LINE * len(final)) / DPI), dpi=DPI, layout="constrained", facecolor="white"
    )
    left, right = figure.subplots(1, 2)
    clean(left)
    _draw_finals(left, final, looks)
    clean(right)
    right.set_ylabel("held-out loss", color=INK)
    gridded = {label: style for label, style in looks.items() if sum(row.label == label for row in table) > 1}
    if gridded:
        _draw_peaks(right, [row for row in table if row.label in gridded], gridded)
    else:
        _draw_curves(right, [row for row in final if row.best], outcomes, looks, full_flops)
    shown = gridded or looks
    handles = [Line2D([], [], linestyle="none", **style) for style in shown.values()]
    legend_below(figure, handles, list(shown), min(4, len(handles)))
    return figure


def _draw_finals(axes: Axes, final: Sequence[Row], looks: Looks) -> None:
    """Draw a point with its 95% interval for each entry, the best on top; lines mark full and reduced training."""
    axes.set_title("held-out loss at each entry's best learning rate", fontsize=10, color=INK)
    axes.set_xlabel("held-out loss; bars are 95% intervals over the seeds", color=INK)
    ordered = sorted(final, key=lambda row: row.loss.mean if row.loss and row.best else math.inf)
    for place, row in enumerate(ordered):
        style = looks[row.label]
        if not row.loss or not row.best:
            frame = axes.get_yaxis_transform()
            axes.annotate("diverged", (0.5, place), xycoords=frame, color=style["color"], va="center")
            continue
        if row.label in (FULL, REDUCED):
            axes.axvline(row.loss.mean, color=style["color"], linewidth=1.0, linestyle="--", alpha=0.6, zorder=1)
        axes.errorbar(row.loss.mean, place, xerr=row.loss.interval, markersize=7, capsize=3, gid=row.label, **style)
    axes.set_yticks(range(len(ordered)), [_named(row) for row in ordered], parse_math=False)
    axes.set_ylim(len(ordered) - 0.4, -0.6)
    axes.margins(x=0.08)


def _named(row: Row) -> str:
    """Label an entry with its cost and its learning rate."""
    cost = "" if row.flops is None else f", {row.flops:.2f} FLOPs"
    return f"{row.label}{cost}, peak {row.peak:g}{'*' if row.edge else ''}"


def _draw_peaks(axes: Axes, table: Sequence[Row], looks: Looks) -> None:
    """Draw loss against learning rate. Rings mark the best rates, crosses on top diverged runs."""
    bottom, top = _limits(_ends(table), _ends(finals(table)))
    beyond = [row for row in table if row.loss and not row.diverged and row.loss.mean > top]
    marks = ["×: a run diverged"] if any(row.diverged for row in table) else []
    marks += ["▲: above the panel, with its loss"] if beyond else []
    axes.set_title("\n".join(["loss at every learning rate", *marks]), fontsize=10, color=INK)
    axes.set_xlabel("peak learning rate", color=INK)
    axes.set_xscale("log")
    for label, style in looks.items():
        of_entry = sorted((row for row in table if row.label == label), key=lambda row: row.peak)
        whole = [row for row in of_entry if row.loss and not row.diverged]
        x, y = [row.peak for row in whole], [row.loss.mean for row in whole if row.loss]
        errors = [(row.loss and row.loss.interval) or 0.0 for row in whole]
        axes.errorbar(x, y, yerr=errors, markersize=5, capsize=2, gid=label, **style)
        for row in of_entry:
            if row.best and row.loss:
                axes.plot(row.peak, row.loss.mean, "o", markersize=12, color=style["color"], fillstyle="none")
            if row.diverged:
                frame = axes.get_xaxis_transform()
                axes.plot(row.peak, 0.98, "x", color=style["color"], transform=frame, clip_on=False, gid="diverged")
    axes.set_ylim(bottom, top)
    axes.margins(x=0.08)
    _name_beyond(axes, beyond, looks)
    tried = sorted({row.peak for row in table})
    axes.xaxis.set_major_locator(FixedLocator(tried))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _name_beyond(axes: Axes, beyond: Sequence[Row], looks: Looks) -> None:
    """Write the losses that lie above the panel at its upper edge, one below the other."""
    at_peak: Counter[float] = Counter()
    for row in sorted(beyond, key=lambda row: -(row.loss.mean if row.loss else 0.0)):
        assert row.loss
        place, frame = (row.peak, 0.96 - 0.045 * at_peak[row.peak]), axes.get_xaxis_transform()
        style: dict[str, Any] = {"color": looks[row.label]["color"], "ha": "center", "va": "top", "fontsize": 8}
        axes.annotate(f"▲ {row.loss.mean:.2f}", place, xycoords=frame, gid="beyond", **style)
        at_peak[row.peak] += 1


def _draw_curves(
    axes: Axes, final: Sequence[Row], outcomes: Sequence[Outcome], looks: Looks, full_flops: float
) -> None:
    """Draw loss curves against FLOPs, averaged over the seeds."""
    axes.set_title("held-out loss on the way", fontsize=10, color=INK)
    axes.set_xlabel("FLOPs of the whole model, relative to full", color=INK)
    late: list[float] = []
    for row in final:
        curves = [
            {step: (flops, loss) for step, flops, loss in run.curve}
            for run in runs_at(outcomes, row.label, row.peak)
            if run.loss is not None
        ]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        x, y = np.mean([[curve[step] for step in steps] for curve in curves], axis=0).T
        axes.plot(x / full_flops, y, markersize=4, linewidth=1.4, gid=row.label, **looks[row.label])
        late += y[len(y) // 4 :].tolist()
    axes.set_ylim(*_limits(late, late))


def _limits(shown: Sequence[float], final: Sequence[float]) -> tuple[float, float]:
    """Return the range of losses to show, without those of rates that all but failed: they would flatten the rest."""
    finite = [loss for loss in shown if math.isfinite(loss)]
    if not finite:
        return 0.0, 1.0
    low = min(finite)
    spread = max(final) - low or 0.05 * abs(low) or 1.0
    high = min(max(finite), low + SPREAD * spread)
    margin = 0.08 * (high - low) or 0.5
    return low - margin, high + margin


def _ends(some: Sequence[Row]) -> list[float]:
    """Return both ends of each row's interval; with a single seed, both are its loss."""
    return [row.loss.mean + side * (row.loss.interval or 0.0) for row in some if row.loss for side in (-1, 1)]
