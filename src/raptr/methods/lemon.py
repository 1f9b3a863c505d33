"""LEMON's depth operator (Wang et al. 2023): each new layer goes right after its source.

6 → 9 takes the top three layers as sources: 1 2 3 4 4' 5 5' 6 6'. `init="copy"` repeats the source's weights, as in the
RaPTr paper's comparison. `init="zero"` also zeroes the copy's two output projections, weights and biases, as LEMON's
released code does, so that a new layer is exactly the identity and growth does not change the model's function.

Deviations: depth only. Zeroed tensors start with zero moments, even under `moments="copy"`; see `growth/plan.py`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from raptr.growth.plan import Growth, inserted
from raptr.methods.growing import Growing


@final
@dataclass(frozen=True)
class LEMON(Growing):
    """New layers next to their sources, as copies or as identities."""

    init: Literal["copy", "zero"] = "copy"

    name: ClassVar[str] = "lemon"

    def arranged(self, old: int, new: int) -> Growth:
        return Growth(inserted(old, new), identity=self.init == "zero", moments=self.moments)
