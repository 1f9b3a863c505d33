"""What a comparison found, read from its run folders and written as Markdown, JSON and PNG."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group

from raptr.comparison.plot import draw
from raptr.comparison.run import RUNS, read_outcome
from raptr.comparison.spec import FULL, REDUCED, Comparison, PlannedRun
from raptr.comparison.table import Outcome, Row, finals, markdown, notes, plain, rich_table, rows, timed
from raptr.report.plots import save
from raptr.report.runs import Run, read_run
from raptr.train.run import write_file

NAME = "compare"
MACHINE = ("processor", "gpu", "threads")


def write_results(comparison: Comparison, out: Path) -> Group | None:
    """Write the tables and the plot over the finished runs; returns the final table (None: no run is finished)."""
    found = read_finished(comparison, out)
    if not found:
        return None
    outcomes = [outcome for _, _, outcome in found]
    grids = {entry.label: entry.peaks for entry in comparison.entries}
    table = rows(outcomes, grids, full=FULL, reduced=REDUCED, full_flops=comparison.full_flops)
    environments = [run.environment for _, run, _ in found]
    described = {
        "comparison": dict(comparison.given),
        "finished": len(found),
        "planned": len(comparison.runs),
        "partial": len(found) < len(comparison.runs),
        "full_flops": comparison.full_flops,
        "reduced_fraction": comparison.fraction,
        "best": [asdict(row) for row in finals(table)],
        "rows": [asdict(row) for row in table],
        "runs": [
            {
                **asdict(outcome),
                "relative_flops": outcome.flops / comparison.full_flops,
                "planned_flops": planned.entry.flops,
                "folder": str(run.path.relative_to(out)),
                "config": dict(run.config),
                "environment": dict(run.environment),
            }
            for planned, run, outcome in found
        ],
    }
    save(draw(table, outcomes, comparison.full_flops, full=FULL, reduced=REDUCED), out / f"{NAME}.png")
    write_file(out / f"{NAME}.json", json.dumps(plain(described), indent=1, allow_nan=False) + "\n")
    write_file(out / f"{NAME}.md", _page(comparison, table, len(found), environments))
    caption = " ".join([budget(comparison), *notes(table)])
    return rich_table(finals(table), f"Comparison: {_title(comparison, len(found))}", caption)


def read_finished(comparison: Comparison, out: Path) -> list[tuple[PlannedRun, Run, Outcome]]:
    """Every finished run with its records and what it came to."""
    found = []
    for planned in comparison.runs:
        folder = out / RUNS / planned.name
        known = read_outcome(folder)
        if known is not None:
            run = read_run(folder)
            found.append((planned, run, _outcome(planned, run, known)))
    return found


def budget(comparison: Comparison) -> str:
    """How long each run is, in a sentence."""
    full = next(entry for entry in comparison.entries if entry.label == FULL)
    decay = f"Learning rates decay over the last {full.config.optimizer.decay:,} steps of every run."
    given = comparison.given.get("flops")
    if given is not None:
        said = f"Every entry spends {given:g} of the FLOPs of full training over {full.steps:,} steps"
        return f"{said}, as nearly as whole steps allow. {decay}"
    said = f"Every entry takes {full.steps:,} steps"
    if comparison.fraction is not None:
        reduced = next(entry for entry in comparison.entries if entry.label == REDUCED)
        said += f"; {REDUCED} takes {reduced.steps:,} and spends {reduced.flops / full.flops:.3f} of full's FLOPs, "
        said += f"at most the mean of the entries that cost less, {comparison.fraction:.3f}"
    return f"{said}. {decay}"


def _outcome(planned: PlannedRun, run: Run, known: Mapping[str, Any]) -> Outcome:
    final, diverged = run.evals[-1], known["diverged"]
    if diverged is None and not math.isfinite(final.loss):
        diverged = final.step
    return Outcome(
        label=planned.entry.label,
        peak=planned.peak,
        seed=planned.seed,
        steps=planned.entry.steps,
        loss=None if diverged is not None else final.loss,
        diverged=diverged,
        flops=run.last.flops,
        seconds=run.last.seconds if known.get("jobs", 1) == 1 else None,
        curve=tuple((record.step, record.flops, record.loss) for record in run.evals),
    )


def _title(comparison: Comparison, finished: int) -> str:
    total = len(comparison.runs)
    return f"{finished} runs" if finished == total else f"PARTIAL: {finished} of {total} runs"


def _page(comparison: Comparison, table: list[Row], finished: int, environments: list[Mapping[str, Any]]) -> str:
    parts = [f"# Comparison: {_title(comparison, finished)}", budget(comparison)]
    times = "times are training alone" if timed(table) else "runs were made several at once, so no times are given"
    parts.append(f"FLOPs are the whole model's, relative to full training over all its steps; {times}.")
    parts += ["## Each entry at its best learning rate", markdown(finals(table)).rstrip(), *notes(table)]
    parts.append(f"![each entry's final loss, and losses at every learning rate]({NAME}.png)")
    if len(table) > len(finals(table)):
        chosen = "The best learning rate of an entry is chosen by these same losses."
        parts += ["## Every learning rate", chosen, markdown(table).rstrip()]
    parts += ["## Where", _where(environments)]
    written = yaml.safe_dump(dict(comparison.given), sort_keys=False, allow_unicode=True).rstrip()
    parts += ["## What was asked", f"```yaml\n{written}\n```"]
    return "\n\n".join(parts) + "\n"


def _where(environments: list[Mapping[str, Any]]) -> str:
    """The machines, versions and commits of the runs."""
    shown = ("processor", "gpu", "cores", "threads", "python", "torch", "commit")
    lines = dict.fromkeys(", ".join(f"{key} {e[key]}" for key in shown if e.get(key) is not None) for e in environments)
    said = "\n".join(f"- {line}" for line in lines)
    if len({tuple(e.get(key) for key in MACHINE) for e in environments}) > 1:
        said += "\n\nThe runs were made on different machines: their times do not compare."
    return said
