"""Redraw every figure and table of these pages and of README.md from the records: `make results`.

Also write src/raptr/train/measured.json, by which `--method auto` chooses, from the same records.

A page marks a table by two lines; this script writes what is between them:

    <!-- table: NAME -->
    <!-- end -->

To add a page, write a module in `pages/` with a `Page`, and list it in `PAGES`. A missing record is None for the
functions that use it, so that a page can say what was not measured yet. A second run changes nothing.
"""

import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

from docs.results.pages import (
    axes,
    boolean,
    comparison,
    corpus,
    evidence,
    families,
    fewshot,
    linear,
    polynomial,
    readme,
    scaling,
    speed,
    stability,
    which,
)
from docs.results.pages.contract import Page
from evidence.measured import packaged, read_records

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
MEASURED = ROOT / "src" / "raptr" / "train" / "measured.json"
PAGES: tuple[Page, ...] = (
    axes.PAGE,
    boolean.PAGE,
    *comparison.PAGES,
    corpus.PAGE,
    evidence.PAGE,
    families.PAGE,
    fewshot.PAGE,
    linear.PAGE,
    polynomial.PAGE,
    readme.PAGE,
    scaling.PAGE,
    speed.PAGE,
    stability.PAGE,
    which.PAGE,
)
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def records(page: Page) -> dict[str, Any]:
    """Return the page's records by name; None for a missing one."""
    paths = {name: ROOT / path for name, path in page.records.items()}
    return {name: json.loads(path.read_text("utf-8")) if path.exists() else None for name, path in paths.items()}


def redrawn(page: Page, text: str) -> str:
    """Return the page's text with every table written anew; its marks and the page's functions must agree."""
    marked = [name for _, name, _ in BLOCK.findall(text)]
    if sorted(marked) != sorted(page.tables):
        raise ValueError(f"{page.name}.md marks the tables {sorted(marked)}; its functions are {sorted(page.tables)}")
    page_records = records(page)
    tables = {name: table(page_records) for name, table in page.tables.items()}
    return BLOCK.sub(lambda block: f"{block[1]}\n{tables[block[2]]}\n\n{block[3]}", text)


def main() -> None:
    """Write the files that have changed, and print their paths."""
    _write(MEASURED, packaged(read_records()).encode())
    for page in PAGES:
        path = (DOCS / f"{page.name}.md").resolve()
        _write(path, redrawn(page, path.read_text("utf-8")).encode())
        page_records = records(page)
        for name, draw in page.figures.items():
            figure = draw(page_records)
            if figure is not None:
                image = BytesIO()
                figure.savefig(image, format="png", dpi=150, metadata={"Software": None})
                _write(RESULTS / name, image.getvalue())


def _write(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
