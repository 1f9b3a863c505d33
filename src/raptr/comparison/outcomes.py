"""Outcomes of a comparison's finished runs, read from their folders."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raptr.report.runs import Run, read_run

RUNS = "runs"
FULL = "full"  # the reference entries: full training at its whole length, and at a reduced one
REDUCED = "full (reduced)"
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a finished run; `loss` is None if the run diverged, in step `diverged`."""

    label: str
    peak: float
    seed: int
    steps: int
    loss: float | None
    diverged: int | None
    flops: float
    seconds: float | None  # None: other runs shared the machine
    curve: tuple[tuple[int, float, float], ...] = ()  # step, FLOPs and held-out loss of each evaluation
    domains: Mapping[str, float] = field(default_factory=dict)  # the final loss on each domain, if there are several
    denoisers: Mapping[str, float] = field(default_factory=dict)  # the final loss of each denoiser, with UL2
    scores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # on tasks, by column; empty if not scored


def read_note(folder: Path) -> dict[str, Any] | None:
    """Return a run's `outcome.json` (where it diverged, its data, how many ran at once), or None if unfinished."""
    path = folder / OUTCOME
    if not path.exists():
        return None
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        note = None
    if not isinstance(note, dict) or "diverged" not in note:
        raise ValueError(f"{path} is damaged; remove {folder}, and the same command trains it again")
    return note


def read_finished(folder: Path, label: str, peak: float, seed: int, steps: int) -> tuple[Run, Outcome] | None:
    """Return a run's records and its outcome, or None while it is not finished."""
    note = read_note(folder)
    if note is None:
        return None
    run, diverged = read_run(folder), note["diverged"]
    if not run.evals:
        raise ValueError(f"{folder} has no held-out loss; remove it, and the same command trains it again")
    final = run.evals[-1]
    if diverged is None and not math.isfinite(final.loss):
        diverged = final.step
    return run, Outcome(
        label=label,
        peak=peak,
        seed=seed,
        steps=steps,
        loss=None if diverged is not None else final.loss,
        diverged=diverged,
        flops=run.last.flops,
        seconds=run.last.seconds if note.get("jobs", 1) == 1 else None,
        curve=tuple((record.step, record.flops, record.loss) for record in run.evals),
        domains=dict(final.domains),
        denoisers=dict(final.denoisers),
    )
