"""The report as a single HTML page, with its style, script and data inside; it fetches nothing.

Python computes and words everything; the script draws the curves and lays out the tables. Names of runs, and all else
that comes from them, travel as JSON and are shown as text, never as HTML.
"""

import json
from collections.abc import Sequence
from importlib.resources import files
from string import Template
from typing import Any

from raptr.report.page.curves import axes, curves
from raptr.report.page.sheets import sheets
from raptr.report.runs import Run

STYLE, SCRIPTS, TEMPLATE = "page.css", ("plot.js", "page.js"), "page.html"


def render(runs: Sequence[Run]) -> str:
    """Return the page of these runs as HTML."""
    if not runs:
        raise ValueError("A page needs at least one run, and none was given.")
    folder = files(__package__)
    style, template = ((folder / name).read_text(encoding="utf-8") for name in (STYLE, TEMPLATE))
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return Template(template).substitute(style=style, script=script, data=_embedded(payload(runs)))


def payload(runs: Sequence[Run]) -> dict[str, Any]:
    """Return everything that the page shows, ready for JSON."""
    return {"axes": axes(runs), "runs": curves(runs), "sheets": sheets(runs)}


def _embedded(value: Any) -> str:
    """Return JSON that is safe in a script element: no character in it begins a tag, an entity or a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
