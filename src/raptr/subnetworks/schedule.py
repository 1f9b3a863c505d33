"""The stages of progressive subnetwork training (the paper's section 4 and appendix on schedule selection).

`6-8-10-12` names the average subnetwork size of each stage. The lengths of the stages are equal, proportional (to
1, 2, 3, …) or fitted to a target average size: the fit starts from the closer of these two, and moves the same number
of steps from each of the other stages to the last (or back). Boundaries are exact fractions until they are rounded,
once.
"""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal, SupportsIndex

Lengths = Literal["equal", "proportional"]
LENGTHS: tuple[Lengths, ...] = ("equal", "proportional")
Fixed = Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Stage:
    """Steps `start` to `stop` (exclusive), in which `size` layers run on average.

    The layers in `fixed` (ascending, counted from 1) always run.
    """

    start: int
    stop: int
    size: int
    fixed: tuple[int, ...]

    def probability(self, layers: int) -> Fraction:
        """Return the keep probability of a layer outside the fixed set; 1 if there is no such layer."""
        free = layers - len(self.fixed)
        return Fraction(self.size - len(self.fixed), free) if free else Fraction(1)


@dataclass(frozen=True)
class Schedule:
    """Consecutive stages from step 0 on, whose subnetworks never shrink (except after a full-model start)."""

    layers: int
    stages: tuple[Stage, ...]
    full_start: int = 0

    def __post_init__(self) -> None:
        text = self.text
        for stage in self.stages:
            if not 1 <= stage.size <= self.layers:
                raise ValueError(
                    f"schedule {text}: size {stage.size} is out of range; 1 to {self.layers} layers are allowed"
                )
            if stage.size < len(stage.fixed):
                raise ValueError(
                    f"schedule {text}: size {stage.size} is smaller than the fixed set {_set(stage.fixed)}; "
                    f"at least {len(stage.fixed)} is allowed"
                )
            if stage.stop <= stage.start:
                raise ValueError(
                    f"schedule {text}: a stage of size {stage.size} would be empty "
                    f"(steps {stage.start} to {stage.stop}); give more steps, fewer stages, another average "
                    "or a shorter full start"
                )
        growing = self.stages[1:] if self.full_start else self.stages
        for before, after in pairwise(growing):
            if after.size < before.size:
                raise ValueError(f"schedule {text}: size falls from {before.size} to {after.size}; it may only grow")
            if not set(before.fixed) <= set(after.fixed):
                raise ValueError(
                    f"schedule {text}: the fixed set {_set(before.fixed)} loses a layer in the next stage "
                    f"{_set(after.fixed)}; it may only grow"
                )
            if after.probability(self.layers) < before.probability(self.layers):
                raise ValueError(
                    f"schedule {text}: with the fixed sets {_set(before.fixed)} and {_set(after.fixed)} the keep "
                    f"probability of the other layers falls from {float(before.probability(self.layers)):.3g} to "
                    f"{float(after.probability(self.layers)):.3g}; it may only rise"
                )

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        layers: int,
        steps: int,
        lengths: Lengths | None = None,
        average: float | None = None,
        full_start: int = 0,
        fixed: Fixed = (1, -1),
    ) -> "Schedule":
        """Read `6-8-10-12` over `steps` steps of a model with `layers` layers.

        `lengths` defaults to equal. With `average` the lengths are fitted to this average size, starting from
        `lengths` or, without it, from the closer of equal and proportional. `fixed` counts layers from 1, negative
        numbers from the end; it is one set for all stages, or one per stage. `full_start` steps of full training come
        first and are taken from the last stage.
        """
        _whole("layers", layers, 1)
        _whole("steps", steps, 1)
        _whole("full_start", full_start, 0)
        sizes = parse_sizes(text)
        if lengths is not None and lengths not in LENGTHS:
            raise ValueError(f"lengths is {lengths!r}; allowed: {', '.join(LENGTHS)}")
        if average is None:
            ends = _ends(lengths or "equal", len(sizes), steps)
        else:
            if not (isinstance(average, int | float) and 1 <= average <= layers):
                raise ValueError(f"average is {average!r}; a number from 1 to {layers} is allowed")
            ends = _fitted(sizes, lengths, Fraction(average).limit_denominator(10**9), steps, text)
        boundaries = [_rounded(end) for end in ends]
        sets = _fixed_sets(fixed, len(sizes), layers)
        starts = [0, *boundaries[:-1]]
        stages = [Stage(*row) for row in zip(starts, boundaries, sizes, sets, strict=True)]
        schedule = cls(layers=layers, stages=tuple(stages))
        if not full_start:
            return schedule
        last = stages[-1].stop - stages[-1].start
        if last <= full_start:
            enough = steps * (full_start + 1) // last + 1
            raise ValueError(
                f"full_start is {full_start}, but it is taken from the last stage, which has {last} of {steps} "
                f"steps. Use a full_start below {last}, or at least {enough} steps."
            )
        shifted = [Stage(s.start + full_start, min(s.stop + full_start, steps), s.size, s.fixed) for s in stages]
        return cls(layers=layers, stages=(Stage(0, full_start, layers, sets[0]), *shifted), full_start=full_start)

    @classmethod
    def recommended(cls, layers: int, steps: int) -> "Schedule":
        """Return the schedule the paper advises: 4 equal stages of L/2, 2L/3, 5L/6 and L layers (halves round up)."""
        return cls.parse(recommended_sizes(layers), layers=layers, steps=steps)

    def check_model(self, layers: int, steps: int) -> None:
        """Refuse numbers of layers or steps other than those that the schedule was made for."""
        if (self.layers, self.steps) != (layers, steps):
            raise ValueError(
                f"schedule is made for {self.layers} layers and {self.steps} steps; "
                f"{layers} layers and {steps} steps are allowed"
            )

    @property
    def text(self) -> str:
        """The sizes as written in settings, such as `6-8-10-12`, without a full-model start."""
        return "-".join(str(stage.size) for stage in self.stages[1 if self.full_start else 0 :])

    @property
    def steps(self) -> int:
        return self.stages[-1].stop

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The first step of every stage but the first."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def average(self) -> float:
        """The mean subnetwork size over all steps: `average / layers` is the paper's relative FLOPs."""
        total = sum(stage.size * (stage.stop - stage.start) for stage in self.stages)
        return total / self.steps

    def index(self, step: SupportsIndex) -> int:
        """Return the number of the stage (from 0) that `step` belongs to."""
        step = checked_step(step, self.steps - 1)
        return sum(1 for boundary in self.boundaries if boundary <= step)

    def stage(self, step: SupportsIndex) -> Stage:
        return self.stages[self.index(step)]


def checked_step(step: SupportsIndex, last: int) -> int:
    """Return the step as an `int`; raise a ValueError unless it is an integer, of NumPy or torch too, from 0 to `last`.

    Hashed without this conversion, those integers would overflow or draw other layers.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or "bool" in (type(step).__name__, str(getattr(step, "dtype", "")).removeprefix("torch.")):
        raise ValueError(f"step is {step!r}; a whole number from 0 to {last} is allowed")
    if not 0 <= number <= last:
        raise ValueError(f"step is {number}; 0 to {last} are allowed")
    return number


def recommended_sizes(layers: int) -> str:
    """Return the sizes of `Schedule.recommended`, such as `6-8-10-12` for 12 layers."""
    smallest = min(2, layers)  # the first and the last layer always run
    return "-".join(str(max(smallest, (2 * (3 + i) * layers + 6) // 12)) for i in range(4))


def parse_sizes(text: str, name: str = "schedule") -> tuple[int, ...]:
    """Read `6-8-10-12` as (6, 8, 10, 12)."""
    if not isinstance(text, str) or not re.fullmatch(r"\d+(-\d+)*", text):
        raise ValueError(f"{name} is {text!r}; sizes joined by hyphens are allowed, such as 6-8-10-12")
    return tuple(int(size) for size in text.split("-"))


def _ends(lengths: Lengths, stages: int, steps: int) -> list[Fraction]:
    """Return the step at which each stage ends, unrounded."""
    if lengths == "equal":
        return [Fraction(i * steps, stages) for i in range(1, stages + 1)]
    return [Fraction(i * (i + 1) * steps, stages * (stages + 1)) for i in range(1, stages + 1)]


def _mean(sizes: Sequence[int], ends: Sequence[Fraction]) -> Fraction:
    starts = [Fraction(0), *ends[:-1]]
    total = sum((size * (end - start) for size, start, end in zip(sizes, starts, ends, strict=True)), Fraction(0))
    return total / ends[-1]


def _fitted(sizes: Sequence[int], lengths: Lengths | None, average: Fraction, steps: int, text: str) -> list[Fraction]:
    """Return the stages' ends after moving x steps from each other stage to the last, so that the mean is `average`."""
    candidates = [_ends(kind, len(sizes), steps) for kind in ([lengths] if lengths else LENGTHS)]
    ends = min(candidates, key=lambda candidate: abs(_mean(sizes, candidate) - average))
    gap = sum(sizes[-1] - size for size in sizes[:-1])
    missing = (average - _mean(sizes, ends)) * steps
    if gap == 0:
        if missing:
            raise ValueError(f"schedule {text}: average is {float(average):g}; only {sizes[-1]} is possible")
        return ends
    x = missing / gap
    moved = [end - (i + 1) * x for i, end in enumerate(ends[:-1])] + [ends[-1]]
    starts = [0, *map(_rounded, moved[:-1])]
    if any(_rounded(end) <= start for start, end in zip(starts, moved, strict=True)):
        raise ValueError(
            f"schedule {text}: average {float(average):g} over {steps} steps would leave a stage empty; "
            f"allowed is what keeps every stage, near {float(_mean(sizes, ends)):g}"
        )
    return moved


def _rounded(value: Fraction) -> int:
    """Round to the nearest whole number, halves up."""
    return (2 * value + 1) // 2


def _fixed_sets(fixed: Fixed, stages: int, layers: int) -> list[tuple[int, ...]]:
    if not isinstance(fixed, list | tuple):
        raise ValueError(f"fixed is {fixed!r}; a list of layers is allowed, or one list for each stage")
    rows = list(fixed)
    if any(not isinstance(row, int) for row in rows):
        if any(isinstance(row, int) for row in rows) or len(rows) != stages:
            raise ValueError(f"fixed is {fixed!r}; one set of layers, or one set for each of {stages} stages")
        return [_fixed_set(row, layers) for row in rows]
    return [_fixed_set(rows, layers)] * stages


def _fixed_set(fixed: Sequence[int], layers: int) -> tuple[int, ...]:
    """Turn layers counted from 1, or backwards from -1, into ascending numbers from 1."""
    for layer in fixed:
        if type(layer) is not int or not 1 <= abs(layer) <= layers:
            raise ValueError(f"fixed has layer {layer!r}; 1 to {layers}, or -1 to -{layers}, are allowed")
    return tuple(sorted({layer if layer > 0 else layers + 1 + layer for layer in fixed}))


def _set(layers: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, layers)) + "}"


def _whole(name: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}; a whole number from {least} on is allowed")
