"""The tables of boolean.md."""

from collections.abc import Sequence
from typing import Any

from docs.results.pages.contract import Page, Records, fixed, short, table
from raptr.studies.boolean import BOOLEAN


def limits(records: Records) -> str:
    """Tabulate errors of the whole run against the theorem's limits."""
    rows = []
    for run in records["result"]["runs"]:
        first, second = run["after_phase1"], run["after_phase2"]
        worst = max(first["w2"], first["b"])
        errors = [first["w1"], worst, second["w1"], second["w2"], second["b"]]
        cells = [_with_seeds(pair, 5 if pair is second["w2"] else 2) for pair in errors]
        rows.append([f"{run['eta']:g}", short(run["bias_error"]), *cells, short(second["loss"][0], 4)])
    names = ["phase 1: w₁ − π/3", "phase 1: w₂, b", "phase 2: w₂,₁", "phase 2: w₂,₂", "phase 2: b₂"]
    return table(["η", "p₀", *names, "loss"], rows)


def _with_seeds(pair: Sequence[float], digits: int) -> str:
    mean, deviation = pair
    return f"{short(mean, digits)} ({short(deviation, 2)})"


def exponents(records: Records) -> str:
    """Tabulate the fitted exponents of phase 2."""
    names = {"w2": "w₂,₂", "loss": "loss", "w1": "w₂,₁", "b": "b₂"}
    rows = [[f"{law['eta']:g}", *(_slope(law["slopes"][name]) for name in names)] for law in records["result"]["laws"]]
    return table(["η", *names.values()], rows)


def _slope(fit: dict[str, float]) -> str:
    return f"{fixed(fit['slope'], 3)} ({fixed(fit['low'], 3)}, {fixed(fit['high'], 3)})"


def one_layer(records: Records) -> str:
    """Tabulate the least loss of one layer."""
    names = {"free": "free", "sqrt3/2": "√3/2", "zero": "0"}
    rows = []
    for name, shown in names.items():
        least = records["result"]["bound"]["least"][name]
        at = ", ".join(fixed(value, 4) for value in least["at"])
        rows.append([shown, fixed(least["bound"], 5), f"{fixed(least['loss'], 5)} at ({at})"])
    return table(["p₀", "no parameters below", "reached, at (w₁, w₂, b)"], rows)


def variants(records: Records) -> str:
    """Tabulate runs without the paper's simplifications."""
    by_name: dict[str, Any] = records["result"]["variants"]
    names = {
        "as the paper": "as the paper",
        "p0 trained in phase 1": "p₀ trained in phase 1",
        "second neuron reads p0 in phase 1": "second neuron reads p₀ in phase 1, as in the full network",
        "both, p0 read and trained": "… and p₀ trained",
        "all trained in phase 2": "all parameters trained in phase 2",
        "full training from zeros": "full training from zeros, no phases",
    }
    rows = [
        [shown, _end(one, "first"), _end(one, "second"), _loss(one, "loss_at_100"), _loss(one, "loss")]
        for name, shown in names.items()
        if (one := by_name[name])
    ]
    escaped = max(records["result"]["escape"]["all_trained_losses"])
    rows.insert(
        5, ["all parameters in phase 2, both layers escaped", *[MINIMUM] * 2, "", f"{short(escaped, 1)} or less"]
    )
    return table(["setting", "first layer after phase 1", "second layer", "loss at 100", "loss at 1000"], rows)


MINIMUM = "one-layer minimum"


def _end(one: dict[str, Any], layer: str) -> str:
    if layer not in one:
        return ""
    return "saddle" if abs(one[layer][1]) < 0.1 else MINIMUM


def _loss(one: dict[str, Any], name: str) -> str:
    return short(one[name], 3) if name in one else ""


PAGE = Page(
    name="results/boolean",
    records={"result": "docs/results/boolean.json"},
    tables={"limits": limits, "exponents": exponents, "one-layer": one_layer, "variants": variants},
    figures={"boolean.png": lambda records: BOOLEAN.plot(records["result"])},
)
