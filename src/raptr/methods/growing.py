"""What the stacking methods share: a model that starts shallow and gets new layers at the start of each stage.

`6-9-12` names the model's layers in each stage. Stage lengths are set as in RaPTr's schedules. By default every step
runs all layers that the model has. The methods differ in where new layers come from and where they go: `arranged`.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, SupportsIndex

from raptr.growth.plan import Growth, Moments
from raptr.methods.contract import Method, Phase, check_end, random_part
from raptr.subnetworks import Schedule, Shape, Subnetwork
from raptr.subnetworks.schedule import Lengths, Stage, recommended_sizes


@dataclass(frozen=True)
class Growing(Method):
    """A model that grows in depth, stage by stage, to the full model."""

    schedule: Schedule | str | None = None  # layers of the model in each stage; None: the method's default
    lengths: Lengths | None = None
    average: float | None = None
    moments: Moments = "copy"  # the optimizer state of new layers: see growth/plan.py

    def __post_init__(self) -> None:
        super().__post_init__()
        check_end(self.name, self.stages)
        if self.stages.full_start:
            raise ValueError(f"schedule has a full-model start; {self.name} grows, so only rising sizes are allowed")

    @cached_property
    def stages(self) -> Schedule:
        """The schedule, read from the settings."""
        if isinstance(self.schedule, Schedule):
            if (self.lengths, self.average) != (None, None):
                raise ValueError("lengths and average belong to a schedule given as text")
            self.schedule.check_model(self.target.layers, self.steps)
            return self.schedule
        return Schedule.parse(
            self.default() if self.schedule is None else self.schedule,
            layers=self.target.layers,
            steps=self.steps,
            fixed=(),
            **self._timing,
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings, with the schedule and its lengths spelt out."""
        return {**super().settings(), "schedule": self.stages.text, **self._timing}

    def default(self) -> str:
        """Return the default sizes: those recommended for RaPTr."""
        return recommended_sizes(self.target.layers)

    def default_average(self) -> float | None:
        """Return the average size to fit stages to if no setting of the schedule is given; None: equal stages."""
        return None

    @property
    def _timing(self) -> dict[str, Any]:
        """The settings that decide how long the stages are: `lengths` and `average`."""
        if (self.schedule, self.lengths, self.average) == (None, None, None):
            average = self.default_average()
            return {"lengths": None if average is None else "equal", "average": average}
        return {"lengths": self.lengths, "average": self.average}

    @abstractmethod
    def arranged(self, old: int, new: int) -> Growth:
        """Return how a model of `old` layers becomes one of `new` layers."""

    def growth(self, old: Shape, new: Shape) -> Growth:
        if old.layers >= new.layers or replace(old, layers=new.layers) != new:
            raise ValueError(f"method {self.name} adds layers; it cannot grow from {old} to {new}")
        return self.arranged(old.layers, new.layers)

    def stage_shape(self, stage: int) -> Shape:
        """Return the full model's shape, but with the number of layers of this stage."""
        return replace(self.target, layers=self.stages.stages[stage].size)

    def shape(self, step: SupportsIndex) -> Shape:
        return self.stage_shape(self.stages.index(step))

    def subnetwork(self, step: SupportsIndex) -> Subnetwork:
        """Return all layers of the current model."""
        return self.scaled_layers((True,) * self.shape(step).layers, self.check_step(step))

    def keep(self, stage: int) -> tuple[float, ...]:
        """Return the share of a stage's steps in which each layer runs."""
        return (1.0,) * self.stages.stages[stage].size

    def phases(self) -> tuple[Phase, ...]:
        shapes = [self.stage_shape(number) for number in range(len(self.stages.stages))]
        return tuple(
            Phase(stage.start, stage.stop, self.keep(number), shape.heads, shape.parts)
            for number, (stage, shape) in enumerate(zip(self.stages.stages, shapes, strict=True))
        )

    def evaluated(self, step: SupportsIndex) -> Subnetwork:
        """Return the model as the last step trained it, before any growth at `step`."""
        return self.subnetwork(self.last_step(step))

    def drawn(self, size: int, draw: int, step: SupportsIndex) -> Subnetwork:
        """Return a random part of the layers that `evaluated` runs, with their gates."""
        judged = self.evaluated(step)
        kept, _ = random_part(judged.size, size, draw)
        chosen = {layer for layer, runs in zip(judged.kept, kept, strict=True) if runs}
        return self.trained([layer in chosen for layer in range(judged.layers)], step)


@dataclass(frozen=True)
class GrowingOnce(Growing):
    """A model that grows once, from a shallow stage to the full model."""

    growth_at: float | None = None  # the share of the steps before the growth; None: see `_share`

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.stages.stages) > 2:
            raise ValueError(
                f"schedule {self.stages.text} has {len(self.stages.stages)} stages; {self.name} grows once, so one or "
                "two sizes are allowed"
            )
        if self.growth_at is None:
            return
        if self._timed:
            raise ValueError(
                f"growth_at is {self.growth_at}, but a Schedule, lengths or average says when the model grows too. "
                "Use one of them."
            )
        if len(self.stages.stages) == 1:
            raise ValueError(f"growth_at is {self.growth_at}, but the schedule {self.stages.text} never grows")
        if not 1 <= self._step(self.growth_at) < self.steps:
            raise ValueError(
                f"growth_at is {self.growth_at}; a share of the {self.steps} steps above 0 and below 1 is allowed, "
                "with at least one step before the growth and one after it"
            )

    @cached_property
    def stages(self) -> Schedule:
        """The schedule, with the growth at `growth_at` unless other settings decide when the model grows."""
        schedule = super().stages
        if self._timed or len(schedule.stages) != 2:
            return schedule
        small, full = (stage.size for stage in schedule.stages)
        step = self._step(self._share(small, full) if self.growth_at is None else self.growth_at)
        step = min(max(step, 1), self.steps - 1)
        return Schedule(schedule.layers, (Stage(0, step, small, ()), Stage(step, self.steps, full, ())))

    def settings(self) -> dict[str, Any]:
        """Return the settings, with `growth_at` spelt out unless other settings decide when the model grows."""
        share = self.growth_at
        if share is None and (self.lengths, self.average) == (None, None) and self.stages.boundaries:
            share = self.stages.boundaries[0] / self.steps
        return {**super().settings(), "growth_at": share}

    @property
    def _timed(self) -> bool:
        """Whether a Schedule, `lengths` or `average` decides when the model grows, not `growth_at`."""
        return isinstance(self.schedule, Schedule) or (self.lengths, self.average) != (None, None)

    def _share(self, small: int, full: int) -> float:
        """Return the share of steps before the growth: three quarters of all layers run on average; at most 0.5."""
        return min(0.25 * full / (full - small), 0.5) if small < full else 0.5

    def _step(self, share: float) -> int:
        """Return the first step of the full model, halves up; 0 if the share is not between 0 and 1."""
        return int(share * self.steps + 0.5) if 0 < share < 1 else 0
