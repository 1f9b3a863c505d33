"""The table of stability.md."""

from typing import Any

from docs.results.pages.contract import Page, Records, fixed, ranged, table
from raptr.studies.stability import plot


def models(records: Records) -> str:
    """The model trained with one layer missing beside the control."""
    both: list[dict[str, Any]] = [records["minus one"], records["full"]]

    def row(name: str, cells: list[str], paper: str = "") -> list[str]:
        return [name, *cells, paper]

    rows = [
        row("norm after layer ℓ as a power of ℓ", [ranged(one["exponents"]["norm"]) for one in both], "1"),
        row("variance that a straight line explains", [fixed(one["norm_line"]["explained"], 2) for one in both]),
        row("Ψ_ℓ as a power of L/ℓ, all layers", [ranged(one["exponents"]["psi"]) for one in both], "0.12"),
        row("the same, first and last layer left out", [ranged(one["exponents"]["psi_inner"]) for one in both]),
        row("mean of Ψ_ℓ/‖F‖", [fixed(one["mean_relative"], 3) for one in both]),
        row("L(F), held-out", [fixed(one["loss"], 4) for one in both]),
        row("mean of L(F_−ℓ)", [fixed(one["mean_loss_without"], 4) for one in both]),
        row("mean of L(F_−ℓ) − L(F)", [ranged(one["gap"], 4) for one in both], "at least 0"),
        row("the same with the scales of training", [ranged(both[0]["gap_as_trained"], 4), "as above"]),
    ]
    layers = both[0]["layers"]
    head = ["", f"trained with {layers - 1} of {layers} layers", "trained with all (control)", "paper, BERT-Large"]
    return table(head, rows)


PAGE = Page(
    name="results/stability",
    records={
        "minus one": "docs/results/stability-minus-one.json",
        "full": "docs/results/stability-full.json",
    },
    tables={"models": models},
    figures={"stability.png": lambda records: plot([records["minus one"], records["full"]])},
)
