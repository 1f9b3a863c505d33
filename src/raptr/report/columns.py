"""Tables defined by their columns, and their Markdown form."""

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, final

R = TypeVar("R")


@final
@dataclass(frozen=True)
class Column(Generic[R]):
    """A column: its heading, and the cell's text for a row. `text` marks columns of words rather than numbers."""

    heading: str
    cell: Callable[[R], str]
    text: bool = False


def markdown_table(columns: Sequence[Column[R]], rows: Sequence[R]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        [escaped(column.heading) for column in columns],
        ["---" if column.text else "---:" for column in columns],
        *([escaped(column.cell(row)) if column.text else column.cell(row) for column in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def escaped(text: str) -> str:
    """Escape a text so that Markdown shows it literally: no markup, no HTML, no end of a cell."""
    return re.sub(r"([\\`*_\[\]|$~#])", r"\\\1", html.escape(text, quote=False))


def fixed(value: float | None, digits: int) -> str:
    """Format a number with `digits` decimals; None becomes a dash."""
    return "–" if value is None else f"{value:.{digits}f}"
