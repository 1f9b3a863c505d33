"""What the finished runs of a comparison came to, read from their folders."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raptr.report.runs import Run, read_run

RUNS = "runs"
FULL = "full"  # the entries that all others are compared with: full training, at its whole length and at a reduced one
REDUCED = "full (reduced)"
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """What a finished run came to; `loss` is None where it diverged, at step `diverged`."""

    label: str
    peak: float
    seed: int
    steps: int
    loss: float | None
    diverged: int | None
    flops: float
    seconds: float | None  # None: others ran beside it
    curve: tuple[tuple[int, float, float], ...] = ()  # on the way: step, FLOPs, held-out loss
    domains: Mapping[str, float] = field(default_factory=dict)  # the final loss on each domain, where there are several
    denoisers: Mapping[str, float] = field(default_factory=dict)  # the same of each denoiser of UL2
    scores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # on tasks, by column, where it was judged


def read_note(folder: Path) -> dict[str, Any] | None:
    """What a finished run notes beside its metrics: the step it diverged in, its data, how many ran at once."""
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
    """A run's records and what it came to; None while it is not finished."""
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
