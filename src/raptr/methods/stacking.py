"""Gradual stacking (Reddi et al. 2023): n layers become n' by appending copies of the last n' - n.

Deviations: the setting `moments` says what happens to the optimizer state of the copies, by default copied too. A stage
more than twice as deep as the one before needs more layers than there are to copy, so it grows as in progressive
stacking. The learning rate belongs to the run: by default it is constant until the last quarter.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from raptr.growth.plan import Growth, stacked
from raptr.methods.growing import Growing


@final
@dataclass(frozen=True)
class Stacking(Growing):
    """New layers on top, as copies of the top layers."""

    name: ClassVar[str] = "stacking"

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(stacked(old, new), moments=self.moments)
