"""RaPTr, random part training (Panigrahi et al., "Efficient Stagewise Pretraining via Progressive
Subnetworks", section 2.1, algorithm 1 and the appendix on scaling).

Stage s runs a random (p_s, I_s)-subnetwork: a subset of the layers that always contains I_s. The numbers of heads and
MLP parts can grow over the same stages (section 4.3), alone or together with depth, a combination that the paper
leaves open. Each layer draws its heads and parts independently. All steps of a stage run the same number of layers
(except under Bernoulli selection), heads and MLP parts, so their shapes are static.

Deviations: each step runs exactly k layers by default, as the paper implements it; Bernoulli selection, as the paper
defines it, is a setting. Layers are not scaled by default; the paper uses the square root. Without scaling, evaluation
multiplies a layer by its keep probability p, as stochastic depth does; the paper's text says 1/p.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, SupportsIndex, final

from raptr.methods.axes import unit_counts, whole_depth
from raptr.methods.contract import Method, Phase, check_end, random_part
from raptr.subnetworks import Schedule, Subnetwork
from raptr.subnetworks.sampling import (
    HEADS,
    PARTS,
    Selection,
    check_groups,
    draw_layers,
    draw_units,
    keep_probabilities,
)
from raptr.subnetworks.scaling import Scaling, scales
from raptr.subnetworks.schedule import Fixed, Lengths, Stage, recommended_sizes
from raptr.subnetworks.value import Scaled


@final
@dataclass(frozen=True)
class RaPTr(Method):
    """Each step trains a random subnetwork; subnetworks grow in stages to the full model."""

    # Layers run in each stage; None: the recommended sizes, or all layers if heads or parts are set.
    schedule: Schedule | str | None = None
    lengths: Lengths | None = None
    average: float | None = None
    full_start: int = 0
    fixed: Fixed = (1, -1)
    selection: Selection = "exact"
    groups: int = 1
    scaling: Scaling = "none"  # best in our measurements (docs/results/choices.md); the paper's is sqrt
    scaled: Scaled = "layer"
    heads: str | None = None  # heads run in each stage, such as 6-8-10-12; None: all
    parts: str | None = None  # MLP parts run in each stage, such as 1-2-3-4; None: all
    hold: int = 1  # consecutive steps that share one draw
    mirrored: bool = False  # every second draw is the opposite of the previous one: see sampling.py
    subsets: int | None = None  # number of draws, used in turn; None: every draw is new
    # The output of k of n heads (parts) is scaled by (n / k) to this power; 0 was best in the comparison scale-6x256.
    width_exponent: float = 0.0

    name: ClassVar[str] = "raptr"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width_exponent not in (0, 0.5, 1):
            raise ValueError(f"width_exponent is {self.width_exponent!r}; allowed: 0, 0.5, 1")
        if type(self.hold) is not int or self.hold < 1:
            raise ValueError(f"hold is {self.hold!r}; a whole number of steps from 1 on is allowed")
        least = 2 if self.mirrored else 1
        if self.subsets is not None and (type(self.subsets) is not int or self.subsets < least or self.subsets % least):
            allowed = "an even number" if self.mirrored else "a number"
            raise ValueError(f"subsets is {self.subsets!r}; {allowed} from {least} on is allowed")
        if self.selection == "bernoulli" and self.groups != 1:
            raise ValueError(f"groups is {self.groups}; with selection bernoulli only 1 is allowed")
        check_end(self.name, self.stages)
        for stage in self.stages.stages:
            check_groups(stage, self.target.layers, self.groups)
        assert len(self.head_counts) == len(self.part_counts) == len(self.stages.stages)

    @cached_property
    def stages(self) -> Schedule:
        """The schedule, parsed from the settings unless one is given as a `Schedule`."""
        layers, ready = self.target.layers, self.schedule
        if isinstance(ready, Schedule):
            defaults = (None, None, 0, (1, -1))
            if (self.lengths, self.average, self.full_start, self.fixed) != defaults:
                raise ValueError("lengths, average, full_start and fixed belong to a schedule given as text")
            ready.check_model(layers, self.steps)
            return ready
        if ready is None:
            whole = whole_depth(layers, self.heads, self.parts)
            ready = recommended_sizes(layers) if whole is None else whole
        return Schedule.parse(
            ready,
            layers=layers,
            steps=self.steps,
            lengths=self.lengths,
            average=self.average,
            full_start=self.full_start,
            fixed=self.fixed,
        )

    @cached_property
    def head_counts(self) -> tuple[int, ...]:
        return unit_counts("heads", self.heads, self.target.heads, self.stages)

    @cached_property
    def part_counts(self) -> tuple[int, ...]:
        return unit_counts("parts", self.parts, self.target.parts, self.stages)

    def settings(self) -> dict[str, Any]:
        settings = {**super().settings(), "schedule": self.stages.text}
        if self.heads is None and self.parts is None:
            del settings["width_exponent"]  # has no effect here, so runs that differ in it are the same run
        return settings

    def subnetwork(self, step: SupportsIndex) -> Subnetwork:
        step = self.check_step(step)
        index = self.stages.index(step)
        heads, parts = self.head_counts[index], self.part_counts[index]
        draw, opposite = self._draw(step // self.hold)
        kept = self._kept(self.stages.stages[index], step // self.hold)
        return replace(
            self.scaled_layers(kept, step),
            heads=draw_units(HEADS, heads, self.target.heads, kept, self.seed, draw, opposite=opposite),
            parts=draw_units(PARTS, parts, self.target.parts, kept, self.seed, draw, opposite=opposite),
            head_scale=(self.target.heads / heads) ** self.width_exponent,
            part_scale=(self.target.parts / parts) ** self.width_exponent,
        )

    def _kept(self, stage: Stage, number: int) -> tuple[bool, ...]:
        """Return which layers the draw of this number keeps; draws are numbered over the whole run, not per stage."""
        draw, opposite = self._draw(number)
        layers = self.target.layers
        return draw_layers(stage, layers, self.selection, self.groups, self.seed, draw, opposite=opposite)

    def _draw(self, number: int) -> tuple[int, bool]:
        """Return the key of the draw's hash, and whether the draw is the opposite of the one with this key."""
        if self.subsets is not None:
            number %= self.subsets
        opposite = self.mirrored and number % 2 == 1
        return number - 1 if opposite else number, opposite

    def scaled_layers(self, kept: Sequence[bool], step: int) -> Subnetwork:
        """Return the kept layers with all heads and parts, scaled as in the stage of this step."""
        return Subnetwork(scales(self.scaling, kept, self._keep(self.stages.stage(step))), scaled=self.scaled)

    def _keep(self, stage: Stage) -> tuple[float, ...]:
        """Return each layer's keep probability in the stage; with `subsets`, the fraction of them that keep it."""
        if self.subsets is None:
            return keep_probabilities(stage, self.target.layers, self.groups)
        drawn = [self._kept(stage, number) for number in range(self.subsets)]
        return tuple(sum(runs) / self.subsets for runs in zip(*drawn, strict=True))

    def drawn(self, size: int, draw: int, step: SupportsIndex) -> Subnetwork:
        """Return a random subnetwork of `size` layers, scaled as in a stage of this size."""
        self.last_step(step)
        kept, probabilities = random_part(self.target.layers, size, draw)
        return Subnetwork(scales(self.scaling, kept, probabilities), scaled=self.scaled)

    def phases(self) -> tuple[Phase, ...]:
        return tuple(
            Phase(s.start, s.stop, self._keep(s), heads, parts)
            for s, heads, parts in zip(self.stages.stages, self.head_counts, self.part_counts, strict=True)
        )

    def evaluated(self, step: SupportsIndex) -> Subnetwork:
        """Return the full model; without scaling, each layer times its keep probability in the last stage that ran."""
        full = super().evaluated(step)
        if self.scaling != "none":
            return full
        return Subnetwork(self._keep(self.stages.stage(self.last_step(step))), scaled=self.scaled)
