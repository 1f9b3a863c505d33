"""The contract of every method: how training progresses, as pure functions of the step.

    shape(step)          how large the model is
    subnetwork(step)     what runs
    growth(old, new)     how the weights and moments of one shape become those of the next

A method never touches the training loop, and the loop names no method. `phases()` describes a method to plans,
promises and reports. After N steps the model still has the shape of step N - 1 (it grows when step N begins), and
three functions say what is evaluated then:

    evaluated(N)           the full model, or as much of it as there is; scaled by keep probabilities where a method
                           trains without scaling
    trained(kept, N)       layers chosen by the caller, with the scales with which training last ran them
    drawn(size, draw, N)   a random part of a given size, with the scales with which the method trains it

A step may be any integer, those of NumPy and torch too.
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
    """A stretch of steps and what it promises: the mean keep probability of each layer, heads and parts run."""

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
    """One method with its settings; subclasses are final and add their settings as fields."""

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
        """The model's shape in step `step`."""
        self.check_step(step)
        return self.target

    @abstractmethod
    def subnetwork(self, step: SupportsIndex) -> Subnetwork:
        """What runs in step `step`, forward and backward."""

    @abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """The stages of training, in order, covering every step."""

    def scaled_layers(self, kept: Sequence[bool], step: int) -> Subnetwork:
        """The kept layers with the scales that they have in step `step`; unscaled unless the method scales."""
        return Subnetwork(tuple(map(float, kept)))

    def evaluated(self, step: SupportsIndex) -> Subnetwork:
        """The model that is judged after `step` optimizer steps (0 to `steps`)."""
        self.last_step(step)
        return Subnetwork.full(self.target.layers)

    def trained(self, kept: Sequence[bool], step: SupportsIndex) -> Subnetwork:
        """The kept layers after `step` steps, scaled as in the last of them; `kept` has an entry for each layer."""
        last = self.last_step(step)
        layers = self.shape(last).layers
        if len(kept) != layers:
            raise ValueError(f"kept has {len(kept)} entries; one for each of the {layers} layers is allowed")
        return self.scaled_layers(kept, last)

    def drawn(self, size: int, draw: int, step: SupportsIndex) -> Subnetwork:
        """A random part of `size` layers, first and last among them, of the model that is judged after `step` steps."""
        kept, _ = random_part(self.target.layers, size, draw)
        return self.trained(kept, step)

    def growth(self, old: Shape, new: Shape) -> Growth:
        """How tensors of shape `old` become those of shape `new`: never asked of a method of constant shape."""
        raise ValueError(f"method {self.name} has one shape, {self.target}; it cannot grow from {old} to {new}")

    @classmethod
    def own_settings(cls) -> list[str]:
        """The names of the settings that this method has and others may not."""
        common = {field.name for field in fields(Method)}
        return [field.name for field in fields(cls) if field.name not in common]

    def settings(self) -> dict[str, Any]:
        """The method's own settings, resolved: what a run's configuration records."""
        return {name: getattr(self, name) for name in self.own_settings()}

    def phase_index(self, step: SupportsIndex) -> int:
        """The phase (from 0) that step `step` belongs to."""
        step = self.check_step(step)
        return sum(1 for phase in self.phases()[1:] if phase.start <= step)

    def check_step(self, step: SupportsIndex) -> int:
        """The step as an `int`; refuses one outside of training."""
        return checked_step(step, self.steps - 1)

    def last_step(self, step: SupportsIndex) -> int:
        """The last of the first `step` steps (0 to `steps`); step 0 where there was none yet."""
        return max(checked_step(step, self.steps) - 1, 0)


def random_part(layers: int, size: int, draw: int) -> tuple[tuple[bool, ...], tuple[float, ...]]:
    """Which of `layers` layers a part of `size` has, the first and the last among them, and the keep probabilities."""
    if type(size) is not int or not 1 <= size <= layers:
        raise ValueError(f"size is {size!r}; a whole number from 1 to {layers}, the layers there are, is allowed")
    stage = part_of(layers, size)
    return draw_layers(stage, layers, "exact", 1, seed=0, step=draw), keep_probabilities(stage, layers)


def part_of(layers: int, size: int) -> Stage:
    """A stage that draws `size` of `layers` layers, the first and the last always among them; from two layers on."""
    return Stage(0, 1, size, (1, layers) if size > 1 else ())


def check_unit(name: str, value: float) -> None:
    """Refuse a number outside of [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}; a number from 0 to 1 is allowed")


def check_rate(name: str, rate: float | None, average: float | None, least: float, layers: int) -> None:
    """Refuse a rate at which layers are dropped, or the `average` that it is solved from; both cannot be given."""
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
