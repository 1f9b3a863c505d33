"""The page about the axes besides depth: heads, the MLP's width, and several at once.

A table has every entry of its comparison's file, so that the page itself says what was not run yet.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from docs.results.pages.contract import Page, Records, table, with_interval
from evidence.measured import ITEMS, ROOT, searched
from raptr.comparison import read_file
from raptr.comparison.outcomes import FULL, REDUCED, Outcome
from raptr.comparison.record import read_outcomes, read_rows
from raptr.comparison.table import Row, difference, finals, runs_at
from raptr.methods.raptr import RaPTr
from raptr.report.plots import COLOURS, GREY, INK, clean, legend_below
from raptr.report.statistics import Mean

SIZES = ("6x256", "12x256")
JOINT = {"axes-75": "0.75", "axes-67": "0.67"}  # comparisons of several axes: the share of the layers' FLOPs
PANELS = (("heads",), ("mlp", "axes-75"), ("axes-67",))  # comparisons with the same budget
WANTED = [f"{kind}-{size}" for size in SIZES for kind in ("heads", "mlp", *JOINT, "scale")]
FILES = {item.name: item for item in ITEMS if item.name in WANTED}
DEPTH, MLP = "depth", "raptr, mlp"  # as the records call RaPTr on one axis
AXES = {"heads": "Heads", "mlp": "The MLP's width"}
# Held-out losses of BERT-Base after 300,000 steps, from the paper's tables.
PAPER = {"msg, heads": 2.07, "raptr, heads": 1.84, "msg, mlp": 1.88, "raptr, mlp": 1.84, DEPTH: 1.83}
LOOKS = {"raptr": (COLOURS[2], "o"), "msg": (COLOURS[4], "s")}
CELLS = ("steps", "held-out loss", "seeds", "to full", "to reduced")


@dataclass(frozen=True)
class Entry:
    """An entry of a comparison, and the results of its runs at the best learning rate; without runs, `row` is None."""

    label: str
    method: Mapping[str, Any]  # as in the comparison's file
    row: Row | None = None
    runs: tuple[Outcome, ...] = ()
    ended: bool = False  # whether the search for its learning rate has ended

    @property
    def to_reduced(self) -> Mean | None:
        return self.row.to_reduced if self.row else None

    @property
    def joint(self) -> bool:
        """Whether it is smaller on several axes."""
        return sum(axis in self.method for axis in ("schedule", "heads", "parts")) > 1


def _entries(name: str, records: Records) -> dict[str, Entry]:
    """Return the entries of a comparison's file, and full and reduced full training, with their runs."""
    methods: dict[str, Any] = {FULL: {"name": FULL}, REDUCED: {"name": FULL}} | _given(name)["entries"]
    record = records[name]
    if record is None:
        return {label: Entry(label, method) for label, method in methods.items()}
    rows, outcomes = read_rows(record), read_outcomes(record)
    best, rates = {row.label: row for row in finals(rows)}, Counter(row.label for row in rows)
    entries = {}
    for label, method in methods.items():
        row = best.get(label)
        runs = tuple(runs_at(outcomes, label, row.peak)) if row else ()
        entries[label] = Entry(label, method, row, runs, row is not None and searched(row, rates[label], widened=True))
    return entries


@cache
def _given(name: str) -> dict[str, Any]:
    return read_file(ROOT / FILES[name].file)


def _model(size: str, records: Records) -> Mapping[str, Any] | None:
    """Return the model of the comparisons of a size, or None if none was run."""
    of_size = [record for name, record in records.items() if name.endswith(f"-{size}")]
    run = [record["configs"][FULL]["model"] for record in of_size if record is not None and FULL in record["configs"]]
    return run[0] if run else None


def _by_size(made: Callable[[str, Mapping[str, Any], Records], str]) -> Callable[[Records], str]:
    """Apply `made` to each model that was run, and put the models' names above if there are several."""

    def every(records: Records) -> str:
        models = {size: model for size in SIZES if (model := _model(size, records))}
        heads = [f"**{_named(model)}**\n\n" if len(models) > 1 else "" for model in models.values()]
        shown = [head + made(size, model, records) for head, (size, model) in zip(heads, models.items(), strict=True)]
        return "\n\n".join(shown) or "**Not run yet.**"

    return every


def _named(model: Mapping[str, Any]) -> str:
    return f"{model['layers']} layers of width {model['width']}"


def answer(size: str, model: Mapping[str, Any], records: Records) -> str:
    """Say where RaPTr and MSG's growth ended on each axis, and which entry of several axes ended lowest."""
    lines = [f"At {_named(model)}, compared with full training with the same FLOPs:", ""]
    for axis, name in AXES.items():
        entries = _entries(f"{axis}-{size}", records)
        msg, raptr = (entries[f"{method}, {axis}"] for method in ("msg", "raptr"))
        budget = _given(f"{axis}-{size}")["flops"]
        lines.append(f"- **{name}** ({budget:.2f} of the FLOPs): RaPTr {_ended(raptr)}; MSG's growth {_ended(msg)}.")
    for kind in JOINT:
        entries, budget = _entries(f"{kind}-{size}", records), _given(f"{kind}-{size}")["flops"]
        known = [(value.mean, entry) for entry in entries.values() if entry.joint and (value := entry.to_reduced)]
        depth, several = entries[DEPTH], "several axes were not run yet"
        if known:
            _, lowest = min(known, key=lambda pair: pair[0])
            several = f"of several axes the lowest is `{lowest.label}`, {_ended(lowest)}"
        sizes = depth.method["schedule"]
        lines.append(f"- **Depth** ({budget:.2f} of the FLOPs, {sizes}): RaPTr {_ended(depth)}; {several}.")
    return "\n".join(lines)


def _ended(entry: Entry) -> str:
    """Say how far an entry ended from full training with the same FLOPs, and why that may not be final."""
    value = entry.to_reduced
    if value is None:
        return "was not run yet"
    caveats = ["one seed, preliminary"] if value.n == 1 else []
    caveats += [] if entry.ended else ["learning rate still searched"]
    side = "below" if value.mean < 0 else "above"
    caveat = f" ({'; '.join(caveats)})" if caveats else ""
    return f"{with_interval(abs(value.mean), value.interval)} {side}{caveat}"


def paper(size: str, model: Mapping[str, Any], records: Records) -> str:
    """Tabulate the paper's two comparisons, with its losses."""
    lines = []
    for axis in AXES:
        for entry in _entries(f"{axis}-{size}", records).values():
            if entry.method["name"] != FULL:
                flops, theirs = f"{_given(f'{axis}-{size}')['flops']:.3f}", PAPER.get(entry.label, "–")
                lines.append([entry.label, _sizes(entry, model), flops, *_cells(entry), f"{theirs}"])
    return table(["entry", "sizes", "FLOPs", *CELLS, "the paper's loss"], lines)


def joint(size: str, model: Mapping[str, Any], records: Records) -> str:
    """Compare several axes at once with depth alone, for each budget."""
    shown = []
    for kind, share in JOINT.items():
        name = f"{kind}-{size}"
        entries, lines = _entries(name, records), []
        if kind == PANELS[1][1]:  # the budget of the MLP's comparison
            entries |= {MLP: _entries(f"mlp-{size}", records)[MLP]}
        for entry in entries.values():
            apart = None if entry.label in (DEPTH, FULL) else difference(entry.runs, entries[DEPTH].runs)
            label = f"`{entry.label}`" if entry.label in (FULL, REDUCED) else entry.label
            lines.append([label, _sizes(entry, model), *_cells(entry), _shown(apart)])
        caption = f"{_given(name)['flops']:.3f} of the FLOPs, {share} of the layers' ([{name}](evidence.md#{name})):"
        shown.append(f"{caption}\n\n{table(['entry', 'sizes', *CELLS, 'to depth'], lines)}")
    return "\n\n".join(shown)


def scale(size: str, _model: Mapping[str, Any], records: Records) -> str:
    """Compare the exponents of the scale with no scale, paired by seed."""
    entries = _entries(f"scale-{size}", records)
    by_exponent = {
        entry.method["width_exponent"]: entry for entry in entries.values() if "width_exponent" in entry.method
    }
    none, lines = by_exponent[0.0], []
    for exponent, entry in by_exponent.items():
        apart = None if entry is none else difference(entry.runs, none.runs)
        seeds = [] if apart is None else [difference([run], none.runs) for run in entry.runs]
        by_seed = ", ".join(with_interval(change.mean, None, sign=True) for change in seeds if change)
        default = "**yes**" if exponent == RaPTr.width_exponent else "no"
        peak = "–" if entry.row is None else f"{entry.row.peak:g}"
        lines.append([f"{exponent:g}", peak, *_cells(entry)[1:], _shown(apart), by_seed, default])
    return table(["a", "peak", *CELLS[1:], "to a = 0", "by seed", "default"], lines)


def _cells(entry: Entry) -> list[str]:
    row = entry.row
    if row is None:
        return ["–", "not run yet", "0", "–", "–"]
    if row.loss is None:
        return [f"{row.steps:,}", "diverged", "0", "–", "–"]
    loss = with_interval(row.loss.mean, row.loss.interval, 4) + ("" if entry.ended else r"\*")
    seeds = "one, preliminary" if row.loss.n == 1 else str(row.loss.n)
    return [f"{row.steps:,}", loss, seeds, _shown(row.to_full), _shown(row.to_reduced)]


def _sizes(entry: Entry, model: Mapping[str, Any]) -> str:
    """Return the sizes of the stages on each axis; for the MLP, its width."""
    method, parts = entry.method, entry.method.get("parts")
    sizes = {"layers": method.get("schedule"), "heads": method.get("heads"), "MLP": parts and _width(parts, model)}
    return ", ".join(f"{axis} {text}" for axis, text in sizes.items() if text) or "all"


def _width(parts: str, model: Mapping[str, Any]) -> str:
    """Return the MLP's width in each stage, from sizes that count parts or dimensions."""
    sizes = [int(size) for size in parts.split("-")]
    return "-".join(str(size * model["mlp"] // sizes[-1]) for size in sizes)


def _shown(value: Mean | None) -> str:
    return "–" if value is None else with_interval(value.mean, value.interval, sign=True)


def picture(records: Records) -> Figure | None:
    """Draw each entry's loss less that of full training with the same FLOPs: a column per model, a panel per budget."""
    sizes = [size for size in SIZES if _model(size, records)]
    panels = [[_drawn(kinds, size, records) for size in sizes] for kinds in PANELS]
    panels = [row for row in panels if any(entries for _, entries in row)]
    if not panels:
        return None
    heights = [max(len(entries) for _, entries in row) + 0.9 for row in panels]
    figure = Figure(figsize=(2.2 + 5.8 * len(sizes), 1.9 + 0.31 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), len(sizes), squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})
    for row, own in zip(grid, panels, strict=True):
        for axes, (name, entries) in zip(row, own, strict=True):
            if entries:
                _panel(axes, entries)
                model = next(model for size in SIZES if name.endswith(f"-{size}") and (model := _model(size, records)))
                title = f"{_named(model)}, {_given(name)['flops']:.2f} of the FLOPs"
                axes.set_title(title, fontsize=10, color=INK, loc="left")
            else:
                axes.remove()
    for axes in grid[-1]:
        axes.set_xlabel("held-out loss, less that of full training with the same FLOPs (lower is better)", color=INK)
    handles = [Line2D([], [], color=colour, marker=marker) for colour, marker in LOOKS.values()]
    handles += [Line2D([], [], color=INK, linestyle="--"), Line2D([], [], color=GREY)]
    handles += [Line2D([], [], color=GREY, marker="o", fillstyle="none", linestyle="none")]
    handles += [Line2D([], [], color=GREY, marker="$*$", linestyle="none")]
    names = ["RaPTr", "MSG, growth", "full training, all FLOPs", "full training, same FLOPs"]
    legend_below(figure, handles, [*names, "one seed: preliminary", "learning rate still searched"], 3)
    return figure


def _drawn(kinds: Sequence[str], size: str, records: Records) -> tuple[str, list[Entry]]:
    """Return the comparison whose budget a panel has, and its entries that were run, the best first."""
    best: dict[str, tuple[float, Entry]] = {}
    for kind in kinds:
        for label, entry in _entries(f"{kind}-{size}", records).items():
            if value := entry.to_reduced:
                best.setdefault(label, (value.mean, entry))
    ordered = [entry for _, entry in sorted(best.values(), key=lambda pair: pair[0])]
    return f"{kinds[-1]}-{size}", ordered if len(ordered) > 1 else []  # at least one method besides full training


def _panel(axes: Axes, entries: Sequence[Entry]) -> None:
    """Draw a point with its 95% interval for each entry, and full training of all FLOPs as a line across them."""
    clean(axes)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color="#E6E6E6", linewidth=0.7)
    axes.axvline(0, color=GREY, linewidth=1.2, zorder=1)
    shown = [entry for entry in entries if entry.label != FULL]
    for entry in entries:
        value, (colour, marker) = entry.to_reduced, LOOKS.get(entry.method["name"], (INK, ""))
        assert value
        if entry.label == FULL:
            axes.axvline(value.mean, color=INK, linestyle="--", linewidth=1.2, zorder=1, gid=FULL)
            axes.axvspan(value.mean - (value.interval or 0), value.mean + (value.interval or 0), color=INK, alpha=0.08)
            continue
        axes.errorbar(
            value.mean,
            shown.index(entry),
            xerr=value.interval,
            color=colour,
            marker=marker,
            markersize=7,
            capsize=3,
            fillstyle="full" if value.n > 1 else "none",
            gid=entry.label,
        )
    names = [f"{entry.label}{'' if entry.ended else ' *'}" for entry in shown]
    axes.set_yticks(range(len(shown)), names, parse_math=False)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.margins(x=0.04)


PAGE = Page(
    "results/axes",
    {name: str(FILES[name].record) for name in WANTED},
    {"answer": _by_size(answer), "paper": _by_size(paper), "joint": _by_size(joint), "scale": _by_size(scale)},
    {"axes.png": picture},
)
