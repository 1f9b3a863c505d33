"""The tables and figures of long.md, compare.md, choices.md and the methods' cards, all from comparisons' records."""

from collections.abc import Callable, Mapping
from typing import Any

from docs.results.pages.contract import Page, Records, table, with_interval
from raptr.comparison.outcomes import Outcome
from raptr.comparison.record import read_outcomes, read_rows
from raptr.comparison.results import picture
from raptr.comparison.table import difference, finals, markdown
from raptr.report.statistics import Mean, mean

SHORT = {"compare": "docs/results/compare.json", "dropping": "docs/results/evidence/short-dropping.json"}
LATER = {
    "progressive": "docs/results/evidence/progressive-12x256.json",
    "same steps": "docs/results/evidence/same-steps-12x256.json",
}
LONG = {"long": "docs/results/long.json"} | LATER
TOKENS_PER_WEIGHT = {"compare": "3.5", "dropping": "3.5", "long": "20"}
SQRT, CHOICES = (
    "raptr",
    {  # what is compared with the first of each group
        "idle `skip`: layers that do not run stay untouched": ("raptr", "**yes**"),
        "idle `zero`: they get zero gradients, as in the paper": ("raptr, idle zero", "paper's recipes"),
        "scaling `none`": ("raptr, scaling none", "**yes**"),
        "scaling `sqrt`, the paper's": ("raptr", "paper's recipes"),
        "scaling `linear`": ("raptr, scaling linear", "no"),
        "bfloat16 between layers": ("raptr", "**yes**"),
        "float32 between layers (`mixed`)": ("raptr, float32 between layers", "no"),
    },
)


def joined(records: Records) -> Mapping[str, Any]:
    """Return the record of the long runs with the runs of progressive stacking, on the same text and terms."""
    long: Mapping[str, Any] = records["long"]
    for later in (records[name] for name in LATER):
        assert (later["data"]["fingerprint"], later["full_flops"]) == (long["data"]["fingerprint"], long["full_flops"])
        added = {label: config for label, config in later["configs"].items() if label not in long["configs"]}
        runs = [run for run in later["runs"] if run["label"] in added]
        long = {**long, "configs": long["configs"] | added, "runs": long["runs"] + runs}
    return long


def best(name: str) -> Callable[[Records], str]:
    """Return a function that tabulates each entry of a comparison at its best learning rate."""
    return lambda records: markdown(finals(read_rows(_record(records, name)))).rstrip()


def every(name: str) -> Callable[[Records], str]:
    """Return a function that tabulates every entry of a comparison at every learning rate."""
    return lambda records: markdown(read_rows(_record(records, name))).rstrip()


def choices(records: Records) -> str:
    """Compare each choice with RaPTr with square-root scaling, paired by seed."""
    outcomes, rows = read_outcomes(records["compare"]), []
    for choice, (label, default) in CHOICES.items():
        runs, reference = _at(outcomes, label, 1e-3), _at(outcomes, SQRT, 1e-3)
        losses = mean(run.loss for run in runs if run.loss is not None)
        seeds = [difference([run], reference) for run in runs]
        by_seed = ", ".join(with_interval(change.mean, None, sign=True) for change in seeds if change)
        to = ["–", ""] if label == SQRT else [_shown(difference(runs, reference), 3, sign=True), by_seed]
        rows.append([choice, _shown(losses), *to, default])
    return table(["choice", "held-out loss", "difference", "by seed", "default"], rows)


def scaling(records: Records) -> str:
    """Compare the two scalings at both lengths."""
    rows = []
    for length, record, none, sqrt, peak in (
        ("3.5", records["compare"], "raptr, scaling none", "raptr", 1e-3),
        ("20", records["long"], "raptr, none", "raptr, sqrt", 2e-3),
    ):
        runs = read_outcomes(record)
        pair = [_at(runs, label, peak) for label in (none, sqrt)]
        means = [_shown(mean(run.loss for run in outcomes if run.loss is not None)) for outcomes in pair]
        rows.append([length, *means, _shown(difference(*pair), 3, sign=True)])
    return table(["tokens per weight", "none", "square root", "difference"], rows)


def peaks(records: Records) -> str:
    """Tabulate the losses of the three entries that have a grid, by learning rate."""
    outcomes, rows = read_outcomes(records["compare"]), []
    shown = {"full": "full, 4,000 steps", "full (reduced)": "full, 3,000 steps", "raptr": "RaPTr"}
    for label, name in shown.items():
        cells = [_shown(mean(r.loss for r in _at(outcomes, label, peak) if r.loss)) for peak in (5e-4, 1e-3, 2e-3)]
        rows.append([name, *cells])
    return table(["peak learning rate", "5e-4", "1e-3", "2e-3"], rows)


def measured(*labels: str) -> Callable[[Records], str]:
    """Return a function that makes the table of a method's card; an entry is `what is shown = record:label`."""

    def made(records: Records) -> str:
        rows = []
        for entry in labels:
            shown, _, place = entry.rpartition(" = ")
            name, label = place.split(":")
            row = {row.label: row for row in finals(read_rows(_record(records, name)))}[label]
            cells = [_shown(value, 3, sign=True) if value else "–" for value in (row.to_full, row.to_reduced)]
            rows.append([shown, TOKENS_PER_WEIGHT[name], f"{row.peak:g}", _shown(row.loss, 3), *cells])
        return table(["", "tokens per weight", "peak", "held-out loss", "to full", "to full, reduced"], rows)

    return made


def _record(records: Records, name: str) -> Mapping[str, Any]:
    return joined(records) if name == "long" else records[name]


def _at(outcomes: list[Outcome], label: str, peak: float) -> list[Outcome]:
    return [run for run in outcomes if (run.label, run.peak) == (label, peak)]


def _shown(value: Mean | None, digits: int = 4, *, sign: bool = False) -> str:
    assert value is not None
    return with_interval(value.mean, value.interval, digits, sign=sign)


def _figure(name: str) -> Callable[[Records], Any]:
    return lambda records: picture(_record(records, name))


RAPTR = "[raptr](raptr.md) 6-8-10-12"
STACKING = "[stacking](stacking.md) 6-8-10-12"
GROWN = "[progressive-stacking](progressive-stacking.md) 3-6-12, equal stages"
PROGRESSIVE = "progressive stacking, 33-33-33%"  # as the record calls it
SAME_STEPS = "progressive stacking, 20-20-60%"
DROPPED = f"{RAPTR}, unscaled = dropping:raptr, none"
CARDS = {
    "full": ["`full` = compare:full", "reduced = compare:full (reduced)", "`full` = long:full"]
    + ["reduced = long:full (reduced)"],
    "raptr": ["`raptr` 6-8-10-12, the default = long:raptr, none", "`scaling=sqrt`, the paper's = long:raptr, sqrt"]
    + [f"{GROWN} = long:{PROGRESSIVE}"]
    + [f"{STACKING} = long:stacking", "`raptr` 6-8-10-12, the default = compare:raptr, scaling none"]
    + ["`scaling=sqrt`, the paper's = compare:raptr", "`scaling=linear` = compare:raptr, scaling linear"]
    + ["`scaling=sqrt`, `optimizer.idle=zero` = compare:raptr, idle zero"]
    + ["3-6-12, `scaling=sqrt` = compare:raptr, 3-6-12", f"{STACKING} = compare:stacking"],
    "stacking": ["`stacking` 6-8-10-12 = long:stacking"]
    + [f"{GROWN} = long:{PROGRESSIVE}", f"{RAPTR}, unscaled = long:raptr, none"]
    + ["`stacking` 6-8-10-12 = compare:stacking", f"{RAPTR}, unscaled = compare:raptr, scaling none"],
    "progressive-stacking": [
        f"3-6-12, 20-20-60%: the same steps = long:{SAME_STEPS}",
        f"3-6-12, equal stages: 1.27 times the steps = long:{PROGRESSIVE}",
        f"{STACKING} = long:stacking",
    ]
    + [f"{RAPTR}, unscaled = long:raptr, none", "3-6-12, equal stages = compare:progressive-stacking"]
    + ["[raptr](raptr.md) 3-6-12, `scaling=sqrt` = compare:raptr, 3-6-12"],
    "lemon": ["`lemon` 6-8-10-12, `init=copy` = compare:lemon, copy", "`init=zero` = compare:lemon, zero"]
    + [f"{STACKING} = compare:stacking"],
    "msg": ["`msg` 6-8-10-12 = compare:msg", f"{STACKING} = compare:stacking"],
    "msg-interpolation": ["`msg-interpolation` 6-8-10-12 = compare:msg-interpolation"]
    + ["[lemon](lemon.md) 6-8-10-12, `init=copy` = compare:lemon, copy"],
    "pld": ["`pld`, θ̄ = 0.5 = compare:pld", "`average=0.75` = compare:pld, matched"]
    + [f"{RAPTR}, unscaled = compare:raptr, scaling none"],
    "stochastic-depth": ["`stochastic-depth`, keep 0.5 = dropping:stochastic-depth", DROPPED],
    "layerdrop": ["`layerdrop`, keep 0.8 = dropping:layerdrop", DROPPED],
    "layer-dropout": ["`layer-dropout`, drop 0.5 = dropping:layer-dropout", DROPPED],
}

PAGES = (
    *(Page(f"methods/{card}", SHORT | LONG, {"measured": measured(*labels)}) for card, labels in CARDS.items()),
    Page("results/long", LONG, {"best": best("long"), "every": every("long")}, {"long.png": _figure("long")}),
    Page(
        "results/compare",
        SHORT,
        {"best": best("compare"), "every": every("compare"), "dropping": best("dropping")},
        {"compare.png": _figure("compare")},
    ),
    Page("results/choices", SHORT | LONG, {"choices": choices, "scaling": scaling, "peaks": peaks}),
)
