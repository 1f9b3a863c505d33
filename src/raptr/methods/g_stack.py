"""G_stack (Du et al. 2024): one growth by a factor g, in which the whole model is repeated g times.

First L/g layers train, with g = 4; then layer j of the full model starts as a copy of layer j mod (L/g). The paper
grows after d tokens, with log10 d = 0.88·log10 N + 163.27 / log10 C - 5.74, for N weights and C FLOPs of the run.

Deviations: `growth_at` is a share of the steps, since a method knows neither weights nor tokens. If 4 does not divide
L, L/4 is rounded up, and the last copy is cut short. The setting `moments` says what happens to the optimizer state,
by default copied.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from raptr.growth.plan import Growth, repeated
from raptr.methods.growing import GrowingOnce


@final
@dataclass(frozen=True)
class GStack(GrowingOnce):
    """A quarter of the layers trains first; four copies of it then make up the full model."""

    name: ClassVar[str] = "g-stack"

    def default(self) -> str:
        """Return a quarter of the layers, rounded up, then all: 3-12."""
        layers = self.target.layers
        return f"{(layers + 3) // 4}-{layers}" if layers > 1 else "1"

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(repeated(old, new), moments=self.moments)
