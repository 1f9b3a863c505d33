"""The tables of README.md: results of the comparisons at 20 tokens per weight or more, in as few rows as possible."""

from collections.abc import Mapping
from typing import Any

from docs.results.pages.comparison import LONG, joined
from docs.results.pages.contract import Page, Records, fixed, table, with_interval
from raptr.comparison.record import read_rows
from raptr.comparison.table import Row, finals

COLUMNS = {"BERT, 12 layers": "long", "BERT, 6 layers": "six layers", "causal decoder": "causal", "UL2": "ul2"}
SAME_STEPS = ("progressive stacking, 20-20-60%", "progressive stacking, 21-21-57%")
EQUAL, CHEAPER = "progressive stacking, 33-33-33%", "progressive stacking, 27-27-47%"
ROWS = {  # what is shown, and the entries' labels in the records
    "full training, fewer steps": ("full (reduced)",),
    "**progressive stacking, same steps**": SAME_STEPS,
    "progressive stacking, more steps": (EQUAL,),
    "progressive stacking, same steps, fewer FLOPs": (CHEAPER,),
    "gradual stacking": ("stacking",),
    "RaPTr, the default": ("raptr, none",),
    "RaPTr, the paper's square-root scaling": ("raptr, sqrt, full start", "raptr, sqrt"),
}
NAMES = {
    "full": "full training",
    "full (reduced)": "full training, fewer steps",
    "progressive stacking, 20-20-60%": "progressive stacking, same steps",
    "stacking": "gradual stacking",
    "pld": "PLD",
    "raptr, none": "RaPTr, the default",
}


def losses(records: Records) -> str:
    """Tabulate each method's loss, less that of full training: a column for each model."""
    by_model = {name: _rows(joined(records) if name == "long" else records[name]) for name in COLUMNS.values()}
    by_model["long"][CHEAPER] = _rows(records["cheaper"])[CHEAPER]
    lines = []
    for name, labels in ROWS.items():
        entries = [next((rows[label] for label in labels if label in rows), None) for rows in by_model.values()]
        flops = sorted({f"{row.flops:.2f}" for row in entries if row is not None})
        steps = [rows["full"].steps for rows in by_model.values()]
        cells = [_cell(row, full) for row, full in zip(entries, steps, strict=True)]
        lines.append([name, " to ".join(flops), *cells])
    seeds = [f"{head} ({_seeds(rows['full'])})" for head, rows in zip(COLUMNS, by_model.values(), strict=True)]
    return table(["", "FLOPs", *seeds], lines)


def scores(records: Records) -> str:
    """Tabulate each method's scores on tasks."""
    rows = _rows(records["tasks"])
    (first, *_) = rows.values()
    lines = []
    for label, name in NAMES.items():
        row = rows[label]
        assert row.loss is not None
        lines.append([name, fixed(row.loss.mean, 3), *(fixed(100 * score.mean, 1) for score in row.scores.values())])
    return table(["", "loss", *first.scores], lines)


def _rows(record: Mapping[str, Any]) -> dict[str, Row]:
    return {row.label: row for row in finals(read_rows(record))}


def _cell(row: Row | None, steps: int) -> str:
    """Format the difference to full training, with the relative number of steps if it is clearly larger."""
    if row is None:
        return "–"
    assert row.to_full is not None
    longer = row.steps / steps
    difference = with_interval(row.to_full.mean, row.to_full.interval, sign=True)
    return f"{difference} ({longer:.2f}× the steps)" if longer > 1.05 else difference


def _seeds(row: Row) -> str:
    assert row.loss is not None
    return "one seed" if row.loss.n == 1 else f"{row.loss.n} seeds"


PAGE = Page(
    "../README",
    LONG
    | {
        "cheaper": "docs/results/evidence/same-steps-67-12x256.json",
        "six layers": "docs/results/evidence/same-steps-6x256.json",
        "causal": "docs/results/evidence/causal-12x256.json",
        "ul2": "docs/results/evidence/ul2-12x256.json",
        "tasks": "docs/results/evidence/glue-12x256.json",
    },
    {"losses": losses, "scores": scores},
)
