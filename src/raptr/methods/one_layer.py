"""One-layer expansion (Bu 2025, "Deep Progressive Training"): one layer trains first, then all start as copies of it.

For three quarters of the layers' FLOPs the growth comes at 0.25 / (1 - 1/L) of the steps, the default here.

Deviations: new layers are copies; random ones and a start with no layer at all are left out. Moments are a named
setting, by default copied. Other starts are allowed and are made as G_stack makes them, whose operator this is; what
tells the two methods apart is the default schedule.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from raptr.growth.plan import Growth, repeated
from raptr.methods.growing import GrowingOnce


@final
@dataclass(frozen=True)
class OneLayer(GrowingOnce):
    """One layer, then all of them copies of it."""

    name: ClassVar[str] = "one-layer"

    def default(self) -> str:
        """One layer, then all: 1-12."""
        return f"1-{self.target.layers}" if self.target.layers > 1 else "1"

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(repeated(old, new), moments=self.moments)
