"""One-layer expansion (Bu 2025, "Deep Progressive Training"): one layer trains first, then all start as copies of it.

By default the growth comes at 0.25 / (1 - 1/L) of the steps, which costs three quarters of full training's layer FLOPs.

Deviations: new layers are copies; the paper's random layers, and its start with no layer at all, are left out. The
setting `moments` says what happens to the optimizer state, by default copied. Other starts are allowed, and grow as in
G_stack: the two methods differ only in their default schedule.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from raptr.growth.plan import Growth, repeated
from raptr.methods.growing import GrowingOnce


@final
@dataclass(frozen=True)
class OneLayer(GrowingOnce):
    """One layer trains first, and all layers then start as copies of it."""

    name: ClassVar[str] = "one-layer"

    def default(self) -> str:
        """Return one layer, then all: 1-12."""
        return f"1-{self.target.layers}" if self.target.layers > 1 else "1"

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(repeated(old, new), moments=self.moments)
