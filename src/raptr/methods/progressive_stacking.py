"""Progressive stacking (Gong et al. 2019), which is the depth operator of bert2BERT (Chen et al. 2021).

The model doubles: layer i is copied to i + n. To get n' = q·n + r layers, the model is repeated q times, bottom to top,
and the remaining r layers are copies of the top r, as in bert2BERT.

Deviations: the setting `moments` says what happens to the optimizer state of the copies. Up to a doubling the model
grows as in gradual stacking; the two methods then differ only in the default schedule, which doubles here.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from raptr.growth.plan import Growth, stacked
from raptr.methods.growing import Growing


@final
@dataclass(frozen=True)
class ProgressiveStacking(Growing):
    """The whole model, stacked on top of itself."""

    name: ClassVar[str] = "progressive-stacking"

    def default(self) -> str:
        """Return half of the layers (rounded up), then all; half of that half comes first if it is even: 3-6-12."""
        layers = self.target.layers
        half = (layers + 1) // 2
        sizes = [half // 2, half, layers] if half % 2 == 0 else [half, layers]
        return "-".join(map(str, sizes)) if layers > 1 else "1"

    def default_average(self) -> float | None:
        """Return three quarters of the layers: for 3-6-12, stages of 20, 20 and 60% of the steps."""
        return 0.75 * self.target.layers if self.target.layers > 1 else None

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(stacked(old, new), moments=self.moments)
