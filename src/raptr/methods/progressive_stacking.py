"""Progressive stacking (Gong et al. 2019), which is the depth operator of bert2BERT (Chen et al. 2021).

The model doubles: layer i is copied to i + n. For n' = q·n + r layers there are q copies bottom to top, and the rest
is copied from the top r layers, as bert2BERT has it.

Deviations: what the optimizer knows about the copies is a named setting. Up to a doubling the operator is that of
gradual stacking; what tells the two methods apart is the default schedule, doubling here.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from raptr.growth.plan import Growth, stacked
from raptr.methods.growing import Growing


@final
@dataclass(frozen=True)
class ProgressiveStacking(Growing):
    """The whole model on top of itself."""

    name: ClassVar[str] = "progressive-stacking"

    def default(self) -> str:
        """Half of the layers (rounded up), half of those before that where they divide evenly: 3-6-12."""
        layers = self.target.layers
        half = (layers + 1) // 2
        sizes = [half // 2, half, layers] if half % 2 == 0 else [half, layers]
        return "-".join(map(str, sizes)) if layers > 1 else "1"

    def default_average(self) -> float | None:
        """Three quarters of the layers: stages of 20, 20 and 60% for 3-6-12."""
        return 0.75 * self.target.layers if self.target.layers > 1 else None

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(stacked(old, new), moments=self.moments)
