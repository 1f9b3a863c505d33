"""MSG, masked structural growth (Yao et al. 2023), on depth: new layers are faded in.

In the t-th step after the growth (from 0) a new layer is gated, h ← c·layer(h) + (1 - c)·h with c = t / mask_steps,
until c is 1. At c = 0 the layer does not run and the model is the one before. `msg` appends copies of the top layers,
as gradual stacking does; `msg-interpolation` puts each next to its source, as LEMON does (the RaPTr paper's variant).

Deviations: depth only. A gate is a whole-layer scale. New layers start with zero moments and, unlike in the released
code, a step count of zero, so that Adam's bias correction is right for them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, SupportsIndex, final

from raptr.growth.plan import Growth, Moments, inserted, stacked
from raptr.methods.growing import Growing


@dataclass(frozen=True)
class Masked(Growing):
    """A growing model whose new layers have a gate that rises from 0 to 1 at the start of their stage."""

    moments: Moments = "zero"
    mask_steps: int | None = None  # None: a tenth of the shortest stage that begins with a growth

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_steps is None:
            return
        most = self._shortest - 1 if self._shortest else self.steps
        if not 0 <= self.mask_steps <= most:
            raise ValueError(
                f"mask_steps is {self.mask_steps}; 0 to {most} is allowed, so that new layers are fully there "
                "before their stage ends"
            )

    @property
    def _shortest(self) -> int:
        """The steps of the shortest stage that begins with a growth; 0 where there is none."""
        grown = [stage for number, stage in enumerate(self.stages.stages) if self.new_layers(number)]
        return min((stage.stop - stage.start for stage in grown), default=0)

    @cached_property
    def rising(self) -> int:
        """The steps over which gates rise."""
        if self.mask_steps is None:
            return self._shortest // 10 or min(1, max(0, self._shortest - 1))
        return self.mask_steps

    def settings(self) -> dict[str, Any]:
        """The settings, with the length of the warm-up spelt out."""
        return {**super().settings(), "mask_steps": self.rising}

    def new_layers(self, stage: int) -> tuple[int, ...]:
        """The layers that are new in a stage."""
        sizes = [stage.size for stage in self.stages.stages]
        return self.arranged(sizes[stage - 1], sizes[stage]).new if stage else ()

    def gates(self, step: SupportsIndex) -> tuple[float, ...]:
        """1, but for new layers in the steps after a growth."""
        step = self.check_step(step)
        number = self.stages.index(step)
        stage, new = self.stages.stages[number], self.new_layers(number)
        gate = min(1.0, (step - stage.start) / self.rising) if self.rising else 1.0
        return tuple(gate if layer in new else 1.0 for layer in range(stage.size))

    def keep(self, stage: int) -> tuple[float, ...]:
        """Every layer runs in every step, but for new ones at the growth itself, where their gate is 0."""
        trained, new = self.stages.stages[stage], self.new_layers(stage)
        steps = trained.stop - trained.start
        share = (steps - 1) / steps if self.rising else 1.0
        return tuple(share if layer in new else 1.0 for layer in range(trained.size))


@final
@dataclass(frozen=True)
class MSG(Masked):
    """New layers on top, copies of the top ones, faded in."""

    name: ClassVar[str] = "msg"

    def arranged(self, old: int, new: int) -> Growth:
        """Copies of the last layers, appended."""
        return Growth(stacked(old, new), moments=self.moments)


@final
@dataclass(frozen=True)
class MSGInterpolation(Masked):
    """New layers next to their sources, copies of them, faded in."""

    name: ClassVar[str] = "msg-interpolation"

    def arranged(self, old: int, new: int) -> Growth:
        """Copies of the top layers, each after its source."""
        return Growth(inserted(old, new), moments=self.moments)
