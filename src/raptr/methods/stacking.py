"""Gradual stacking (Reddi et al. 2023): n layers become n' by appending copies of the last n' - n.

Deviations: what the optimizer knows about the copies is a named setting, by default copied with the weights. A stage
more than twice as deep as the one before asks for more layers than there are to copy; it is made as progressive
stacking makes it. The learning rate belongs to the run: constant until the last quarter unless said otherwise.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from raptr.growth.plan import Growth, stacked
from raptr.methods.growing import Growing


@final
@dataclass(frozen=True)
class Stacking(Growing):
    """New layers on top, copies of the top ones."""

    name: ClassVar[str] = "stacking"

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(stacked(old, new), moments=self.moments)
