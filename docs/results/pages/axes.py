"""The page about the axes beside depth: heads, the MLP's width, and several at once.

A table or a panel has every entry of its comparison's file, so that the page says by itself what was not run yet.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from docs.results.pages.contract import Page, Records, table, with_interval
from evidence.measured import ITEMS, ROOT
from evidence.queue import LEAST
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
MLP_BUDGET = "axes-75"  # the joint variants with the budget of those of the MLP alone
WANTED = [f"{kind}-{size}" for size in SIZES for kind in ("heads", "mlp", *JOINT, "scale")]
FILES = {item.name: item for item in ITEMS if item.name in WANTED}
DEPTH, MLP = "depth", "raptr, mlp"  # as the records call RaPTr on one axis
AXES = {"heads": "heads", "mlp": "the MLP's width"}
METHODS = {"msg": "MSG", "raptr": "RaPTr"}
# Held-out losses of BERT-Base after 300,000 steps, from the paper's tables.
PAPER = {("heads", "msg"): 2.07, ("heads", "raptr"): 1.84, ("mlp", "msg"): 1.88, ("mlp", "raptr"): 1.84}
PAPER_DEPTH = 1.83
LOOKS = {"raptr": (COLOURS[2], "o"), "msg": (COLOURS[4], "s")}


@dataclass(frozen=True)
class Entry:
    """An entry of a comparison, and what its runs at the best learning rate came to; `row` is None without any."""

    label: str
    method: Mapping[str, Any]  # as in the comparison's file
    row: Row | None = None
    runs: tuple[Outcome, ...] = ()
    ended: bool = False  # the search for its learning rate

    @property
    def to_reduced(self) -> Mean | None:
        return self.row.to_reduced if self.row else None

    @property
    def joint(self) -> bool:
        """Whether it is smaller on several axes."""
        return sum(axis in self.method for axis in ("schedule", "heads", "parts")) > 1

    @property
    def skips(self) -> bool:
        """Whether it leaves alone what is idle: RaPTr's default on depth only."""
        default = "zero" if {"heads", "parts"} & self.method.keys() else "skip"
        return self.method["name"] == "raptr" and bool(self.method.get("optimizer", {}).get("idle", default) == "skip")


def _entries(name: str, records: Records) -> dict[str, Entry]:
    """The entries of a comparison's file, and reduced full training, with their runs."""
    methods: dict[str, Any] = {FULL: {"name": FULL}, REDUCED: {"name": FULL}} | _given(name)["entries"]
    record = records[name]
    if record is None:
        return {label: Entry(label, method) for label, method in methods.items()}
    rows, outcomes = read_rows(record), read_outcomes(record)
    best, rates = {row.label: row for row in finals(rows)}, Counter(row.label for row in rows)
    found = {}
    for label, method in methods.items():
        row = best.get(label)
        if row is None:
            found[label] = Entry(label, method)
        else:
            ended = row.best and not row.edge and rates[label] >= LEAST
            found[label] = Entry(label, method, row, tuple(runs_at(outcomes, label, row.peak)), ended)
    return found


@cache
def _given(name: str) -> dict[str, Any]:
    return read_file(ROOT / FILES[name].file)


def _run(size: str, records: Records) -> list[Mapping[str, Any]]:
    """The records of a model's size that are there, with full training in them."""
    own = [record for name, record in records.items() if name.endswith(f"-{size}")]
    return [record for record in own if record is not None and FULL in record["configs"]]


def _model(size: str, records: Records) -> Mapping[str, Any]:
    (record, *_) = _run(size, records)
    model: Mapping[str, Any] = record["configs"][FULL]["model"]
    return model


def _by_size(made: Callable[[str, Records], str], *, named: bool = True) -> Callable[[Records], str]:
    """What is said or shown of each model that was run; `named`: under its name, where there are several."""

    def every(records: Records) -> str:
        there = [size for size in SIZES if _run(size, records)]
        heads = [f"**{_named(_model(size, records))}**\n\n" if named and len(there) > 1 else "" for size in there]
        shown = [head + made(size, records) for head, size in zip(heads, there, strict=True)]
        return "\n\n".join(shown) or "**Not run yet.**"

    return every


def _named(model: Mapping[str, Any]) -> str:
    return f"{model['layers']} layers of width {model['width']}"


def answer(size: str, records: Records) -> str:
    """The outcome: RaPTr on one axis, MSG's growth beside it, and several axes."""
    said = [_one_axis(size, records), _growth(size, records), *(_several(kind, size, records) for kind in JOINT)]
    length = f"{_full(size, records)['tokens_per_weight']:.2g} tokens per weight"
    head = f"At {_named(_model(size, records))} and {length}:"
    return "\n".join([head, "", *(f"- {sentence}" for sentence in said if sentence)])


def _one_axis(size: str, records: Records) -> str:
    """Which single axis is the cheapest to leave out."""
    mlp, heads, some, less = (_entries(f"{kind}-{size}", records) for kind in ("mlp", "heads", *JOINT))
    single = {"the MLP's width": mlp[MLP], "depth": mlp[DEPTH], "heads": heads["raptr, heads"]}
    known = {axis: (entry, value) for axis, entry in single.items() if (value := entry.to_reduced)}
    if len(known) < 2:
        return ""
    ordered = sorted(known.items(), key=lambda item: item[1][1].mean)
    (least, _), *_, (most, _) = ordered
    sure = all(_settled(entry) for entry, _ in known.values())
    ends = [f"{_apart(value)} on {axis}{_caveat(entry)}" for axis, (entry, value) in ordered]
    said = f"**{'' if sure else 'So far '}RaPTr loses least on {least} and most on {most}.** "
    said += f"Compared with full training with the same FLOPs it ended {_listed(ends)}."
    others = [("where idle layers are left alone, the default,", entry) for entry in some.values() if entry.skips]
    others.append((f"with {less[DEPTH].method['schedule']} at {_flops(less[DEPTH], 2)} of the FLOPs", less[DEPTH]))
    ends = [f"{_apart(entry.to_reduced)} {how}{_caveat(entry)}" for how, entry in others if entry.to_reduced]
    return said + (f" On depth it also ended {_listed(ends)}." if ends else "")


def _growth(size: str, records: Records) -> str:
    """How MSG ended that grows the same axes: beside RaPTr, and beside full training."""
    pairs = {name: _pair(axis, size, records) for axis, name in AXES.items()}
    apart = {name: value for name, (msg, raptr) in pairs.items() if (value := difference(msg.runs, raptr.runs))}
    if not apart:
        return ""
    sides = {"below": [name for name in apart if apart[name].mean < 0]}
    sides["above"] = [name for name in apart if name not in sides["below"]]
    head = ", ".join(f"{side} RaPTr on {_listed(names)}" for side, names in sides.items() if names)
    sure = all(_settled(entry) for name in apart for entry in pairs[name])
    said = f"**{'' if sure else 'So far '}MSG, which grows the same axis, ended {head}.** "
    by = [f"{_apart(value)} on {name}{_either(*pairs[name])}" for name, value in apart.items()]
    ends = [
        f"{_apart(msg.row.to_full)} on {name}{_caveat(msg)}"
        for name, (msg, _) in pairs.items()
        if msg.row and msg.row.to_full
    ]
    return f"{said}It is {_listed(by)}. Compared with full training of all FLOPs it ended {_listed(ends)}."


def _several(kind: str, size: str, records: Records) -> str:
    """Which joint variant of a budget is the cheapest, and which ended above depth alone."""
    entries = _entries(f"{kind}-{size}", records)
    known = {entry.label: value for entry in entries.values() if entry.joint and (value := entry.to_reduced)}
    if not known:
        return ""
    first = min(known, key=lambda label: known[label].mean)
    apart = {label: difference(entries[label].runs, entries[DEPTH].runs) for label in known}
    above = [label for label, value in apart.items() if value and value.mean > 0 and label != first]
    so_far = "" if all(_settled(entries[label]) for label in known) else "so far "
    ends, beside = [f"{_apart(known[first])} full training with as few"], apart[first]
    ends += [f"{_apart(beside)} depth alone"] if beside else []
    budget = f"{_given(f'{kind}-{size}')['flops']:.2f} of the FLOPs"
    said = f"**Of several axes at {budget}, `{first}` is {so_far}the cheapest**: "
    said += f"it ended {_listed(ends)}{_caveat(entries[first])}."
    mlp = _entries(f"mlp-{size}", records)[MLP]
    if kind == MLP_BUDGET and mlp.to_reduced:
        lower = "lower" if mlp.to_reduced.mean < known[first].mean else "higher"
        said += f" RaPTr on the MLP's width alone ended {lower}."
    return said + (f" {_listed(f'`{label}`' for label in above)} {so_far}ended above depth alone." if above else "")


def paper(size: str, records: Records) -> str:
    """The paper's two comparisons, with its losses."""
    model, shown = _model(size, records), list[tuple[str, Entry, float]]()
    for axis, name in AXES.items():
        others = [entry for entry in _entries(f"{axis}-{size}", records).values() if entry.skips]
        shown += [(name, entry, PAPER[axis, entry.method["name"]]) for entry in (*_pair(axis, size, records), *others)]
    shown.append((DEPTH, _entries(f"mlp-{size}", records)[DEPTH], PAPER_DEPTH))
    lines = []
    for name, entry, loss in shown:
        method, theirs = METHODS[entry.method["name"]], f"{loss}"
        if entry.skips:
            method, theirs = f"{method}, idle ones left alone", "–"
        lines.append([name, _sizes(entry, model), method, _flops(entry), *_cells(entry), theirs])
    return table(["axis", "sizes", "method", "FLOPs", *CELLS, "the paper's loss"], lines)


def order(size: str, records: Records) -> str:
    """Whether RaPTr is ahead of MSG, as it is in the paper."""
    said = []
    for axis, name in AXES.items():
        msg, raptr = _pair(axis, size, records)
        theirs = PAPER[axis, "raptr"] - PAPER[axis, "msg"]
        found = difference(raptr.runs, msg.runs)
        head = f"- **{name[0].upper()}{name[1:]}**: in the paper RaPTr ends {abs(theirs):.2f} below MSG."
        if found is None:
            said.append(f"{head} Here the two were not both run yet.")
            continue
        verdict = "the paper's order appears" if found.mean < 0 else "the paper's order does not appear"
        if found.interval is not None and abs(found.mean) <= found.interval:
            verdict = "neither is ahead"
        sure = _settled(msg) and _settled(raptr)
        caveat = _either(msg, raptr) or f" ({found.n} seeds)"
        said.append(f"{head} Here it ends {_apart(found)} MSG{caveat}: {verdict}{'' if sure else ' so far'}.")
    return "\n".join(said)


def joint(size: str, records: Records) -> str:
    """Several axes at once beside depth alone, for each budget."""
    model, shown = _model(size, records), []
    for kind, share in JOINT.items():
        name = f"{kind}-{size}"
        entries = _entries(name, records)
        if kind == MLP_BUDGET:
            entries |= {MLP: _entries(f"mlp-{size}", records)[MLP]}
        depth, lines = entries[DEPTH], []
        for entry in entries.values():
            apart = None if entry is depth or entry.label == FULL else difference(entry.runs, depth.runs)
            lines.append([_label(entry), _sizes(entry, model), *_cells(entry), _shown(apart)])
        caption = f"{_given(name)['flops']:.3f} of the FLOPs, {share} of the layers' ([{name}](evidence.md#{name})):"
        shown.append(f"{caption}\n\n{table(['entry', 'sizes', *CELLS, 'to depth'], lines)}")
    return "\n\n".join(shown)


def scale(size: str, records: Records) -> str:
    """The exponents of the scale, beside no scale, paired by seed."""
    entries = _entries(f"scale-{size}", records)
    own = {entry.method["width_exponent"]: entry for entry in entries.values() if "width_exponent" in entry.method}
    none, lines = own[0.0], []
    for exponent, entry in own.items():
        apart = None if entry is none else difference(entry.runs, none.runs)
        seeds = [] if apart is None else [difference([run], none.runs) for run in entry.runs]
        by_seed = ", ".join(with_interval(one.mean, None, sign=True) for one in seeds if one)
        default = "**yes**" if exponent == RaPTr.width_exponent else "no"
        peak = "–" if entry.row is None else f"{entry.row.peak:g}"
        lines.append([f"{exponent:g}", peak, *_cells(entry)[1:], _shown(apart), by_seed, default])
    return table(["a", "peak", *CELLS[1:], "to a = 0", "by seed", "default"], lines)


def missing(records: Records) -> str:
    """What the comparisons' files ask for and the records do not have."""
    never = [_link(name) for name in WANTED if records[name] is None]
    whole, said = [], []
    for name in WANTED:
        if records[name] is None:
            continue
        entries = _entries(name, records).values()
        parts = {
            "not run": [entry for entry in entries if entry.row is None],
            "learning rate still searched": [entry for entry in entries if entry.row and not entry.ended],
            "fewer seeds than planned": [entry for entry in entries if _few(entry, len(_given(name)["seeds"]))],
        }
        left = [f"{what}: {', '.join(entry.label for entry in some)}" for what, some in parts.items() if some]
        finished, planned = records[name]["finished"], records[name]["planned"]
        runs = "" if finished == planned else f", {finished} of the {planned} runs that are planned so far"
        if left:
            said.append(f"- {_link(name)}{runs}: {'; '.join(left)}.")
        else:
            whole.append(f"{_link(name)}{runs}")
    said += [f"- Complete: {_listed(whole)}."] if whole else []
    said += [f"- Not run yet: {_listed(never)}."] if never else []
    return "\n".join(said)


def _few(entry: Entry, seeds: int) -> bool:
    """Whether it has runs, of fewer seeds than its comparison asks for."""
    return entry.row is not None and (entry.row.loss is None or entry.row.loss.n < seeds)


def terms(size: str, records: Records) -> str:
    """What was trained, on what, and with which versions."""
    run = _full(size, records)
    weights, batch = run["tokens"] / run["tokens_per_weight"], run["tokens"] // run["steps"]
    places = dict.fromkeys(_where(one) for record in _run(size, records) for one in record["environments"])
    return (
        f"A BERT with {_named(_model(size, records))}, {weights / 1e6:.1f} million weights in its layers. Full "
        f"training makes {run['steps']:,} steps of {batch:,} tokens: {run['tokens'] / 1e6:.0f} million, "
        f"{run['tokens_per_weight']:.3g} per weight of the layers, {run['epochs']:.2g} times through the text. "
        f"{'; '.join(places)}."
    )


def _full(size: str, records: Records) -> Mapping[str, Any]:
    """A run of full training."""
    return next(run for record in _run(size, records) for run in record["runs"] if run["label"] == FULL)


def _where(environment: Mapping[str, Any]) -> str:
    named = ("python", "Python"), ("torch", "torch"), ("commit", "commit")
    versions = [f"{name} {environment[key]}" for key, name in named if environment[key]]
    machine = environment["gpu"] or environment["processor"]
    return ", ".join([machine, f"{environment['cores']} cores", *versions])


def commands(_: Records) -> str:
    """The command of each comparison."""
    lines = [f"raptr compare {FILES[name].file} --record {FILES[name].record} --jobs 7" for name in WANTED]
    return "\n".join(["```", *lines, "```"])


def _pair(axis: str, size: str, records: Records) -> tuple[Entry, Entry]:
    """MSG and RaPTr on an axis."""
    entries = _entries(f"{axis}-{size}", records)
    return entries[f"msg, {axis}"], entries[f"raptr, {axis}"]


CELLS = ("steps", "held-out loss", "seeds", "to full", "to reduced")


def _cells(entry: Entry) -> list[str]:
    row = entry.row
    if row is None:
        return ["–", "not run yet", "0", "–", "–"]
    if row.loss is None:
        return [f"{row.steps:,}", "diverged", "0", "–", "–"]
    loss = with_interval(row.loss.mean, row.loss.interval, 4) + _mark(entry)
    seeds = "one, preliminary" if row.loss.n == 1 else str(row.loss.n)
    return [f"{row.steps:,}", loss, seeds, _shown(row.to_full), _shown(row.to_reduced)]


def _flops(entry: Entry, digits: int = 3) -> str:
    return f"{entry.row.flops:.{digits}f}" if entry.row and entry.row.flops else "–"


def _mark(entry: Entry) -> str:
    return "" if entry.row is None or entry.ended else r"\*"


def _sizes(entry: Entry, model: Mapping[str, Any]) -> str:
    """The sizes of the stages on each axis; of the MLP its width."""
    method, parts = entry.method, entry.method.get("parts")
    sizes = {"layers": method.get("schedule"), "heads": method.get("heads"), "MLP": parts and _width(parts, model)}
    return ", ".join(f"{axis} {text}" for axis, text in sizes.items() if text) or "all"


def _width(parts: str, model: Mapping[str, Any]) -> str:
    """The MLP's width in each stage, of sizes that count parts or dimensions."""
    sizes = [int(size) for size in parts.split("-")]
    return "-".join(str(size * model["mlp"] // sizes[-1]) for size in sizes)


def _label(entry: Entry) -> str:
    return f"`{entry.label}`" if entry.label in (FULL, REDUCED) else entry.label


def _link(name: str) -> str:
    return f"[{name}](evidence.md#{name})"


def _shown(value: Mean | None) -> str:
    return "–" if value is None else with_interval(value.mean, value.interval, sign=True)


def _apart(value: Mean) -> str:
    return f"{with_interval(abs(value.mean), value.interval)} {'below' if value.mean < 0 else 'above'}"


def _settled(entry: Entry) -> bool:
    return entry.ended and entry.row is not None and entry.row.loss is not None and entry.row.loss.n > 1


def _caveat(entry: Entry) -> str:
    """What keeps the entry's number from being final, in brackets."""
    one = entry.row is not None and entry.row.loss is not None and entry.row.loss.n == 1
    said = ["one seed, preliminary"] if one else []
    said += [] if entry.ended else ["learning rate still searched"]
    return f" ({'; '.join(said)})" if said else ""


def _either(msg: Entry, raptr: Entry) -> str:
    """What keeps their difference from being final."""
    return _caveat(raptr) or _caveat(msg)


def _listed(words: Iterable[str]) -> str:
    *others, last = list(words)
    return f"{', '.join(others)} and {last}" if others else last


def picture(records: Records) -> Figure | None:
    """Each entry's loss less that of full training with the same FLOPs: a column for each model, a panel a budget."""
    sizes = [size for size in SIZES if _run(size, records)]
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
                axes.set_title(_title(name, records), fontsize=10, color=INK, loc="left")
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
    """The comparison that a panel's budget is of, and its entries that were run, the best first."""
    found: dict[str, tuple[float, Entry]] = {}
    for kind in kinds:
        for label, entry in _entries(f"{kind}-{size}", records).items():
            if value := entry.to_reduced:
                found.setdefault(label, (value.mean, entry))
    ordered = [entry for _, entry in sorted(found.values(), key=lambda pair: pair[0])]
    return f"{kinds[-1]}-{size}", ordered if len(ordered) > 1 else []  # not full training alone


def _panel(axes: Axes, entries: Sequence[Entry]) -> None:
    """A point with its 95% interval for each entry; full training of all FLOPs as a line across them."""
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


def _title(name: str, records: Records) -> str:
    model = next(_model(size, records) for size in SIZES if name.endswith(f"-{size}"))
    return f"{_named(model)}, {_given(name)['flops']:.2f} of the FLOPs"


PAGE = Page(
    "results/axes",
    {name: str(FILES[name].record) for name in WANTED},
    {
        "answer": _by_size(answer, named=False),
        "paper": _by_size(paper),
        "order": _by_size(order),
        "joint": _by_size(joint),
        "scale": _by_size(scale),
        "missing": missing,
        "terms": _by_size(terms, named=False),
        "commands": commands,
    },
    {"axes.png": picture},
)
