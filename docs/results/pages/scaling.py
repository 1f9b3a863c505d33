"""The tables of scaling.md."""

import math
from typing import Any

from docs.results.pages.contract import Page, Records, fixed, ranged, table
from raptr.studies.scaling import SCALING, SCALINGS

Stack = dict[str, Any]


def of_case(records: Records, name: str) -> list[Stack]:
    """Return the stacks of a case, one for each width."""
    return [stack for stack in records["result"]["theorem"] if stack["case"] == name]


def widths(records: Records) -> list[str]:
    """Return the heads of the columns."""
    return [f"d = {width}" for width in records["result"]["setting"]["widths"]]


def extremes(numbers: Stack) -> str:
    """Format the range from the smallest to the largest value."""
    return f"{fixed(numbers['least'], 2)} to {fixed(numbers['largest'], 2)}"


def lemmas(records: Records) -> str:
    """Compare the lemmas on one layer, α = 1, with all layers of the stack."""
    stacks = of_case(records, "all one")

    def row(name: str, claimed: str, key: str, digits: int, verdict: str) -> list[str]:
        return [name, claimed, *(ranged(stack[key], digits) for stack in stacks), verdict]

    def single(claimed: str, key: str, verdict: str) -> list[str]:
        return ["the same, single tokens", claimed, *(extremes(stack[key]) for stack in stacks), verdict]

    rows = [
        row("layer normalization: norm / √d", "1", "norm", 3, "holds"),
        row("MLP: norm of output / of input", "1", "mlp", 3, "holds"),
        single("1 ± ε", "mlp", "holds; ε shrinks as d grows"),
        row("attention block adds, in d", "0 to 1", "attention", 2, "holds"),
        row("share of tokens whose norm falls there", "0", "falls", 3, "does not hold; rare at large d"),
        row("one layer adds, in d", "1 to 2", "layer", 2, "holds"),
        single("1 to 2, ± err", "layer", "err is as large as d"),
    ]
    return table(["quantity", "claimed", *widths(records), ""], rows)


def theorem(records: Records) -> str:
    """Tabulate what whole stacks add, case by case."""
    rows = []
    for name in dict.fromkeys(stack["case"] for stack in records["result"]["theorem"]):
        if name == "read as variances":
            continue
        stacks = of_case(records, name)
        last = stacks[-1]
        single = {"least": min(last["added_least"]), "largest": max(last["added_largest"])}
        means = [ranged(stack["last"]) for stack in stacks]
        rows.append([name, *means, extremes(single), ranged(last["attention_first"]), fixed(last["alike"]["mean"], 2)])
    width = widths(records)[-1]
    attention = f"attention adds in layer 1, {width}"
    return table(["case", *widths(records), f"single tokens, {width}", attention, f"cosine of tokens, {width}"], rows)


def readings(records: Records) -> str:
    """Tabulate what the MLP and attention do under the two readings of the initial weights."""
    rows = []
    for name, case in (("deviations", "all one"), ("variances", "read as variances")):
        stacks = of_case(records, case)
        rows.append([name, "norm of the MLP's output / of its input", *(ranged(stack["mlp"]) for stack in stacks)])
        rows.append([name, "one layer adds, in d", *(ranged(stack["layer"], 1) for stack in stacks)])
    expected = [fixed((2 * width**2) ** 0.25, 2) for width in records["result"]["setting"]["widths"]]
    rows.insert(3, ["variances", "the first by calculation, (m·d/2)^¼", *expected])
    return table(["read as", "quantity", *widths(records)], rows)


def mlp(records: Records) -> str:
    """Tabulate the standard deviation of the MLP's ratio of norms, by its number of hidden units."""
    ratios, width = records["result"]["mlp"], records["result"]["setting"]["widths"][0]
    expected = [fixed(math.sqrt(2 / width + 5 / int(hidden)) / 2, 3) for hidden in ratios]
    measured = [ranged(ratio, 3) for ratio in ratios.values()]
    return table(
        ["hidden units m", *(f"{int(hidden):,}" for hidden in ratios)],
        [["deviation of the ratio", *measured], ["½·√(2/d + 5/m)", *expected]],
    )


def condition(records: Records) -> str:
    """Tabulate how often the condition on h_sqrt holds."""
    rows = [
        [
            f"{row['size']}",
            "the first and the last" if row["fixed"] else "none",
            fixed(row["written"], 3),
            fixed(row["below"], 3),
        ]
        for row in records["result"]["condition"]
    ]
    return table(["layers of 12", "fixed", "as written: share of all j", "below kept layers: share of kept j"], rows)


def models(records: Records) -> str:
    """Tabulate the BERT's norms by initialization."""
    rows = [
        [f"`{init}`", *(ranged(model[key], digits) for key, digits in COLUMNS)]
        for init, model in records["result"]["models"].items()
    ]
    return table(["initialization", "embeddings", "after layer 12", "a layer adds, in d", "power of ℓ"], rows)


COLUMNS = (("entered", 2), ("left", 2), ("layer", 3), ("exponent", 3))


def parts(records: Records) -> str:
    """Tabulate the norms of the layers' inputs in subnetworks, relative to the full model."""
    rows = []
    for init, model in records["result"]["models"].items():
        for size in records["result"]["setting"]["sizes"]:
            by_scaling = [model["parts"][f"{size} {scaling}"] for scaling in SCALINGS]
            cells = [ranged(numbers[key], 3) for key in ("off", "end") for numbers in by_scaling]
            rows.append([f"`{init}`", f"{size}", *cells])
    heads = [f"{text}, {scaling}" for text in ("distance", "output") for scaling in SCALINGS]
    return table(["initialization", "layers of 12", *heads], rows)


PAGE = Page(
    name="results/scaling",
    records={"result": "docs/results/scaling.json"},
    tables={
        "lemmas": lemmas,
        "theorem": theorem,
        "readings": readings,
        "mlp": mlp,
        "condition": condition,
        "models": models,
        "parts": parts,
    },
    figures={"scaling.png": lambda records: SCALING.plot(records["result"])},
)
