"""The contract of every method: how training progresses, as pure functions of the step.

    shape(step)          the model's numbers of layers, heads and MLP parts
    subnetwork(step)     what runs
    growth(old, new)     how the weights and moments of one shape become those of the next

A method never touches the training loop, and the loop names no method. `phases()` describes a method to plans and
reports. After N steps the model still has the shape of step N - 1 (it grows when step N begins), and three functions
say what is evaluated then:

    evaluated(N)           all of the model so far; scaled by keep probabilities if the method trains without scaling
    trained(kept, N)       layers chosen by the caller, with the scales of the last training step
    drawn(size, draw, N)   a random part of a given size, scaled as the method trains it

A step may be any integer, including those of NumPy and torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, SupportsIndex

from raptr.growth.plan import Growth
from raptr.subnetworks import Schedule, Shape, Stage, Subnetwork
from raptr.subnetworks.sampling import draw_layers, keep_probabilities
from raptr.subnetworks.schedule import checked_step


@dataclass(frozen=True)
class Phase:
    """A stretch of steps, with each layer's mean keep probability and the numbers of heads and parts that run."""

    start: int
    stop: int
    keep: tuple[float, ...]
    heads: int
    parts: int

    @property
    def size(self) -> float:
        """The mean number of layers that run."""
        return sum(self.keep)


@dataclass(frozen=True)
class Method(ABC):
    """A method with its settings. Every method is a final subclass with its own settings as fields."""

    target: Shape
    steps: int
    seed: int

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise ValueError(f"steps is {self.steps!r}; a whole number from 1 on is allowed")
        if type(self.seed) is not int or self.seed < 0:
            raise ValueError(f"seed is {self.seed!r}; a whole number from 0 on is allowed")

    def shape(self, step: SupportsIndex) -> Shape:
        """Return the model's shape in step `step`."""
        self.check_step(step)
        return self.target

    @abstractmethod
    def subnetwork(self, step: SupportsIndex) -> Subnetwork:
        """Return what runs in step `step`, forward and backward."""

    @abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of training, in order; together they cover every step."""

    def scaled_layers(self, kept: Sequence[bool], step: int) -> Subnetwork:
        """Return the kept layers with the scales that they have in step `step`; by default unscaled."""
        return Subnetwork(tuple(map(float, kept)))

    def evaluated(self, step: SupportsIndex) -> Subnetwork:
        """Return the subnetwork that is evaluated after `step` optimizer steps (0 to `steps`)."""
        self.last_step(step)
        return Subnetwork.full(self.target.layers)

    def trained(self, kept: Sequence[bool], step: SupportsIndex) -> Subnetwork:
        """Return the kept layers after `step` steps, scaled as in the last step; `kept` has an entry for each layer."""
        last = self.last_step(step)
        layers = self.shape(last).layers
        if len(kept) != layers:
            raise ValueError(f"kept has {len(kept)} entries; one for each of the {layers} layers is allowed")
        return self.scaled_layers(kept, last)

    def drawn(self, size: int, draw: int, step: SupportsIndex) -> Subnetwork:
        """Return a random part of `size` layers, first and last included, of the model evaluated after `step` steps."""
        kept, _ = random_part(self.target.layers, size, draw)
        return self.trained(kept, step)

    def growth(self, old: Shape, new: Shape) -> Growth:
        """Return how tensors of shape `old` become those of shape `new`. A ValueError if the method has one shape."""
        raise ValueError(f"method {self.name} has one shape, {self.target}; it cannot grow from {old} to {new}")

    @classmethod
    def own_settings(cls) -> list[str]:
        """Return the names of this method's own settings, without those that all methods share."""
        common = {field.name for field in fields(Method)}
        return [field.name for field in fields(cls) if field.name not in common]

    def settings(self) -> dict[str, Any]:
        """Return the method's own settings, resolved, as a run's configuration records them."""
        return {name: getattr(self, name) for name in self.own_settings()}

    def phase_index(self, step: SupportsIndex) -> int:
        """Return the number of the phase (from 0) that `step` belongs to."""
        step = self.check_step(step)
        return sum(1 for phase in self.phases()[1:] if phase.start <= step)

    def check_step(self, step: SupportsIndex) -> int:
        """Return the step as an `int`; raise a ValueError if it is outside of training."""
        return checked_step(step, self.steps - 1)

    def last_step(self, step: SupportsIndex) -> int:
        """Return the number of the last step after `step` steps (0 to `steps`) have run; 0 if none has."""
        return max(checked_step(step, self.steps) - 1, 0)


def random_part(layers: int, size: int, draw: int) -> tuple[tuple[bool, ...], tuple[float, ...]]:
    """Draw `size` of `layers` layers, first and last included; return which run, and their keep probabilities."""
    if type(size) is not int or not 1 <= size <= layers:
        raise ValueError(f"size is {size!r}; a whole number from 1 to {layers}, the layers there are, is allowed")
    stage = part_of(layers, size)
    return draw_layers(stage, layers, "exact", 1, seed=0, step=draw), keep_probabilities(stage, layers)


def part_of(layers: int, size: int) -> Stage:
    """Return a stage that draws `size` of `layers` layers; from size 2 on, the first and the last always run."""
    return Stage(0, 1, size, (1, layers) if size > 1 else ())


def check_unit(name: str, value: float) -> None:
    """Refuse a number outside of [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}; a number from 0 to 1 is allowed")


def check_rate(name: str, rate: float | None, average: float | None, least: float, layers: int) -> None:
    """Refuse a drop rate that is out of range, or an `average` to solve it from that is, or both settings at once."""
    if rate is not None:
        check_unit(name, rate)
        if average is not None:
            raise ValueError(f"{name} and average are both given; one of them is allowed")
    elif average is not None:
        check_unit("average", average)
        if average < least:
            raise ValueError(f"average is {average!r}; with {layers} layers {least:.3f} to 1 is allowed")


def check_end(name: str, schedule: Schedule) -> None:
    """Refuse a schedule whose last stage is not the full model."""
    last = schedule.stages[-1].size
    if last != schedule.layers:
        raise ValueError(
            f"schedule ends with {last} layers; the last stage of {name} must run all {schedule.layers} of the model"
        )
