"""The tables of polynomial.md."""

from typing import Any

from docs.results.pages.contract import Page, Records, fixed, rate, short, table, with_deviation
from raptr.studies.contract import mean_and_deviation
from raptr.studies.polynomial import POLYNOMIAL
from raptr.studies.polynomial_length import POLYNOMIAL_LENGTH
from raptr.studies.polynomial_plot import degree_groups

NAMES = {
    "full": "full",
    "raptr": "raptr, square root",
    "raptr-none": "raptr, none",
    "pld": "pld, θ̄ = 0.6",
    "pld-matched": "pld, average 0.8",
    "layer-dropout": "layer-dropout",
}


def small(records: Records) -> str:
    """Tabulate the small setting: losses, and errors of three degrees."""
    rows = []
    for name, one in records["small"]["methods"].items():
        errors = [short(one["error"][degree][0]) for degree in (0, 2, 4)]
        cells = [NAMES[name], fixed(one["relative_flops"], 3), rate(one["rate"]), with_deviation(one["loss"])]
        rows.append([*cells, *errors])
    head = ["method", "relative FLOPs", "learning rate", "evaluation loss", "error, degree 1", "3", "5"]
    return table(head, rows)


def small_lengths(records: Records) -> str:
    """Tabulate the small setting at several lengths."""
    return _lengths(records["small lengths"])


def lengths(records: Records) -> str:
    """Tabulate the full setting at several lengths."""
    return _lengths(records["lengths"])


def _lengths(result: dict[str, Any]) -> str:
    rows = []
    for entry in result["lengths"]:
        losses = [_loss_and_rate(numbers) for numbers in entry["methods"].values()]
        full, raptr, pld = (numbers["loss"][0] for numbers in entry["methods"].values())
        ratios = ["" if None in (full, other) else short(other / full) for other in (raptr, pld)]
        rows.append([f"{entry['steps']:,}", *losses, *ratios])
    names = [NAMES[name] for name in result["lengths"][0]["methods"]]
    return table(["steps", *names, "raptr / full", "pld / full"], rows)


def _loss_and_rate(one: dict[str, Any]) -> str:
    return f"{with_deviation(one['loss'])} at {rate(one['rate'])}"


def small_search(records: Records) -> str:
    """Tabulate every learning rate of the small setting's lengths."""
    return _searched(records["small lengths"])


def search(records: Records) -> str:
    """Tabulate every learning rate of the full setting's lengths."""
    return _searched(records["lengths"])


def _searched(result: dict[str, Any]) -> str:
    rows = []
    each = [(entry["steps"], name, one) for entry in result["lengths"] for name, one in entry["methods"].items()]
    tried = sorted({float(text) for _, _, one in each for text in one["search"]})
    for steps, name, one in each:
        losses = {float(text): "diverged" if loss is None else short(loss) for text, loss in one["search"].items()}
        losses[one["rate"]] = f"**{losses[one['rate']]}**"
        rows.append([f"{steps:,}", NAMES[name], *(losses.get(value, "not run") for value in tried)])
    return table(["steps", "method", *map(rate, tried)], rows)


def errors(records: Records) -> str:
    """Tabulate the full setting's errors of low, middle and high degrees.

    The last column has the errors of high degrees when RaPTr's last stage begins.
    """
    result = records["lengths"]
    groups = degree_groups(result["setting"]["degrees"])
    names = [f"{group[0] + 1}–{group[-1] + 1}" for group in groups]
    rows = []
    for entry in result["lengths"]:
        last = entry["methods"]["raptr"]["transitions"][-1]
        for name, one in entry["methods"].items():
            begins = one["runs"][0]["steps"].index(last)
            cells = [with_deviation(_error(one, group, -1), 2) for group in groups]
            early = with_deviation(_error(one, groups[-1], begins), 2)
            rows.append([f"{entry['steps']:,}", NAMES[name], *cells, early])
    first, *others = names
    head = ["steps", "method", f"error, degrees {first}", *others, f"{names[-1]} when RaPTr's last stage begins"]
    return table(head, rows)


def _error(one: dict[str, Any], group: list[int], evaluation: int) -> tuple[float, float]:
    """Return mean and deviation over seeds of the mean error of some degrees."""
    each = [[run["error"][evaluation][degree] for degree in group] for run in one["runs"]]
    return mean_and_deviation(sum(values) / len(values) for values in each)


PAGE = Page(
    name="results/polynomial",
    records={
        "small": "docs/results/polynomial-small.json",
        "small lengths": "docs/results/polynomial-length-small.json",
        "lengths": "docs/results/polynomial-length.json",
    },
    tables={
        "small": small,
        "small-lengths": small_lengths,
        "small-search": small_search,
        "lengths": lengths,
        "search": search,
        "errors": errors,
    },
    figures={
        "polynomial-small.png": lambda records: POLYNOMIAL.plot(records["small"]),
        "polynomial-length-small.png": lambda records: POLYNOMIAL_LENGTH.plot(records["small lengths"]),
        "polynomial-length.png": lambda records: POLYNOMIAL_LENGTH.plot(records["lengths"]),
    },
)
