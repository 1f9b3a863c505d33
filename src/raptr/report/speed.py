"""How fast a run was in each stage, and its realised speed-up beside the one that its FLOPs promise.

The numbers of a stage are medians of differences between its consecutive train records. So one-time costs of a stage,
such as compiling or filling caches, do not count: they fall before its first record, or into one interval of many.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean, median
from typing import Any

from raptr.report.runs import Run, TrainRecord, labels
from raptr.report.units import counted

# Times per step are compared only between runs that agree in these settings and this hardware.
SAME_SECTIONS = ("model", "data")
SAME_TRAINING = ("batch", "accumulate", "device", "precision")
SAME_HARDWARE = ("gpu", "processor", "threads")

FIRST_OBJECTIVE = {"name": "mlm"}  # of older runs, whose configuration names no objective

OWN_STAGE = "its own full stage"


@dataclass(frozen=True)
class Stage:
    """The cost of a step in one stage: the median over `intervals` pairs of records, or None without a pair."""

    number: int
    running: str  # such as `6 layers, 9 heads`, averaged over the records
    steps: int
    intervals: int
    seconds_per_step: float | None
    tokens_per_second: float | None
    flops_per_step: float | None


@dataclass(frozen=True)
class SpeedUp:
    """How much faster an average step of a run is than a full one, by its FLOPs and by the clock."""

    run: int  # its index among the runs
    reference: str
    theoretical: float | None = None
    realised: float | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """The fraction of the theoretical speed-up that was realised."""
        return self.realised / self.theoretical if self.realised and self.theoretical else None


def stages(run: Run) -> list[Stage]:
    """Return the stages of a run that have records, in the order they were run."""
    result, start = [], 0
    for number, group in groupby(run.train, key=lambda record: record.stage):
        records = list(group)
        result.append(_stage(number, records, records[-1].step - start))
        start = records[-1].step
    return result


def speed_ups(runs: Sequence[Run]) -> list[SpeedUp]:
    """Compare every run that is not full training with its own full stage, and with the first comparable full run."""
    names, measured = labels(runs), [stages(run) for run in runs]
    result = []
    for index, (run, own_stages) in enumerate(zip(runs, measured, strict=True)):
        if run.method == "full":
            continue
        baselines = [other for other in range(len(runs)) if runs[other].method == "full" and _like(run, runs[other])]
        # A one-stage run has no full stage to compare with; that is worth a line only if it has no baseline either.
        if len(own_stages) > 1 or not baselines:
            result.append(_within(index, run, own_stages))
        if baselines:
            result.append(_compared(index, run, own_stages, names[baselines[0]], measured[baselines[0]]))
    return result


def running(records: Sequence[TrainRecord]) -> str:
    """Describe what ran in a stage, such as `6 layers, 9 heads`; heads and MLP parts only if not all of them ran."""
    widths = {"head": records[-1].heads, "MLP part": records[-1].parts}
    texts = [counted(fmean(record.size for record in records), "layer")]
    return ", ".join([*texts, *(counted(count, word) for word, count in widths.items() if count is not None)])


def _stage(number: int, records: Sequence[TrainRecord], steps: int) -> Stage:
    # After a resume, an old record may remain between new ones; skip pairs whose time would run backwards.
    intervals = [(old, new) for old, new in pairwise(records) if new.seconds >= old.seconds]
    per_step = [(new.seconds - old.seconds) / (new.step - old.step) for old, new in intervals]
    seconds = median(per_step) or None if per_step else None
    tokens = [(new.tokens - old.tokens) / (new.step - old.step) for old, new in intervals]
    flops = [(new.flops - old.flops) / (new.step - old.step) for old, new in intervals]
    return Stage(
        number=number,
        running=running(records),
        steps=steps,
        intervals=len(intervals),
        seconds_per_step=seconds,
        tokens_per_second=median(tokens) / seconds if seconds else None,
        flops_per_step=median(flops) if flops else None,
    )


def _within(index: int, run: Run, own: Sequence[Stage]) -> SpeedUp:
    """Compare a run with its own last stage, which is the full model in every method that has stages."""
    planned = run.train[-1].stages if run.train else None
    if planned == 1:
        return SpeedUp(index, OWN_STAGE, note="one stage, so no full one to compare with")
    if planned is None or own[-1].number != planned:
        return SpeedUp(index, OWN_STAGE, note="the full stage has not been reached")
    return _compared(index, run, own, OWN_STAGE, own[-1:])


def _compared(index: int, run: Run, own: Sequence[Stage], reference: str, full: Sequence[Stage]) -> SpeedUp:
    """Compare an average step of the run with a step of the full model, as measured by the stages in `full`."""
    full_flops = _mean([stage.flops_per_step for stage in full], full)
    full_seconds = _mean([stage.seconds_per_step for stage in full], full)
    # The FLOPs so far are exact. Times are medians weighted by stage, so that compiling does not count.
    last = run.train[-1] if run.train else None
    flops = last.flops / last.step if last and last.step else None
    seconds = _mean([stage.seconds_per_step for stage in own], own)
    notes = [] if full_seconds and seconds else ["too few train records to tell the time per step"]
    if run.planned is not None and run.last.step < run.planned:
        notes.append(f"after {run.last.step:,} of {run.planned:,} steps")
    return SpeedUp(
        run=index,
        reference=reference,
        theoretical=full_flops / flops if full_flops and flops else None,
        realised=full_seconds / seconds if full_seconds and seconds else None,
        note="; ".join(notes),
    )


def _mean(costs: Sequence[float | None], measured: Sequence[Stage]) -> float | None:
    """Return the mean of a cost per step over stages, weighted by their steps; None unless every stage has it."""
    known = [cost for cost in costs if cost is not None]
    steps = [stage.steps for stage in measured]
    return fmean(known, weights=steps) if len(known) == len(steps) and any(steps) else None


def _like(run: Run, other: Run) -> bool:
    """Return whether two runs' times per step compare: same model, data, objective, batch and machine."""

    def shared(of: Run) -> list[Any]:
        training = of.config.get("train")
        return [
            *(of.config.get(section) for section in SAME_SECTIONS),
            of.config.get("objective", FIRST_OBJECTIVE),
            *(training.get(key) for key in SAME_TRAINING if isinstance(training, Mapping)),
            *(of.environment.get(key) for key in SAME_HARDWARE),
        ]

    return shared(run) == shared(other)
