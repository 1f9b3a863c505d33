"""MSG, masked structural growth (Yao et al. 2023): new layers, heads and MLP parts are faded in by a gate.

In step t after the growth (from 0), new layers, heads and parts have the gate c = t / mask_steps, until c is 1:

    a layer       h ← c·layer(h) + (1 - c)·h
    a head        its queries, keys and values are multiplied by c
    an MLP part   its units are multiplied by c before the activation, which maps 0 to 0

So at c = 0 the model computes what it did before. A new layer is then bypassed; a new head or part still runs, so that
all steps of a stage have the same shapes. `msg` appends copies of the top layers, as gradual stacking does;
`msg-interpolation` puts each copy next to its source, as LEMON does (the RaPTr paper's variant). New heads and parts
have the larger model's initial weights.

Deviations: the model's width does not grow. A layer's gate is a whole-layer scale. New weights start with zero moments
and, unlike in the released code, with a step count of zero, so that Adam's bias correction is right for them: see
`growth/plan.py`, and `train/adamw.py` for the rows of a widened tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, final

from raptr.growth.plan import Growth, Moments, added, inserted, stacked
from raptr.methods.axes import unit_counts, whole_depth
from raptr.methods.growing import Growing
from raptr.subnetworks import Shape, Subnetwork


@dataclass(frozen=True)
class Masked(Growing):
    """A growing model whose new layers, heads and parts have gates, which rise from 0 to 1 as their stage begins."""

    moments: Moments = "zero"
    mask_steps: int | None = None  # None: a tenth of the shortest stage that begins with a growth
    heads: str | None = None  # heads of the model in each stage, such as 6-9-12; None: all
    parts: str | None = None  # MLP parts of the model in each stage, such as 1-2-4; None: all

    def __post_init__(self) -> None:
        super().__post_init__()
        assert len(self.head_counts) == len(self.part_counts) == len(self.stages.stages)
        if self.mask_steps is None:
            return
        most = self._shortest - 1 if self._shortest else self.steps
        if not 0 <= self.mask_steps <= most:
            raise ValueError(
                f"mask_steps is {self.mask_steps}; 0 to {most} is allowed, so that what is new is fully there "
                "before its stage ends"
            )

    def default(self) -> str:
        """Return the sizes recommended for RaPTr; if heads or parts grow, all layers in each of their stages."""
        return whole_depth(self.target.layers, self.heads, self.parts) or super().default()

    @cached_property
    def head_counts(self) -> tuple[int, ...]:
        return unit_counts("heads", self.heads, self.target.heads, self.stages)

    @cached_property
    def part_counts(self) -> tuple[int, ...]:
        return unit_counts("parts", self.parts, self.target.parts, self.stages)

    @property
    def _shortest(self) -> int:
        """The number of steps of the shortest stage that begins with a growth; 0 if there is none."""
        grown = [stage for stage, plan in zip(self.stages.stages, self.growths, strict=True) if plan is not None]
        return min((stage.stop - stage.start for stage in grown), default=0)

    @cached_property
    def rising(self) -> int:
        """The number of steps over which gates rise."""
        if self.mask_steps is None:
            return self._shortest // 10 or min(1, max(0, self._shortest - 1))
        return self.mask_steps

    def settings(self) -> dict[str, Any]:
        """Return the settings, with `mask_steps` spelt out."""
        return {**super().settings(), "mask_steps": self.rising}

    def stage_shape(self, stage: int) -> Shape:
        return Shape(self.stages.stages[stage].size, self.head_counts[stage], self.part_counts[stage])

    def growth(self, old: Shape, new: Shape) -> Growth:
        counts = [(shape.layers, shape.heads, shape.parts) for shape in (old, new, self.target)]
        if old == new or not all(a <= b <= c for a, b, c in zip(*counts, strict=True)):
            raise ValueError(
                f"method {self.name} adds layers, heads and parts up to {self.target}; it cannot grow from {old} "
                f"to {new}"
            )
        plan = self.arranged(old.layers, new.layers)
        return replace(plan, heads=added(old.heads, new.heads), parts=added(old.parts, new.parts))

    @cached_property
    def growths(self) -> tuple[Growth | None, ...]:
        """The growth with which each stage begins; None for stages without one."""
        shapes = [self.stage_shape(number) for number in range(len(self.stages.stages))]
        return (None, *(None if old == new else self.growth(old, new) for old, new in pairwise(shapes)))

    def scaled_layers(self, kept: Sequence[bool], step: int) -> Subnetwork:
        """Return the kept layers, with the gates of the step."""
        number = self.stages.index(step)
        plan, passed = self.growths[number], step - self.stages.stages[number].start
        if plan is None or passed >= self.rising:
            return super().scaled_layers(kept, step)
        gate, new = passed / self.rising, plan.new
        heads, parts = (
            None if units is None else tuple(gate if source is None else 1.0 for source in units)
            for units in (plan.heads, plan.parts)
        )
        scales = (float(runs) * (gate if layer in new else 1.0) for layer, runs in enumerate(kept))
        return Subnetwork(tuple(scales), head_gates=heads, part_gates=parts)

    def keep(self, stage: int) -> tuple[float, ...]:
        """Return each layer's share of the steps: 1, except that new layers are bypassed in the first, at gate 0."""
        trained, plan = self.stages.stages[stage], self.growths[stage]
        steps, new = trained.stop - trained.start, plan.new if plan is not None else ()
        share = (steps - 1) / steps if self.rising else 1.0
        return tuple(share if layer in new else 1.0 for layer in range(trained.size))


@final
@dataclass(frozen=True)
class MSG(Masked):
    """New layers on top, as copies of the top layers, faded in."""

    name: ClassVar[str] = "msg"

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(stacked(old, new), moments=self.moments)


@final
@dataclass(frozen=True)
class MSGInterpolation(Masked):
    """New layers next to their sources, as copies of them, faded in."""

    name: ClassVar[str] = "msg-interpolation"

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(inserted(old, new), moments=self.moments)
