"""A study's main results for the terminal: for each quantity its number and what the paper says about it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rich.table import Table


class Finding(NamedTuple):
    """One quantity of a study, its number, and what the paper says about it."""

    quantity: str
    number: str
    paper: str


def findings(result: Mapping[str, Any]) -> list[Finding]:
    """Return the main numbers of a study's result."""
    return FINDINGS[result["study"]](result)


def findings_table(result: Mapping[str, Any]) -> Table:
    """Return the main numbers of a study's result as a table."""
    table = Table(title=f"{result['study']}: results", title_justify="left")
    for column in ("quantity", "number", "the paper says"):
        table.add_column(column)
    for finding in findings(result):
        table.add_row(*finding)
    return table


def _polynomial(result: Mapping[str, Any]) -> list[Finding]:
    return _losses(result["methods"], "")


def _polynomial_length(result: Mapping[str, Any]) -> list[Finding]:
    return [line for entry in result["lengths"] for line in _losses(entry["methods"], f", {entry['steps']:,} steps")]


def _losses(methods: Mapping[str, Any], where: str) -> list[Finding]:
    paper = {
        "full": "",
        "raptr": "as low as full",
        "raptr-none": "not in the paper",
        "pld": "much higher than raptr",
        "pld-matched": "much higher than raptr",
        "layer-dropout": "not in the paper",
    }
    return [
        Finding(f"{name}{where}: evaluation loss", _with_deviation(*numbers["loss"]), paper[name])
        for name, numbers in methods.items()
    ]


def _with_deviation(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return "diverged"
    return f"{mean:.3g} ± {deviation:.2g}" if deviation else f"{mean:.3g}"  # a single seed has no deviation


def _boolean(result: Mapping[str, Any]) -> list[Finding]:
    steps, saddle, least = result["step_slopes"], result["saddle"], result["bound"]["least"]
    return [
        Finding("steps until the loss is η", f"η^−{steps['loss']['slope']:.2f}", "η^−1"),
        Finding("steps until the second layer's output is within η", f"η^−{steps['output']['slope']:.2f}", "η^−1"),
        Finding("steps until w₂,₂ is within η", f"η^−{steps['w22']['slope']:.2f}", "η^−1"),
        Finding("lowest curvature at phase 1's limit", f"{saddle['eigenvalues'][0]:.3f}", "a limit, so not below 0"),
        Finding("irrelevant weights, at most", f"{max(row['irrelevant'] for row in result['dims']):.1g}", "O(η)"),
        Finding("least loss of one layer", f"{least['free']['loss']:.4g}", "Ω(1)"),
    ]


def _linear(result: Mapping[str, Any]) -> list[Finding]:
    width, shared = result["setting"]["widths"][0], result["setting"]["shared"][0]
    lines = []
    for case in result["cases"]:
        if (case["width"], case["shared"], case["architecture"]) == (width, shared, "residual + norm"):
            lemma = {0: "−0.4; lemma −½", 1: "−0.4; lemma −1"}.get(case["tau"], "−0.4")
            lines.append(Finding(f"exponent of the gap, τ = {case['tau']:g}", _number(case["gap_exponent"]), lemma))
    return lines


def _scaling(result: Mapping[str, Any]) -> list[Finding]:
    setting, models = result["setting"], result["models"]
    widest = [stack for stack in result["theorem"] if stack["width"] == setting["widths"][-1]]
    lines = [
        Finding(f"{stack['case']}: what {setting['depth']} layers add, in d·Σα²", _number(stack["last"]), "1 to 2")
        for stack in widest
    ]
    for init, model in models.items():
        lines.append(Finding(f"BERT, {init}: what a layer adds, in d", _number(model["layer"], 3), "1 to 2"))
    for init, model in models.items():
        for name, part in model["parts"].items():
            size, scaling = name.split()
            if int(size) == setting["sizes"][0]:
                what = f"BERT, {init}: last norm of {size} layers / of all, {scaling}"
                lines.append(Finding(what, _number(part["end"]), "1" if scaling == "sqrt" else "not in the paper"))
    return lines


def _stability(result: Mapping[str, Any]) -> list[Finding]:
    fits = result["exponents"]
    return [
        Finding("norm after layer ℓ: power of ℓ", _number(fits["norm"]), "1"),
        Finding("Ψ of layer ℓ: power of L/ℓ", _number(fits["psi"]), "0.12"),
        Finding("mean loss added by leaving out one layer", _number(result["gap"], 4), "at least 0"),
    ]


def _number(interval: Mapping[str, float | None], digits: int = 2) -> str:
    mean, low, high = interval["mean"], interval["low"], interval["high"]
    text = f"{mean:.{digits}f}" if low is None else f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
    return text.replace("-", "−")


FINDINGS: dict[str, Callable[[Mapping[str, Any]], list[Finding]]] = {
    "polynomial": _polynomial,
    "polynomial-length": _polynomial_length,
    "boolean": _boolean,
    "linear": _linear,
    "scaling": _scaling,
    "stability": _stability,
}
