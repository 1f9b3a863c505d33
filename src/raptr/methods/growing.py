"""What the stacking family shares: a model that starts shallow and gets layers at the start of each stage.

`6-9-12` names the layers of each stage, with the same lengths as RaPTr's schedules. Every layer there is runs in
every step. The methods differ in where new layers come from and where they go: `arranged`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, SupportsIndex

from raptr.growth.plan import Growth, Moments
from raptr.methods.contract import Method, Phase, check_end, random_part
from raptr.subnetworks import Schedule, Shape, Subnetwork
from raptr.subnetworks.schedule import Lengths


@dataclass(frozen=True)
class Growing(Method):
    """A model that grows in depth, stage by stage, to the full one."""

    schedule: Schedule | str | None = None  # layers of the model in each stage; None: the method's default
    lengths: Lengths | None = None
    average: float | None = None
    moments: Moments = "copy"  # what the optimizer knows about new layers

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
            lengths=self.lengths,
            average=self.average,
            fixed=(),
        )

    def settings(self) -> dict[str, Any]:
        """The settings, with the schedule spelt out."""
        return {**super().settings(), "schedule": self.stages.text}

    def default(self) -> str:
        """The sizes unless others are given: those recommended for RaPTr."""
        return Schedule.recommended(self.target.layers, max(self.steps, 4)).text

    @abstractmethod
    def arranged(self, old: int, new: int) -> Growth:
        """How `old` layers become `new` ones."""

    def growth(self, old: Shape, new: Shape) -> Growth:
        """How tensors of shape `old` become those of shape `new`, which has more layers."""
        if old.layers >= new.layers or replace(old, layers=new.layers) != new:
            raise ValueError(f"method {self.name} adds layers; it cannot grow from {old} to {new}")
        return self.arranged(old.layers, new.layers)

    def shape(self, step: SupportsIndex) -> Shape:
        """The full model's shape, with the stage's layers."""
        return replace(self.target, layers=self.stages.stage(step).size)

    def gates(self, step: SupportsIndex) -> tuple[float, ...]:
        """The scale of each layer that there is in step `step`."""
        return (1.0,) * self.stages.stage(step).size

    def subnetwork(self, step: SupportsIndex) -> Subnetwork:
        """Every layer that there is."""
        return Subnetwork(self.gates(step))

    def scaled_layers(self, kept: Sequence[bool], step: int) -> Subnetwork:
        """The kept layers under their gates."""
        return Subnetwork(tuple(gate if runs else 0.0 for gate, runs in zip(self.gates(step), kept, strict=True)))

    def keep(self, stage: int) -> tuple[float, ...]:
        """The share of a stage's steps in which each layer runs."""
        return (1.0,) * self.stages.stages[stage].size

    def phases(self) -> tuple[Phase, ...]:
        """One phase per stage."""
        return tuple(
            Phase(stage.start, stage.stop, self.keep(number), self.target.heads, self.target.parts)
            for number, stage in enumerate(self.stages.stages)
        )

    def evaluated(self, step: SupportsIndex) -> Subnetwork:
        """The model as it was trained last, before it grows for step `step`."""
        return self.subnetwork(self.last_step(step))

    def drawn(self, size: int, draw: int, step: SupportsIndex) -> Subnetwork:
        """A random part of the layers that are judged, under their gates."""
        judged = self.evaluated(step)
        kept, _ = random_part(judged.size, size, draw)
        chosen = {layer for layer, runs in zip(judged.kept, kept, strict=True) if runs}
        return self.trained([layer in chosen for layer in range(judged.layers)], step)
