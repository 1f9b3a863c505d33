"""The page that says which method to take: a picture, tables, and the law, all from the comparisons' records."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from docs.results.pages.contract import Page, Records, table, with_interval
from evidence.law import described
from evidence.measured import ITEMS, SOURCES, full_training, measurements
from raptr.methods import METHODS
from raptr.report.plots import COLOURS, GREY, INK, MARKERS, clean, legend_below
from raptr.train.advice import SAME, SEEDS, Difference, Measured, Place, best, named

KINDS = {"mlm": "masked language modelling", "causal": "causal language modelling", "ul2": "UL2"}
SHIFT = 0.018  # of points of methods measured at the same length, as a share of the axis, so that intervals stay apart
LONG = 20.0  # training counts as long from this many tokens per weight on
LONGER = 1.1  # times the steps of full training; written beside a point if there are more
WIDE = {1: 8.0, 2: 9.6, 3: 12.0}  # width of the figure in inches, by its number of columns
AROUND = [(x, y) for y in (0, 9, -9, 18, -18, 27, -27) for x in (8, -8)]  # offsets of a note from its point, in pt
FULL = "full training, all FLOPs"
Note = tuple[tuple[float, float], str, str]  # a point, the text beside it, and its colour
# The methods that are compared at length, in the order of their colours; others are grey.
FIRST = ("progressive-stacking", "stacking", "raptr", "pld", "g-stack", "midas", "one-layer")


def answer(records: Records) -> str:
    """Return the advice for each objective, from its most reliable measurement.

    Three seeds come before fewer, then a method that ended below full training, then longer training. A cheaper method
    that also ended below full training there is named too.
    """
    rows, advised = measurements(records), dict[str, Measured]()
    advice = [best(place, [row for row in rows if row.place == place]) for place in _places(rows)]
    known = [row for row in advice if row is not None]
    known.sort(key=lambda row: (row.to_full.seeds < SEEDS, not row.to_full.below, -row.place.tokens_per_weight))
    for row in known:
        advised.setdefault(row.place.objective, row)
    return "\n\n".join(
        f"**At {row.place} ({KINDS[objective]}) take `{named(row.method)}`**: it ended {row.to_full} full training "
        f"with {row.flops:.2f} of its FLOPs and {row.longer:.2f} times its steps, and {row.to_reduced} full training "
        f"with as few FLOPs ({_seeds(row)}).{_cheaper(row, rows)}"
        for objective, row in advised.items()
    )


def _cheaper(taken: Measured, rows: Iterable[Measured]) -> str:
    """Name the cheapest method that also ended below full training at the same place, in the same steps, if any."""
    sure = [row for row in rows if row.place == taken.place and row.to_full.seeds >= SEEDS and row.to_full.below]
    least = min((row for row in sure if row.longer <= SAME), key=lambda row: row.flops, default=taken)
    if least.flops >= taken.flops:
        return ""
    return f" `{named(least.method)}` ended {least.to_full} full training with {least.flops:.2f} of its FLOPs."


def take(records: Records) -> str:
    """Tabulate for each measured place what to take, what that rests on, and what did not pay."""
    rows, lines = measurements(records), []
    for place in _places(rows):
        advice = best(place, rows)
        here = [row for row in rows if row.place == place]
        worse = [row for row in _one_each(here, rows) if row.to_reduced.low > 0]
        lines.append(
            [
                _model(place),
                _length(place),
                "`full`" if advice is None else f"`{named(advice.method)}`",
                *(["–"] * 5 if advice is None else _basis(advice, place)),
                ", ".join(f"`{row.method['name']}` {_shown(row.to_reduced)}" for row in worse) or "–",
            ]
        )
    head = ["model", "tokens per weight", "take", "its FLOPs", "its steps", "to full", "to reduced", "rests on"]
    return table([*head, "ended above reduced"], lines)


def goal(records: Records) -> str:
    """Tabulate every method measured in long training, by how near it came to full training of all FLOPs."""
    rows = [row for row in measurements(records) if row.place.tokens_per_weight >= LONG]
    lines = [
        [
            _model(row.place),
            _length(row.place),
            f"`{named(row.method)}`",
            f"{row.flops:.2f}",
            f"{row.longer:.2f}×",
            _shown(row.to_full),
            f"{_seeds(row)}, [{row.record}](evidence.md#{row.record})",
        ]
        for row in sorted(rows, key=lambda row: (_kind(row.place), row.to_full.mean))
    ]
    return table(["model", "tokens per weight", "method", "its FLOPs", "its steps", "to full", "rests on"], lines)


def limits(records: Records) -> str:
    """Say what was not measured."""
    rows = measurements(records)
    places = _places(rows)
    sizes = dict.fromkeys(f"{place.layers}×{place.width}" for place in places)
    lengths = [place.tokens_per_weight for place in places]
    kinds = dict.fromkeys(KINDS[place.objective] for place in places)
    others = [_left_out(objective, records) for objective in KINDS if KINDS[objective] not in kinds]
    sentences = [
        f"**Measured**: {_listed(sizes)} (layers × width), {min(lengths):.2g} to {max(lengths):.2g} tokens per weight"
    ]
    sentences[0] += f", {_listed(kinds)}."
    sentences.append(f"**Not in the table**: {'; '.join(['any other size or length', *others])}.")
    sentences.append(
        "There `--method auto` takes the method that was best in the nearest measurement, and says so when that is far."
    )
    known, tried = {row.method["name"] for row in rows} | {"full"}, _tried(records)
    links = {name: f"`{name}` ([{record}](evidence.md#{record}))" for name, record in tried.items()}
    if begun := [links[name] for name in METHODS if name in tried and name not in known]:
        sentences.append(f"Run, but the search for their learning rates has not ended: {_listed(begun)}.")
    if missing := [f"`{name}`" for name in METHODS if name not in known and name not in tried]:
        sentences.append(f"No runs yet: {_listed(missing)}.")
    if older := {f"`{row.method['name']}` ({_length(row.place)})" for row in _one_each(rows, rows) if row.older}:
        sentences.append(
            "From [compare.md](compare.md), where every run decayed over the same number of steps (reduced over a "
            f"larger share of its own) and most ran at one learning rate: {_listed(sorted(older))}."
        )
    return " ".join(filter(None, sentences))


def _tried(records: Records) -> dict[str, str]:
    """Return the methods that were run, each with the last comparison that ran it."""
    comparisons = dict[str, str]()
    for comparison, record in records.items():
        for label in {run["label"] for run in record["runs"]} if record else ():
            comparisons[record["configs"][label]["method"]["name"]] = comparison
    return comparisons


def _left_out(objective: str, records: Records) -> str:
    """Name an objective that the table lacks, with its comparisons, whose search for learning rates has not ended."""
    configs = {name: record["configs"]["full"] for name, record in records.items() if record}
    names = [name for name, config in configs.items() if config.get("objective", {}).get("name") == objective]
    links = ", ".join(f"[{name}](evidence.md#{name})" for name in names)
    return f"{KINDS[objective]}, whose search for learning rates has not ended ({links})" if names else KINDS[objective]


def commands(records: Records) -> str:
    """Return the command of each record that the page rests on."""
    used = dict.fromkeys(row.record for row in measurements(records))
    files = {item.name: str(item.file) for item in ITEMS} | {"compare": "examples/methods.yaml"}
    jobs = {item.name: item.jobs for item in ITEMS}
    lines = [f"raptr compare {files[name]} --out runs/{name} --jobs {jobs.get(name, 7)}" for name in used]
    return "\n".join(["```", *lines, "```"])


def law(records: Records) -> str:
    """Return the law, or what is missing for it."""
    return described(measurements(records))


def picture(records: Records) -> Figure:
    """Draw losses relative to full training with the same FLOPs, over tokens per weight: a panel for each model."""
    rows, full = measurements(records), full_training(records)
    models = dict.fromkeys(replace(place, tokens_per_weight=1.0) for place in _places(rows))
    panels = {model: [row for row in rows if replace(row.place, tokens_per_weight=1.0) == model] for model in models}
    shown = [name for name in (*FIRST, *METHODS) if any(row.method["name"] == name for row in rows)]
    looks = {name: _look(index, name) for index, name in enumerate(dict.fromkeys(shown))}
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    height = -(-len(panels) // columns)
    size = (WIDE[columns], 1.2 + (4.0 if columns == 1 else 3.2) * height)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(height, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes in grid[len(panels) :]:
        axes.remove()
    grid[0].set_xscale("log")
    lengths = [row.place.tokens_per_weight for row in rows]
    grid[0].set_xlim(min(lengths) / 1.6, max(lengths) * 1.6)
    notes = []
    for axes, (model, own) in zip(grid, panels.items(), strict=False):
        known = {place: value for place, value in full.items() if replace(place, tokens_per_weight=1.0) == model}
        notes.append(_panel(axes, own, known, looks))
        axes.set_title(_model(model).replace(", ", "\n", 1), fontsize=10, color=INK)
        axes.xaxis.set_major_locator(FixedLocator(_ticks(lengths)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("tokens per weight of the layers, in full training", color=INK)
    for axes in grid[::columns]:
        axes.set_ylabel("held-out loss, less that of full training\nwith the same FLOPs (lower is better)", color=INK)
    handles = [Line2D([], [], color=colour, marker=marker) for colour, marker in looks.values()]
    handles += [Line2D([], [], color=INK, linestyle="--"), Line2D([], [], color=GREY)]
    handles += [Line2D([], [], color=GREY, marker="o", fillstyle="none", linestyle="none")]
    texts = [*looks, FULL, "full training, same FLOPs", f"fewer than {SEEDS} seeds: preliminary"]
    legend_below(figure, handles, texts, 4)
    figure.draw_without_rendering()  # the positions of panels and points are known only after this
    for axes, own_notes in zip(grid, notes, strict=False):
        _write(axes, own_notes)
    return figure


def _ticks(lengths: Iterable[float]) -> list[float]:
    """Return the measured lengths, without those too close to a smaller one for a label of their own."""
    ticks: list[float] = []
    for length in sorted(lengths):
        if not ticks or length > 1.3 * ticks[-1]:
            ticks.append(length)
    return ticks


def _write(axes: Axes, notes: Iterable[Note]) -> None:
    """Write the notes beside their points: inside the panel, and if possible over no point, line or other note."""
    bars = [(bar[0], *bar[1]) for bar in axes.containers if isinstance(bar, ErrorbarContainer)]  # points and caps
    taken = [Bbox.union([line.get_window_extent() for line in bar]) for bar in bars]
    lines = [line.get_transform().transform_path(line.get_path()) for line in axes.lines]
    for near, text, colour in notes:
        written = axes.annotate(
            text, near, AROUND[0], textcoords="offset points", va="center", fontsize=8, color=colour
        )
        for x, y in AROUND:
            written.set_position((x, y))
            written.set_horizontalalignment("left" if x > 0 else "right")
            box = written.get_window_extent()
            inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1)
            inside = inside and axes.bbox.containsy(box.y0) and axes.bbox.containsy(box.y1)
            crossed = any(line.intersects_bbox(box, filled=False) for line in lines)
            if inside and not crossed and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)


def _panel(
    axes: Axes,
    rows: Sequence[Measured],
    full: dict[Place, Difference],
    looks: dict[str, tuple[str, str]],
) -> list[Note]:
    """Draw one model's methods, each at its best settings, with 95% intervals; return the notes for the points."""
    clean(axes)
    notes: list[Note] = []
    low, high = axes.get_xlim()
    axes.axhline(0, color=GREY, linewidth=1.2, zorder=1)
    points = sorted((place.tokens_per_weight, value.mean) for place, value in full.items())
    wide = [(points[0][0] / 1.25, points[0][1]), *points, (points[-1][0] * 1.25, points[-1][1])]
    axes.plot(*zip(*wide, strict=True), color=INK, linestyle="--", linewidth=1.2, zorder=1, gid="full")
    drawn = _one_each(rows, rows)
    advised = [best(place, [row for row in rows if row.place == place]) for place in full]
    others = [row for row in advised if row is not None and row not in drawn]  # other settings of a drawn method
    drawn += others
    for name, (colour, marker) in looks.items():
        own = sorted((row for row in drawn if row.method["name"] == name), key=lambda row: row.place.tokens_per_weight)
        x = [_shifted(row, drawn, list(looks), high / low) for row in own]
        for one, other in pairwise(zip(x, own, strict=True)):
            if one[1].method == other[1].method:
                ends = [row.to_reduced.mean for row in (one[1], other[1])]
                axes.plot((one[0], other[0]), ends, color=colour, linewidth=1.4, alpha=0.7, gid=name)
        for place, row in zip(x, own, strict=True):
            axes.errorbar(
                place,
                row.to_reduced.mean,
                yerr=row.to_reduced.interval,
                color=colour,
                marker=marker,
                markersize=6,
                capsize=3,
                fillstyle="full" if row.to_full.seeds >= SEEDS else "none",
            )
            if row in others or row.longer > LONGER:
                steps = "same steps" if row.longer <= SAME else f"{row.longer:.2f}× the steps"
                notes.append(((place, row.to_reduced.mean), steps, colour))
    return notes


def _shifted(row: Measured, rows: Iterable[Measured], order: Sequence[str], width: float) -> float:
    """Return a point's x, shifted so that intervals of methods measured at the same length do not overlap."""
    names = [name for name in order if any((r.method["name"], r.place) == (name, row.place) for r in rows)]
    shift = SHIFT * (names.index(row.method["name"]) - (len(names) - 1) / 2)
    return row.place.tokens_per_weight * math.pow(width, shift)


def _one_each(rows: Iterable[Measured], measured: Sequence[Measured]) -> list[Measured]:
    """Return one row for each method at each place: the settings measured at most places, then the best.

    So a line is of one method with the same settings where that is possible. Three seeds come before fewer.
    """
    chosen: dict[tuple[Place, str], Measured] = {}
    counts = Counter(json.dumps(row.method, sort_keys=True) for row in measured)

    def order(row: Measured) -> tuple[bool, int, float]:
        return row.to_full.seeds < SEEDS, -counts[json.dumps(row.method, sort_keys=True)], row.to_reduced.mean

    for row in sorted(rows, key=order):
        chosen.setdefault((row.place, row.method["name"]), row)
    return list(chosen.values())


def _places(rows: Iterable[Measured]) -> list[Place]:
    return sorted({row.place for row in rows}, key=_kind)


def _kind(place: Place) -> tuple[str, str, int, int, str, float]:
    return place.family, place.objective, place.width, place.layers, place.init, place.tokens_per_weight


def _basis(found: Measured, place: Place) -> list[str]:
    page = "compare.md" if found.record == "compare" else f"evidence.md#{found.record}"
    elsewhere = "" if found.place == place else f", measured at {_model(found.place)}, {_length(found.place)}"
    return [
        f"{found.flops:.2f}",
        f"{found.longer:.2f}×",
        _shown(found.to_full),
        _shown(found.to_reduced),
        f"{_seeds(found)}, [{found.record}]({page}){elsewhere}",
    ]


def _seeds(row: Measured) -> str:
    return "one seed, preliminary" if row.to_full.seeds == 1 else f"{row.to_full.seeds} seeds"


def _model(place: Place) -> str:
    learns = {"mlm": "", "causal": " (causal)", "ul2": " (UL2)"}[place.objective]
    usual = {"bert": "bert", "decoder": "fan-in"}[place.family]
    starts = "" if place.init == usual else f", {place.init} initial weights"
    return f"{place.family}{learns}, {place.layers} layers of width {place.width}{starts}"


def _length(place: Place) -> str:
    return f"{place.tokens_per_weight:.2g}"


def _shown(value: Difference) -> str:
    return with_interval(value.mean, value.interval, sign=True)


def _listed(words: Iterable[str]) -> str:
    *others, last = list(words)
    return f"{', '.join(others)} and {last}" if others else last


def _look(index: int, name: str) -> tuple[str, str]:
    """Return colour and marker of a method; methods that were not compared at length are grey."""
    return COLOURS[FIRST.index(name)] if name in FIRST else GREY, MARKERS[index % len(MARKERS)]


PAGE = Page(
    "results/which-method",
    SOURCES,
    {"answer": answer, "take": take, "goal": goal, "limits": limits, "commands": commands, "law": law},
    {"which-method.png": picture},
)
