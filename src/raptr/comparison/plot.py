"""The picture of a comparison: what each entry reached for its FLOPs, and how that depends on the learning rate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from raptr.comparison.table import Outcome, Row, finals
from raptr.report.plots import COLOURS, DPI, GREY, INK, MARKERS, WIDTH, clean, legend_below

HEIGHT = 720  # pixels
BESIDE = 0.012  # entries of one cost stand this far apart, as a share of the panel
SPREAD = 2.0  # losses further above the best than this many times the spread of the finals are cut off


@dataclass(frozen=True)
class _Look:
    colour: str
    marker: str


def draw(table: Sequence[Row], outcomes: Sequence[Outcome], full_flops: float, *, full: str, reduced: str) -> Figure:
    """Final losses against FLOPs, and losses against learning rates, or against FLOPs where there is no grid."""
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    labels = list(dict.fromkeys(row.label for row in table))
    looks = {label: _Look(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, label in enumerate(labels)}
    final = [row for row in finals(table) if row.best]
    _draw_finals(left, final, looks, (full, reduced))
    if len(table) > len(labels):
        _draw_peaks(right, table, looks)
    else:
        _draw_curves(right, final, outcomes, looks, full_flops)
    for axes in (left, right):
        clean(axes)
        axes.set_ylabel("held-out loss", color=INK)
    _legend(figure, table, looks)
    return figure


def _draw_finals(axes: Axes, final: Sequence[Row], looks: Mapping[str, _Look], line: tuple[str, str]) -> None:
    """A point with its standard error for each entry, and full training's line between its two lengths."""
    axes.set_title("final loss at each entry's best learning rate", fontsize=10, color=INK)
    axes.set_xlabel("FLOPs of the whole model, relative to full", color=INK)
    places = _places(final)
    for row in final:
        assert row.loss is not None
        look = looks[row.label]
        axes.errorbar(
            places[row.label],
            row.loss.mean,
            yerr=row.loss.error,
            color=look.colour,
            marker=look.marker,
            markersize=7,
            capsize=3,
            zorder=3,
            gid=row.label,
        )
    ends = [(places[row.label], row.loss.mean) for row in final if row.label in line and row.loss]
    if len(ends) == 2:
        x, y = zip(*ends, strict=True)
        axes.plot(x, y, color=GREY, linewidth=1.0, linestyle="--", zorder=1, gid="full")
    axes.margins(x=0.1, y=0.12)


def _places(final: Sequence[Row]) -> dict[str, float]:
    """Where each entry stands, those of about one cost side by side so that none hides another."""
    costs = {row.label: row.flops for row in final if row.flops is not None}
    width = max(0.1, max(costs.values(), default=1) - min(costs.values(), default=1))
    places: dict[str, float] = {}
    for label, cost in sorted(costs.items(), key=lambda item: item[1]):
        near = [other for other in places if abs(costs[other] - cost) < BESIDE * width / 2]
        places[label] = max(cost, *(places[other] + BESIDE * width for other in near)) if near else cost
    return places


def _draw_peaks(axes: Axes, table: Sequence[Row], looks: Mapping[str, _Look]) -> None:
    """Loss against the learning rate, the best one ringed, those with a diverged run as crosses on top."""
    crossed = " (×: a run diverged)" if any(row.diverged for row in table) else ""
    axes.set_title(f"loss at every learning rate{crossed}", fontsize=10, color=INK)
    axes.set_xlabel("peak learning rate", color=INK)
    axes.set_xscale("log")
    for label, look in looks.items():
        own = sorted((row for row in table if row.label == label), key=lambda row: row.peak)
        whole = [row for row in own if row.loss and not row.diverged]
        x, y = [row.peak for row in whole], [row.loss.mean for row in whole if row.loss]
        errors = [(row.loss and row.loss.error) or 0.0 for row in whole]
        axes.errorbar(x, y, yerr=errors, color=look.colour, marker=look.marker, markersize=5, capsize=2, gid=label)
        for row in own:
            if row.best and row.loss:
                axes.plot(row.peak, row.loss.mean, "o", markersize=12, color=look.colour, fillstyle="none")
            if row.diverged:
                top = axes.get_xaxis_transform()
                axes.plot(row.peak, 0.98, "x", color=look.colour, transform=top, clip_on=False, gid="diverged")
    axes.set_ylim(*_limits(_ends(table), _ends(finals(table))))
    axes.margins(x=0.08)
    tried = sorted({row.peak for row in table})
    axes.xaxis.set_major_locator(FixedLocator(tried))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _draw_curves(
    axes: Axes, final: Sequence[Row], outcomes: Sequence[Outcome], looks: Mapping[str, _Look], full_flops: float
) -> None:
    """The loss on the way, against FLOPs, averaged over the seeds."""
    axes.set_title("held-out loss on the way", fontsize=10, color=INK)
    axes.set_xlabel("FLOPs of the whole model, relative to full", color=INK)
    late: list[float] = []
    for row in final:
        curves = [
            {step: (flops, loss) for step, flops, loss in run.curve}
            for run in outcomes
            if (run.label, run.peak) == (row.label, row.peak) and run.loss is not None
        ]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        x, y = np.mean([[curve[step] for step in steps] for curve in curves], axis=0).T
        look = looks[row.label]
        axes.plot(x / full_flops, y, color=look.colour, marker=look.marker, markersize=4, linewidth=1.4, gid=row.label)
        late += y[len(y) // 4 :].tolist()
    axes.set_ylim(*_limits(late, late))


def _limits(shown: Sequence[float], final: Sequence[float]) -> tuple[float, float]:
    """The range of losses to show: learning rates that all but failed would flatten the rest."""
    finite = [loss for loss in shown if math.isfinite(loss)]
    if not finite:
        return 0.0, 1.0
    low = min(finite)
    spread = max(final) - low or 0.05 * abs(low) or 1.0
    high = min(max(finite), low + SPREAD * spread)
    margin = 0.08 * (high - low) or 0.5
    return low - margin, high + margin


def _ends(some: Sequence[Row]) -> list[float]:
    """The ends of the rows' error bars."""
    return [row.loss.mean + side * (row.loss.error or 0.0) for row in some if row.loss for side in (-1, 1)]


def _legend(figure: Figure, table: Sequence[Row], looks: Mapping[str, _Look]) -> None:
    texts = []
    for row in finals(table):
        reached = f"{row.loss.mean:.4f} at peak {row.peak:g}" if row.loss and row.best else "diverged"
        texts.append(f"{row.label}: {reached}{'*' if row.edge else ''}")
    handles = [Line2D([], [], color=look.colour, marker=look.marker, linestyle="none") for look in looks.values()]
    legend_below(figure, handles, texts, min(3, len(handles)))
