"""MIDAS (Saunshi et al. 2024): gradual stacking that copies the middle block of layers, not the last.

n blocks become n + 1: block ⌈n/2⌉ is repeated right after itself, so the first and the last layers keep their roles.
A block has as many layers as the stage adds.

Deviations: the sizes are those recommended for RaPTr, so that methods differ in one thing at a time. If the layers are
not a whole number of blocks, those nearest to the middle are copied. Beyond a doubling, the model grows as in
progressive stacking. The setting `moments` says what happens to the optimizer state, by default copied.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from raptr.growth.plan import Growth, centred
from raptr.methods.growing import Growing


@final
@dataclass(frozen=True)
class MIDAS(Growing):
    """New layers in the middle, as copies of the block before them."""

    name: ClassVar[str] = "midas"

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(centred(old, new), moments=self.moments)
