"""The loss curves of runs as short lists of numbers, thinned so that the pages of long runs stay small."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from raptr.report.plots import smooth
from raptr.report.runs import EvalRecord, Run, TrainRecord, labels
from raptr.report.speed import stages
from raptr.report.units import FLOP_PREFIXES, scale, time_unit

POINTS = 2000  # in a line, at most: a wide screen has no more pixels
DIGITS = 6


def axes(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return what losses can be plotted against: a record's field, its names, its unit and the unit's size."""
    flops, prefix = scale(max(run.last.flops for run in runs), FLOP_PREFIXES)
    seconds, unit = time_unit(max(run.last.seconds for run in runs))
    keys = ("key", "name", "label", "unit", "size", "whole")
    rows = (
        ("step", "steps", "steps", "", 1, True),
        ("flops", "FLOPs", f"training compute of the whole model ({prefix}FLOP)", f"{prefix}FLOP", flops, False),
        ("seconds", "time", f"training time without evaluation ({unit})", unit, seconds, False),
    )
    return [dict(zip(keys, row, strict=True)) for row in rows]


def curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return for every run its two lines, and its stages with the point where each ends."""
    result = []
    for name, run in zip(labels(runs), runs, strict=True):
        ends = [*run.transitions, run.last]
        final_loss = run.evals[-1].loss if run.evals else math.nan
        trained = smooth([record.loss for record in run.train], [record.stage for record in run.train])
        result.append(
            {
                "name": name,
                "final": final_loss if math.isfinite(final_loss) else None,  # unrounded: the page rounds it
                "held": _line(run.evals, [record.loss for record in run.evals]),
                "train": _line(run.train, trained),
                "stages": [
                    {
                        "text": stage.running,
                        "step": end.step,
                        "flops": _number(end.flops),
                        "seconds": _number(end.seconds),
                    }
                    for stage, end in zip(stages(run), ends, strict=False)
                ],
            }
        )
    return result


def thin(values: Sequence[float], limit: int = POINTS) -> list[int]:
    """Return the indices of at most `limit` values that keep a line's look: both ends, and the extremes of buckets."""
    if len(values) <= limit:
        return list(range(len(values)))
    array = np.asarray(values, dtype=float)
    finite = np.isfinite(array)
    low, high = np.where(finite, array, np.inf), np.where(finite, array, -np.inf)
    edges = np.linspace(0, len(array), (limit - 2) // 2 + 1).astype(int).tolist()
    kept = {0, len(array) - 1}
    for start, stop in pairwise(edges):
        kept |= {start + int(low[start:stop].argmin()), start + int(high[start:stop].argmax())}
    return sorted(kept)


def _line(
    records: Sequence[TrainRecord] | Sequence[EvalRecord], losses: Sequence[float]
) -> dict[str, list[float | None]]:
    kept = thin(losses)
    return {
        "step": [records[index].step for index in kept],
        "flops": [_number(records[index].flops) for index in kept],
        "seconds": [_number(records[index].seconds) for index in kept],
        "loss": [_number(losses[index]) for index in kept],
    }


def _number(value: float) -> float | None:
    """Return a number with as many digits as a plot can show; None for what JSON cannot hold."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
