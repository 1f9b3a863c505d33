"""What a comparison found: the page, the table and the plot, all drawn from its record (record.py) alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group

from raptr.comparison.plot import draw
from raptr.comparison.progress import NAME
from raptr.comparison.record import read_outcomes, read_rows
from raptr.comparison.spec import FULL, REDUCED
from raptr.comparison.table import Row, finals, markdown, notes, rich_table, timed
from raptr.files import write_text
from raptr.report.plots import save

MACHINE = ("processor", "gpu", "threads")


def redraw(record: Mapping[str, Any], out: Path) -> None:
    """Make the page and the plot of a comparison's record."""
    save(picture(record), out / f"{NAME}.png")
    write_text(out / f"{NAME}.md", _page(record, read_rows(record)))


def picture(record: Mapping[str, Any]) -> Any:
    """The figure of a comparison's record."""
    return draw(read_rows(record), read_outcomes(record), record["full_flops"], full=FULL, reduced=REDUCED)


def shown(record: Mapping[str, Any]) -> Group:
    """The final table of a comparison's record, for a terminal."""
    table = read_rows(record)
    caption = " ".join([record["budget"], *notes(table)])
    return rich_table(finals(table), f"Comparison: {_title(record)}", caption)


def _title(record: Mapping[str, Any]) -> str:
    finished, planned = record["finished"], record["planned"]
    return f"{finished} runs" if finished == planned else f"PARTIAL: {finished} of {planned} runs"


def _page(record: Mapping[str, Any], table: list[Row]) -> str:
    parts = [f"# Comparison: {_title(record)}", record["budget"]]
    times = "times are training alone" if timed(table) else "runs were made several at once, so no times are given"
    parts.append(f"FLOPs are the whole model's, relative to full training over all its steps; {times}.")
    parts += ["## Each entry at its best learning rate", markdown(finals(table)).rstrip(), *notes(table)]
    parts.append(f"![each entry's final loss, and losses at every learning rate]({NAME}.png)")
    if len(table) > len(finals(table)):
        chosen = "The best learning rate of an entry is chosen by these same losses, on the seeds that all rates have."
        parts += ["## Every learning rate", chosen, markdown(table).rstrip()]
    parts += ["## Where", _where(record["environments"])]
    written = yaml.safe_dump(dict(record["comparison"]), sort_keys=False, allow_unicode=True).rstrip()
    parts += ["## What was asked", f"```yaml\n{written}\n```"]
    return "\n\n".join(parts) + "\n"


def _where(environments: Sequence[Mapping[str, Any]]) -> str:
    """The machines, versions and commits of the runs."""
    shown = ("processor", "gpu", "cores", "threads", "python", "torch", "commit")
    lines = dict.fromkeys(", ".join(f"{key} {e[key]}" for key in shown if e.get(key) is not None) for e in environments)
    said = "\n".join(f"- {line}" for line in lines)
    if len({tuple(e.get(key) for key in MACHINE) for e in environments}) > 1:
        said += "\n\nThe runs were made on different machines: their times do not compare."
    return said
