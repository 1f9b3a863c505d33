"""The tables and figures of stability.md."""

from collections.abc import Mapping
from typing import Any

from docs.results.pages.contract import Page, Records, fixed, ranged, table
from raptr.studies.stability import plot

Result = Mapping[str, Any]


def models(records: Records) -> str:
    """Compare the very small model trained with one layer missing with the control."""
    return _table([records["minus one"], records["full"]], ["trained with all (control)"])


def larger(records: Records) -> str:
    """Tabulate the larger model, trained with one layer missing."""
    return _table([records["mini"]], [])


def _table(results: list[Result], controls: list[str]) -> str:
    """Return a table with a column for each result, first the one trained with one layer missing, then the controls."""

    def row(name: str, cells: list[str], paper: str = "") -> list[str]:
        return [name, *cells, paper]

    as_trained = [ranged(results[0]["gap_as_trained"], 4), *("as above" for _ in controls)]
    rows = [
        row("norm after layer ℓ as a power of ℓ", [ranged(one["exponents"]["norm"]) for one in results], "1"),
        row("variance that a straight line explains", [fixed(one["norm_line"]["explained"], 2) for one in results]),
        row("Ψ_ℓ as a power of L/ℓ, all layers", [ranged(one["exponents"]["psi"]) for one in results], "0.12"),
        row("the same, first and last layer left out", [ranged(one["exponents"]["psi_inner"]) for one in results]),
        row("mean of Ψ_ℓ/‖F‖", [fixed(one["mean_relative"], 3) for one in results]),
        row("L(F), held-out", [fixed(one["loss"], 4) for one in results]),
        row("mean of L(F_−ℓ)", [fixed(one["mean_loss_without"], 4) for one in results]),
        row("mean of L(F_−ℓ) − L(F)", [ranged(one["gap"], 4) for one in results], "at least 0"),
        row("the same with the scales of training", as_trained),
    ]
    layers = results[0]["layers"]
    return table(["", f"trained with {layers - 1} of {layers} layers", *controls, "paper, BERT-Large"], rows)


PAGE = Page(
    name="results/stability",
    records={
        "minus one": "docs/results/stability-minus-one.json",
        "full": "docs/results/stability-full.json",
        "mini": "docs/results/stability-mini.json",
    },
    tables={"models": models, "larger": larger},
    figures={
        "stability.png": lambda records: plot([records["minus one"], records["full"]]),
        "stability-mini.png": lambda records: plot([records["mini"]]),
    },
)
