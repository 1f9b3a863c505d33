"""Double, then part: progressive stacking with stages in which a random part of the grown model runs.

A method of this project, between progressive stacking and RaPTr. A stage of k layers has a model of L, L/2, L/4, ...
layers (halves round up), the smallest that holds them: with 12 layers 3-6-9-12 trains 3 of 3, 6 of 6, 9 of 12 and 12 of
12. The model doubles as in progressive stacking, and in a stage with fewer layers than the model has, each step runs a
random part, the first and the last layer always, as in RaPTr. So a part is drawn from layers that were copied from
trained ones, not from layers that start at random.

A layer that is left out is bypassed, unscaled; evaluation multiplies it by the share of the steps in which it runs, as
for RaPTr without scaling.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, SupportsIndex, final

from raptr.growth.plan import Growth, stacked
from raptr.methods.contract import part_of
from raptr.methods.growing import Growing
from raptr.subnetworks import Shape, Stage, Subnetwork
from raptr.subnetworks.sampling import draw_layers, keep_probabilities


@final
@dataclass(frozen=True)
class DoubleThenPart(Growing):
    """A model that doubles, and runs random parts of itself before all of its layers train."""

    name: ClassVar[str] = "double-then-part"

    def default(self) -> str:
        """A quarter of the layers, half, three quarters and all (rounded up): 3-6-9-12."""
        sizes = {-(-quarters * self.target.layers // 4) for quarters in (1, 2, 3, 4)}
        return "-".join(map(str, sorted(sizes)))

    def default_average(self) -> float | None:
        """Three quarters of the layers: three stages of a sixth of the steps and one of half of them for 3-6-9-12."""
        return 0.75 * self.target.layers if self.target.layers > 1 else None

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(stacked(old, new), moments=self.moments)

    def stage_shape(self, stage: int) -> Shape:
        """The smallest of L, L/2, L/4, ... layers that holds the stage's."""
        size, layers = self.stages.stages[stage].size, self.target.layers
        while (half := (layers + 1) // 2) >= size and half < layers:
            layers = half
        return replace(self.target, layers=layers)

    def subnetwork(self, step: SupportsIndex) -> Subnetwork:
        """A random part of the layers that there are."""
        step = self.check_step(step)
        part, layers = self._part(self.stages.index(step))
        return self.scaled_layers(draw_layers(part, layers, "exact", 1, self.seed, step), step)

    def keep(self, stage: int) -> tuple[float, ...]:
        return keep_probabilities(*self._part(stage))

    def evaluated(self, step: SupportsIndex) -> Subnetwork:
        """All layers that there are, each times the share of the steps in which it ran in the stage just trained."""
        return Subnetwork(self.keep(self.stages.index(self.last_step(step))))

    def _part(self, stage: int) -> tuple[Stage, int]:
        """What the stage draws, and from how many layers."""
        layers = self.stage_shape(stage).layers
        return part_of(layers, self.stages.stages[stage].size), layers
