"""Draw every figure and table of these pages and of README.md again, from the records: `make results`.

Also write what `--method auto` chooses by (src/raptr/train/measured.json), from the same records.

A page marks a table by two lines; what stands between them is written here:

    <!-- table: NAME -->
    <!-- end -->

To add a page: write a module in `pages/` with a `Page`, and list it in `PAGES`. A record that is not there is None for
the functions that use it, so that a page can say what is still missing. Writing twice changes nothing.
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
    """The page's records by name; None for one that is not there."""
    paths = {name: ROOT / path for name, path in page.records.items()}
    return {name: json.loads(path.read_text("utf-8")) if path.exists() else None for name, path in paths.items()}


def redrawn(page: Page, text: str) -> str:
    """The page's text with every table made anew."""
    marked = [name for _, name, _ in BLOCK.findall(text)]
    if sorted(marked) != sorted(page.tables):
        raise ValueError(f"{page.name}.md marks the tables {sorted(marked)}; its functions are {sorted(page.tables)}")
    found = records(page)
    tables = {name: table(found) for name, table in page.tables.items()}
    return BLOCK.sub(lambda block: f"{block[1]}\n{tables[block[2]]}\n\n{block[3]}", text)


def main() -> None:
    """Write what has changed, and say so."""
    _write(MEASURED, packaged(read_records()).encode())
    for page in PAGES:
        path = (DOCS / f"{page.name}.md").resolve()
        _write(path, redrawn(page, path.read_text("utf-8")).encode())
        found = records(page)
        for name, draw in page.figures.items():
            figure = draw(found)
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
