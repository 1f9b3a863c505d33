"""Full training: every layer in every step. The baseline of every comparison."""

from dataclasses import dataclass
from typing import ClassVar, SupportsIndex, final

from raptr.methods.contract import Method, Phase
from raptr.subnetworks import Subnetwork


@final
@dataclass(frozen=True)
class Full(Method):
    """The whole model in every step."""

    name: ClassVar[str] = "full"

    def subnetwork(self, step: SupportsIndex) -> Subnetwork:
        self.check_step(step)
        return Subnetwork.full(self.target.layers)

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(0, self.steps, (1.0,) * self.target.layers, self.target.heads, self.target.parts),)
