"""Which runs a comparison wants, as a pure function of what its finished runs came to.

An entry's learning rates are compared on the tuning seeds. When all of these runs are finished, the grid is widened by
a factor of two where its best rate lies at its edge (`widen`), and then the other seeds run at the best rate only.
"""

from collections.abc import Sequence

from raptr.comparison.outcomes import Outcome
from raptr.comparison.spec import Comparison, Entry, PlannedRun, at
from raptr.comparison.table import best_peak, runs_at
from raptr.evaluation.grid import widened


def wanted(comparison: Comparison, outcomes: Sequence[Outcome]) -> list[PlannedRun]:
    """Every run that is wanted by now, seed by seed, so that a comparison that was stopped has whole seeds."""
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
    """The learning rates to try on the tuning seeds, and the best one once all are tried."""
    peaks = list(entry.peaks)
    while True:
        # Of the seeds, best_peak takes those that all rates have: the tuning seeds.
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
