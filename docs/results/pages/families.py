"""The tables of families.md."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from docs.results.pages.contract import Page, Records, table

AXES = "heads and MLP parts"
WORKS = ("any", "first layer runs")
RESULTS = {"works": WORKS, "refused": ("refused",), "fails": ("fails", "wrong"), "not tried": ("not tried",)}


def _lines(records: Records, result: str) -> list[dict[str, Any]]:
    return [line for line in records["families"]["families"] if line["result"] in RESULTS[result]]


def counts(records: Records) -> str:
    """Tabulate the number of families of each kind, by result."""
    counters = {result: Counter(line["kind"] for line in _lines(records, result)) for result in RESULTS}
    counters["grows too"] = Counter(line["kind"] for line in _lines(records, "works") if line["grows"])
    counters[f"{AXES} too"] = Counter(line["kind"] for line in _lines(records, "works") if line["axes"])
    columns = ["works", "grows too", f"{AXES} too", *list(RESULTS)[1:]]
    kinds = sorted({line["kind"] for line in records["families"]["families"]})
    rows = [[kind, *(str(counters[column][kind]) for column in columns)] for kind in kinds]
    rows.append(["all", *(str(counters[column].total()) for column in columns)])
    return table(["kind of model", *columns], rows)


def works(records: Records) -> str:
    """Tabulate the families that can run subnetworks, with the paths of their lists of blocks."""
    rows = []
    for line in _lines(records, "works"):
        notes = ["name the list" if len(line["blocks"]) == 1 else "name the lists"] if line["named"] else []
        notes += ["the first layer has to run"] if line["result"] == "first layer runs" else []
        notes += [] if line["scales"] else ["scales of 0 and 1 only"]
        blocks = ", ".join(f"`{path}`" for path in line["blocks"])
        can = ["yes" if line[what] else "" for what in ("grows", "axes")]
        rows.append([line["family"], line["kind"], blocks, *can, "; ".join(notes)])
    return table(["family", "kind", "blocks", "grows", AXES, "note"], rows)


def _plain(reason: str) -> str:
    """Escape a reason for Markdown; a reason that was cut may have lost a closing mark."""
    return reason.replace("`", "'").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def without(result: str) -> Callable[[Records], str]:
    """Return a function that tabulates the families with this result, each with the reason."""

    def reasons(records: Records) -> str:
        rows = []
        for line in _lines(records, result):
            blocks = ", ".join(f"`{path}`" for path in line.get("blocks", []))
            reason = line["reason"].removeprefix("running: ").removeprefix("attach: ").split("; pass blocks=")[0]
            rows.append([line["family"], line["kind"], blocks, _plain(reason)])
        return table(["family", "kind", "blocks", "reason"], rows)

    return reasons


PAGE = Page(
    name="results/families",
    records={"families": "benchmarks/results/families.json"},
    tables={
        "counts": counts,
        "works": works,
        "refused": without("refused"),
        "fails": without("fails"),
        "not-tried": without("not tried"),
    },
)
