"""MIDAS (Saunshi et al. 2024): gradual stacking that copies the middle block of layers, not the last.

n blocks become n + 1: block ⌈n/2⌉ appears a second time, right after itself, so the first and the last layers stay
the first and the last. A block has as many layers as the stage adds.

Deviations: the sizes are those recommended for RaPTr, so that methods differ in one thing at a time. Where a stage is
no whole number of blocks, the copied layers are those nearest to the middle. More than a doubling is made as
progressive stacking makes it. Moments are a named setting, by default copied.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from raptr.growth.plan import Growth, centred
from raptr.methods.growing import Growing


@final
@dataclass(frozen=True)
class MIDAS(Growing):
    """New layers in the middle, copies of the block before them."""

    name: ClassVar[str] = "midas"

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(centred(old, new), moments=self.moments)
