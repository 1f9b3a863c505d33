"""G_stack (Du et al. 2024): one growth by a factor g; the whole model is stacked on itself g times.

L/g layers train first, with g = 4; then layer j of the full model starts as layer j mod (L/g). The paper says when:
after d tokens with log10 d = 0.88·log10 N + 163.27 / log10 C - 5.74, for N weights and C FLOPs of the run.

Deviations: `growth_at` is a share of the steps, since a method knows neither weights nor tokens. Where 4 does not
divide L the start is rounded up, and the last copy is cut short. Moments are a named setting, by default copied.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from raptr.growth.plan import Growth, repeated
from raptr.methods.growing import GrowingOnce


@final
@dataclass(frozen=True)
class GStack(GrowingOnce):
    """A quarter of the layers, then four times the same."""

    name: ClassVar[str] = "g-stack"

    def default(self) -> str:
        """A quarter of the layers, rounded up, then all: 3-12."""
        layers = self.target.layers
        return f"{(layers + 3) // 4}-{layers}" if layers > 1 else "1"

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(repeated(old, new), moments=self.moments)
