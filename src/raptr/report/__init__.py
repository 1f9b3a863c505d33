"""Turn run folders into plots, tables and an HTML page. Everything is derived from what the runs have written."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from raptr.files import locked, refuse_strange
from raptr.report.page import render
from raptr.report.plots import draw_losses, save
from raptr.report.runs import Run, labels, read_run, told_apart
from raptr.report.scores import draw_scores, scored
from raptr.report.tables import dicts, markdown, rich_table, summary

PAGE = "report.html"
OTHERS = ("losses.png", "scores.png", "table.md", "table.json")  # the files of a report from before it had a page


@dataclass(frozen=True)
class Report:
    """The paths of a report's files, and its table for the terminal."""

    page: Path
    plot: Path
    markdown: Path
    json: Path
    table: Table
    scores: Path | None  # the plot of the runs' scores on tasks; None if no run has any


def write_report(runs: Sequence[Path], out: Path) -> Report:
    """Write the page, the plots and the tables of the runs in these folders into `out`."""
    if not runs:
        raise ValueError("A report needs at least one run folder, and none was given.")
    read = told_apart([read_run(path) for path in runs])
    refuse_strange(out, "report", PAGE, lambda path: path.name in OTHERS)
    out.mkdir(parents=True, exist_ok=True)
    # Two processes could leave a page of some runs beside the plots of others.
    with locked(out, f"out is {str(out)!r}, where another process writes a report; wait for it, or name another --out"):
        return _write(read, out)


def _write(read: Sequence[Run], out: Path) -> Report:
    rows = summary(read)
    report = Report(
        page=out / PAGE,
        plot=out / "losses.png",
        markdown=out / "table.md",
        json=out / "table.json",
        table=rich_table(rows),
        scores=out / "scores.png" if any(run.scores for run in read) else None,
    )
    report.page.write_text(render(read), encoding="utf-8")
    save(draw_losses(read), report.plot)
    if report.scores is not None:
        judged = [
            scored(name, run.evals[-1].loss if run.evals else None, run.scores)
            for name, run in zip(labels(read), read, strict=True)
            if run.scores
        ]
        save(draw_scores(judged, "examples or seeds"), report.scores)
    else:
        (out / "scores.png").unlink(missing_ok=True)  # left by an earlier report
    report.markdown.write_text(markdown(rows), encoding="utf-8")
    report.json.write_text(json.dumps(dicts(rows), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return report
