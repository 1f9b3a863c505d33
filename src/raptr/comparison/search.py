"""Which runs a comparison wants, as a pure function of the outcomes of its finished runs.

An entry's learning rates are compared on the tuning seeds. Once all of these runs are finished and the best rate lies
at the edge of the grid, `widen` extends the grid by a factor of two. The other seeds run at the final best rate only.
"""

from collections.abc import Sequence

from raptr.comparison.outcomes import Outcome
from raptr.comparison.spec import Comparison, Entry, PlannedRun, at
from raptr.comparison.table import best_peak, runs_at
from raptr.evaluation.grid import widened


def wanted(comparison: Comparison, outcomes: Sequence[Outcome]) -> list[PlannedRun]:
    """Return every run that is wanted so far, seed by seed, so that a comparison that is stopped has whole seeds."""
    tuning, others = list(comparison.tune), [seed for seed in comparison.seeds if seed not in comparison.tune]
    searched = {entry.label: _search(comparison, entry, outcomes) for entry in comparison.entries}
    runs = [
        _planned(entry, peak, seed)
        for seed in tuning
        for entry in comparison.entries
        for peak in searched[entry.label][0]
    ]
    for seed in others:
        for entry in comparison.entries:
            best = searched[entry.label][1]
            runs += [] if best is None else [_planned(entry, best, seed)]
    return runs


def _search(comparison: Comparison, entry: Entry, outcomes: Sequence[Outcome]) -> tuple[list[float], float | None]:
    """Return the rates to try on the tuning seeds, and the best one; None until all are tried, or if all diverged."""
    peaks = list(entry.peaks)
    while True:
        # best_peak compares over the seeds that all rates have, which here are the tuning seeds.
        by_peak = {peak: runs_at(outcomes, entry.label, peak) for peak in peaks}
        if not all(set(comparison.tune) <= {run.seed for run in runs} for runs in by_peak.values()):
            return peaks, None
        best = best_peak(by_peak)
        added = widened(peaks, len(entry.peaks), best) if comparison.widen else []
        if not added:
            return peaks, best
        peaks += added


def _planned(entry: Entry, peak: float, seed: int) -> PlannedRun:
    return PlannedRun(entry, peak, seed, at(entry.config, peak=peak, seed=seed))
