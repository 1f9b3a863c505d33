"""How fast a run was, stage by stage, and the speed-up it realised beside the one its FLOPs promise.

Everything comes from differences between consecutive train records of one stage, and their median: what a stage
spends once, on compiling or on filling caches, falls before its first record or into one interval of many.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean, median
from typing import Any

from raptr.report.runs import Run, TrainRecord, labels
from raptr.report.units import counted

# Two runs whose time per step may be compared have these settings and this hardware in common.
SAME_SECTIONS = ("model", "data")
SAME_TRAINING = ("batch", "accumulate", "device", "precision")
SAME_HARDWARE = ("gpu", "processor", "threads")

FIRST_OBJECTIVE = {"name": "mlm"}  # of runs that were recorded before there was another

OWN_STAGE = "its own full stage"


@dataclass(frozen=True)
class Stage:
    """What a step of one stage cost: the median over `intervals` pairs of records; None where there is no pair."""

    number: int
    running: str  # `6 layers, 9 heads`, averaged over the records
    steps: int
    intervals: int
    seconds_per_step: float | None
    tokens_per_second: float | None
    flops_per_step: float | None


@dataclass(frozen=True)
class SpeedUp:
    """How much faster an average step of a run is than a full one: by its FLOPs, and by the clock."""

    run: int  # its place among the runs
    reference: str
    theoretical: float | None = None
    realised: float | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """How much of the theoretical speed-up was realised."""
        return self.realised / self.theoretical if self.realised and self.theoretical else None


def stages(run: Run) -> list[Stage]:
    """The stages of a run that have records, in the order they were run."""
    found, start = [], 0
    for number, group in groupby(run.train, key=lambda record: record.stage):
        records = list(group)
        found.append(_stage(number, records, records[-1].step - start))
        start = records[-1].step
    return found


def speed_ups(runs: Sequence[Run]) -> list[SpeedUp]:
    """Every run but the full ones beside its own full stage, and beside the first full run it compares with."""
    names, measured = labels(runs), [stages(run) for run in runs]
    found = []
    for index, (run, own) in enumerate(zip(runs, measured, strict=True)):
        if run.method == "full":
            continue
        baselines = [other for other in range(len(runs)) if runs[other].method == "full" and _like(run, runs[other])]
        # A run of one stage says nothing by itself, which is worth a line only where no other says more.
        if len(own) > 1 or not baselines:
            found.append(_within(index, run, own))
        if baselines:
            found.append(_compared(index, run, own, names[baselines[0]], measured[baselines[0]]))
    return found


def running(records: Sequence[TrainRecord]) -> str:
    """What ran in the steps of a stage: `6 layers, 9 heads`; heads and MLP parts only where not all ran."""
    widths = {"head": records[-1].heads, "MLP part": records[-1].parts}
    texts = [counted(fmean(record.size for record in records), "layer")]
    return ", ".join([*texts, *(counted(count, word) for word, count in widths.items() if count is not None)])


def _stage(number: int, records: Sequence[TrainRecord], steps: int) -> Stage:
    # A resumed run may leave a record of the killed one behind a younger one; time does not run backwards.
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
    """A run beside its last stage, which is the full model in every method that has stages."""
    planned = run.train[-1].stages if run.train else None
    if planned == 1:
        return SpeedUp(index, OWN_STAGE, note="one stage, so no full one to compare with")
    if planned is None or own[-1].number != planned:
        return SpeedUp(index, OWN_STAGE, note="the full stage has not been reached")
    return _compared(index, run, own, OWN_STAGE, own[-1:])


def _compared(index: int, run: Run, own: Sequence[Stage], reference: str, full: Sequence[Stage]) -> SpeedUp:
    """An average step of the run beside a step of the full model, as the stages in `full` measured it."""
    full_flops = _mean([stage.flops_per_step for stage in full], full)
    full_seconds = _mean([stage.seconds_per_step for stage in full], full)
    # The FLOPs so far are known to the step; times are weighed by stage, so that compiling does not count.
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
    """The mean of a cost per step over stages, weighed by their steps; None unless every stage tells it."""
    known = [cost for cost in costs if cost is not None]
    steps = [stage.steps for stage in measured]
    return fmean(known, weights=steps) if len(known) == len(steps) and any(steps) else None


def _like(run: Run, other: Run) -> bool:
    """Whether two runs' times per step may be compared: one model, data, objective, batch and machine."""

    def shared(of: Run) -> list[Any]:
        training = of.config.get("train")
        return [
            *(of.config.get(section) for section in SAME_SECTIONS),
            of.config.get("objective", FIRST_OBJECTIVE),
            *(training.get(key) for key in SAME_TRAINING if isinstance(training, Mapping)),
            *(of.environment.get(key) for key in SAME_HARDWARE),
        ]

    return shared(run) == shared(other)
