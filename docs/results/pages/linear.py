"""The tables of linear.md."""

from typing import Any

from docs.results.pages.contract import Page, Records, fixed, ranged, table
from raptr.studies.linear import LINEAR


def case(records: Records, width: int, architecture: str, shared: str, tau: float) -> dict[str, Any] | None:
    """Return one of the measured networks, or None."""
    wanted = {"width": width, "architecture": architecture, "shared": shared, "tau": tau}
    return next((network for network in records["result"]["cases"] if wanted.items() <= network.items()), None)


def exponents(records: Records) -> str:
    """Tabulate the gap's exponent by τ."""
    columns = [
        ("A spread, d = 100", 100, "spread", "gap_exponent"),
        ("late", 100, "spread", "late_gap_exponent"),
        ("A spread, d = 400", 400, "spread", "gap_exponent"),
        ("A Gaussian, d = 100", 100, "gaussian", "gap_exponent"),
        ("A one direction, d = 100", 100, "one direction", "gap_exponent"),
    ]
    rows = []
    for tau in records["result"]["setting"]["taus"]:
        cases = [(case(records, width, "residual + norm", shared, tau), name) for _, width, shared, name in columns]
        rows.append([f"{tau:g}", *("no A" if one is None else ranged(one[name]) for one, name in cases)])
    return table(["τ", *(column[0] for column in columns)], rows)


# Layers, architecture, quantity, claimed, measured (name in the record, digits), wide limit (name or text), verdict.
LEMMAS: tuple[tuple[str, str, str, str, str, int | None, str, str], ...] = (
    ("random", "neither", "‖F‖, doublings", "0", "norm_growth", 3, "0", "holds"),
    ("random", "residual + norm", "‖F‖ against L", "½", "norm_growth", 2, "norm_growth", "holds: √(L + 1)"),
    ("random", "residual + norm", "Ψ₄ against L", "at most ½", "psi_by_depth", 2, "psi_by_depth", "holds"),
    ("random", "residual + norm", "Ψ_ℓ against ℓ, L = 128", "at most −½", "psi_by_layer", 2, "psi_by_layer", "holds"),
    (
        "random",
        "residual + norm",
        "gap against L",
        "at most −½",
        "gap_exponent",
        2,
        "gap_exponent",
        "holds: gap·√L stays below 2, so the exponent nears −½ from above",
    ),
    ("random", "norm", "‖F‖ against L", "0", "norm_growth", 2, "0", "holds"),
    ("random", "norm", "gap at L = 128", "Ω(1)", "last_gap", 2, "√2 = 1.41", "holds"),
    ("random", "residual", "‖F‖, doublings", "½", "norm_growth", 3, "½", "holds"),
    ("random", "residual", "Ψ₄ against L, doublings", "½", "psi_by_depth", 3, "½", "holds"),
    (
        "random",
        "residual",
        "Ψ_ℓ against ℓ, L = 128",
        "0 (lemma), growing as 2^(ℓ/2) (its proof)",
        "psi_by_layer",
        2,
        "0",
        "the lemma holds; the proof has ℓ for L",
    ),
    ("random", "residual", "gap at L = 128", "Ω(1)", "last_gap", 2, "1/√2 = 0.71", "holds"),
    ("equal", "residual + norm", "‖F‖ against L", "1", "norm_growth", 2, "", "holds"),
    ("equal", "residual + norm", "Ψ₄ against L", "at most 0", "psi_by_depth", 2, "", "holds: Ψ ≤ ‖A‖ = 1"),
    ("equal", "residual + norm", "gap against L", "at most −1", "gap_exponent", 2, "", "holds"),
    ("equal", "residual + norm", "the same, L = 32 to 128", "at most −1", "late_gap_exponent", 2, "", "holds"),
    (
        "equal",
        "norm",
        "Ψ_ℓ against ℓ, L = 128",
        "falls as e^−ℓ",
        "psi_by_layer",
        2,
        "",
        "does not hold: Ψ is the same for every ℓ",
    ),
    (
        "equal",
        "norm",
        "gap at L = 128",
        "at most of order 1/L = 0.008",
        "last_gap",
        None,
        "",
        "holds; it falls exponentially",
    ),
    ("equal", "residual", "‖F‖, doublings", "at most 1", "norm_growth", 3, "", "holds"),
    ("equal", "residual", "gap at L = 128", "Ω(1)", "last_gap", 3, "", "holds: ½"),
)


def lemmas(records: Records) -> str:
    """Compare the lemmas' claims with what was measured at d = 400."""
    rows, limit = [], records["result"]["wide_limit"]
    for layers, architecture, quantity, claimed, name, digits, wide, verdict in LEMMAS:
        one = case(records, 400, architecture, "spread", 0.0 if layers == "random" else 1.0)
        assert one is not None
        shown = {"norm": "norm only", "residual": "residual only"}.get(architecture, architecture)
        cells = [layers, shown, quantity, claimed, ranged(one[name], digits)]
        rows.append([*cells, fixed(limit[wide], 2) if wide in limit else wide, verdict])
    return table(["layers", "architecture", "quantity", "claimed", "measured", "wide limit", ""], rows)


def alignment(records: Records) -> str:
    """Tabulate how fast equal layers turn inputs towards the first eigenvector."""
    rows = [
        [delta, ranged(one["tangent_exponent"]), ranged(one["last_tangent"], None), ranged(one["norm_exponent"], 3)]
        for delta, one in records["result"]["alignment"].items()
    ]
    return table(["δ", "exponent of the tangent", "tangent at ℓ = 1,024", "exponent of ‖y‖"], rows)


def wide(records: Records) -> str:
    """Tabulate the exponent of the gap for each doubling of the depth, at infinite width."""
    local = records["result"]["wide_limit"]["local_exponents"]
    values = [fixed(value, 3) for value in local.values()]
    return table(["from L", *(f"{int(depth):,}" for depth in local)], [["exponent", *values]])


PAGE = Page(
    name="results/linear",
    records={"result": "docs/results/linear.json"},
    tables={"exponents": exponents, "lemmas": lemmas, "alignment": alignment, "wide": wide},
    figures={"linear.png": lambda records: LINEAR.plot(records["result"])},
)
