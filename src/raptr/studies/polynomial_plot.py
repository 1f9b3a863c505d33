"""Figures of the polynomial studies, drawn from their results alone."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

# Okabe and Ito's palette; dashed lines tell variants of a method apart.
COLOURS = {
    "full": "#222222",
    "raptr": "#0072B2",
    "raptr-none": "#56B4E9",
    "pld": "#D55E00",
    "pld-matched": "#E69F00",
    "layer-dropout": "#009E73",
}
LINES = {"raptr-none": "--", "pld-matched": "--"}
KINDS = ("low", "middle", "high")


def degree_groups(degrees: int) -> list[list[int]]:
    """Return the low, middle and high degrees as three lists of indices, counted from 0."""
    edges = [round(third * degrees / 3) for third in range(4)]
    return [list(range(start, stop)) for start, stop in pairwise(edges)]


def plot(result: dict[str, Any]) -> Figure:
    """Draw the evaluation loss, and the errors of low, middle and high degrees, over the steps."""
    degrees = result["setting"]["degrees"]
    groups = degree_groups(degrees)
    figure = Figure(figsize=(13, 4.3), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 4)
    for axes in panels[2:]:
        axes.sharey(panels[1])
    titles = ["evaluation loss", *(_title(kind, group) for kind, group in zip(KINDS, groups, strict=True))]
    for axes, title in zip(panels, titles, strict=True):
        _panel(axes, title)
        _over_steps(axes, result["methods"])
    for name, numbers in result["methods"].items():
        runs, look = numbers["runs"], {"color": COLOURS[name], "zorder": 2 + len(COLOURS) - list(COLOURS).index(name)}
        mean, deviation = numbers["loss"]
        error = f" ± {deviation:.2g}" if len(runs) > 1 else ""
        reached = "diverged" if mean is None else f"{mean:.3g}{error}"
        label = f"{name}, {numbers['relative_flops']:.3f} of the FLOPs: final loss {reached}"
        curves = [np.array([run["loss"] for run in runs], dtype=float)]
        curves += [np.array([run["error"] for run in runs], dtype=float)[:, :, group].mean(2) for group in groups]
        for axes, values in zip(panels, curves, strict=True):
            middle, spread = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
            axes.plot(runs[0]["steps"], middle, label=label, linewidth=1.6, linestyle=LINES.get(name, "-"), **look)
            low = np.maximum(middle - spread, middle / 10)  # a logarithmic axis cannot show a band that reaches 0
            axes.fill_between(runs[0]["steps"], low, middle + spread, alpha=0.15, linewidth=0, **look)
    full = result["methods"]["full"]["runs"]
    noise = np.array([run["floor"] for run in full], dtype=float).mean(0)
    for axes, group in zip(panels[1:], groups, strict=True):
        look = {"color": "#999999", "linewidth": 1.0, "linestyle": "-.", "zorder": 1}
        axes.plot(full[0]["steps"], noise[:, group].mean(1), label="what sampling adds to the errors of full", **look)
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    layers, seeds = result["setting"]["layers"], result["seeds"]
    over = "one seed" if seeds == 1 else f"mean and deviation over {seeds} seeds"
    _headline(figure, f"Polynomials of degree 1 to {degrees}, {layers} layers: {over}")
    return figure


def _panel(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("steps")
    axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)


def _over_steps(axes: Axes, methods: dict[str, Any]) -> None:
    """Write steps as whole numbers, and draw a line where each later stage of RaPTr begins."""
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    for step in methods["raptr"]["transitions"]:
        axes.axvline(step, color=COLOURS["raptr"], alpha=0.5, linewidth=1.0, linestyle=":", zorder=1)


def _headline(figure: Figure, text: str) -> None:
    look = {"x": 0.01, "horizontalalignment": "left", "fontsize": 11, "fontweight": "bold"}
    figure.suptitle(f"{text}; dotted: RaPTr's next stage", **look)


def _title(kind: str, group: Sequence[int]) -> str:
    first, last = group[0] + 1, group[-1] + 1
    return f"error of {kind} degrees ({first}{f' to {last}' if last > first else ''})"


def plot_lengths(result: dict[str, Any]) -> Figure:
    """Draw the final loss against the length of the run, and the loss curves of the longest runs."""
    figure = Figure(figsize=(11, 4.3), layout="constrained", facecolor="white")
    ends, courses = figure.subplots(1, 2)
    lengths = result["lengths"]
    longest = lengths[-1]
    for axes, title in ((ends, "final loss by length of the run"), (courses, f"runs of {longest['steps']:,} steps")):
        _panel(axes, title)
        axes.set_ylabel("evaluation loss")
    ends.set_xscale("log")
    ends.set_xticks([entry["steps"] for entry in lengths], [f"{entry['steps']:,}" for entry in lengths])
    ends.minorticks_off()
    _over_steps(courses, longest["methods"])
    for name in longest["methods"]:
        look = {"color": COLOURS[name], "linestyle": LINES.get(name, "-"), "linewidth": 1.6}
        reached = [entry for entry in lengths if entry["methods"][name]["loss"][0] is not None]
        means = [entry["methods"][name]["loss"][0] for entry in reached]
        label = f"{name}, {longest['methods'][name]['relative_flops']:.3f} of the FLOPs"
        ends.plot([entry["steps"] for entry in reached], means, marker="o", label=label, **look)
        for run in longest["methods"][name]["runs"]:
            courses.plot(run["steps"], np.array(run["loss"], dtype=float), **look)
    figure.legend(*ends.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    degrees, seeds = result["setting"]["degrees"], result["seeds"]
    over = "one seed" if seeds == 1 else f"mean of {seeds} seeds"
    _headline(figure, f"Polynomials of degree 1 to {degrees}, runs of different lengths: {over}")
    return figure
