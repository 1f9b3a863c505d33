"""The tables of polynomial.md."""

from typing import Any

from matplotlib.figure import Figure

from docs.results.pages.contract import Page, Records, fixed, rate, short, table, with_deviation
from raptr.studies.polynomial import POLYNOMIAL
from raptr.studies.polynomial_length import POLYNOMIAL_LENGTH

NAMES = {
    "full": "full",
    "raptr": "raptr, square root",
    "raptr-none": "raptr, none",
    "pld": "pld, θ̄ = 0.6",
    "pld-matched": "pld, average 0.8",
    "layer-dropout": "layer-dropout",
}


def small(records: Records) -> str:
    """The small setting: losses and errors of three degrees."""
    rows = []
    for name, one in records["small"]["methods"].items():
        errors = [short(one["error"][degree][0]) for degree in (0, 2, 4)]
        cells = [NAMES[name], fixed(one["relative_flops"], 3), rate(one["rate"]), with_deviation(one["loss"])]
        rows.append([*cells, *errors])
    head = ["method", "relative FLOPs", "learning rate", "evaluation loss", "error, degree 1", "3", "5"]
    return table(head, rows)


def small_lengths(records: Records) -> str:
    """The small setting at several lengths."""
    return _lengths(records["small lengths"])


def lengths(records: Records) -> str:
    """The full setting at several lengths."""
    if records["lengths"] is None:
        return "Not run yet."
    return f"{_lengths(records['lengths'])}\n\n![final loss by length, and the longest runs](polynomial-length.png)"


def _lengths(result: dict[str, Any]) -> str:
    rows = []
    for entry in result["lengths"]:
        losses = [_loss_and_rate(one) for one in entry["methods"].values()]
        full, raptr, pld = (one["loss"][0] for one in entry["methods"].values())
        ratios = ["" if None in (full, other) else short(other / full) for other in (raptr, pld)]
        rows.append([f"{entry['steps']:,}", *losses, *ratios])
    names = [NAMES[name] for name in result["lengths"][0]["methods"]]
    return table(["steps", *names, "raptr / full", "pld / full"], rows)


def _loss_and_rate(one: dict[str, Any]) -> str:
    return f"{with_deviation(one['loss'])} at {rate(one['rate'])}"


def searched(records: Records) -> str:
    """Every learning rate of the small setting's lengths."""
    rows = []
    for entry in records["small lengths"]["lengths"]:
        for name, one in entry["methods"].items():
            cells = {r: "diverged" if loss is None else short(loss) for r, loss in one["search"].items()}
            best = rate(one["rate"])
            shown = [f"**{text}**" if rate(float(r)) == best else text for r, text in cells.items()]
            rows.append([f"{entry['steps']:,}", NAMES[name], *shown])
    tried = records["small lengths"]["lengths"][0]["methods"]["full"]["search"]
    return table(["steps", "method", *(rate(float(text)) for text in tried)], rows)


def _drawn(records: Records, name: str) -> Figure | None:
    return None if records[name] is None else POLYNOMIAL_LENGTH.plot(records[name])


PAGE = Page(
    name="results/polynomial",
    records={
        "small": "docs/results/polynomial-small.json",
        "small lengths": "docs/results/polynomial-length-small.json",
        "lengths": "docs/results/polynomial-length.json",
    },
    tables={"small": small, "small-lengths": small_lengths, "small-search": searched, "lengths": lengths},
    figures={
        "polynomial-small.png": lambda records: POLYNOMIAL.plot(records["small"]),
        "polynomial-length-small.png": lambda records: _drawn(records, "small lengths"),
        "polynomial-length.png": lambda records: _drawn(records, "lengths"),
    },
)
