"""Double, then part: progressive stacking with stages in which a random part of the grown model runs.

A method of this project, between progressive stacking and RaPTr. For a stage of k layers the model has L, L/2, L/4, ...
layers (halves round up), the smallest of these numbers that is at least k: with 12 layers 3-6-9-12 trains 3 of 3, 6 of
6, 9 of 12 and 12 of 12. The model doubles as in progressive stacking. In a stage with fewer layers than the model has,
each step runs a random part that always includes the first and the last layer, as in RaPTr. So a part is drawn from
copies of trained layers, not from layers that start at random.

A layer that is left out is bypassed, and those that run are not scaled. Evaluation multiplies each layer by the share
of the steps in which it runs, as for RaPTr without scaling.
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
    """A model that doubles, and in some stages runs random parts of itself before all of its layers train."""

    name: ClassVar[str] = "double-then-part"

    def default(self) -> str:
        """Return a quarter, half, three quarters and all of the layers (rounded up): 3-6-9-12."""
        sizes = {-(-quarters * self.target.layers // 4) for quarters in (1, 2, 3, 4)}
        return "-".join(map(str, sorted(sizes)))

    def default_average(self) -> float | None:
        """Return three quarters of the layers: for 3-6-9-12, three stages of a sixth of the steps and one of half."""
        return 0.75 * self.target.layers if self.target.layers > 1 else None

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(stacked(old, new), moments=self.moments)

    def stage_shape(self, stage: int) -> Shape:
        """Return the shape with the smallest of L, L/2, L/4, ... layers that is not below the stage's size."""
        size, layers = self.stages.stages[stage].size, self.target.layers
        while (half := (layers + 1) // 2) >= size and half < layers:
            layers = half
        return replace(self.target, layers=layers)

    def subnetwork(self, step: SupportsIndex) -> Subnetwork:
        """Return a random part of the current model's layers."""
        step = self.check_step(step)
        part, layers = self._part(self.stages.index(step))
        return self.scaled_layers(draw_layers(part, layers, "exact", 1, self.seed, step), step)

    def keep(self, stage: int) -> tuple[float, ...]:
        return keep_probabilities(*self._part(stage))

    def evaluated(self, step: SupportsIndex) -> Subnetwork:
        """Return all current layers, each scaled by the share of the last stage's steps in which it runs."""
        return Subnetwork(self.keep(self.stages.index(self.last_step(step))))

    def _part(self, stage: int) -> tuple[Stage, int]:
        """Return the stage to draw layers with, and the number of layers to draw from."""
        layers = self.stage_shape(stage).layers
        return part_of(layers, self.stages.stages[stage].size), layers
