"""Stochastic depth (Huang et al. 2016) and LayerDrop (Fan et al. 2019): layers dropped at a fixed rate.

Both are regularisers that save compute as a side effect; neither ends with the full network. They differ in
the profile over depth and in evaluation:

- stochastic depth: layer l (from 1) of L runs with probability 1 - (l / L)·(1 - keep) (`profile="linear"`) or
  `keep` (`"constant"`); no scaling in training, and evaluation multiplies each branch by that probability.
- LayerDrop: every layer runs with probability `keep`; no scaling at all, evaluation uses the plain model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, SupportsIndex, final

from raptr.methods.contract import Method, Phase, check_unit
from raptr.subnetworks import Subnetwork
from raptr.subnetworks.sampling import tossed
from raptr.subnetworks.value import Scaled

Profile = Literal["linear", "constant"]


@final
@dataclass(frozen=True)
class StochasticDepth(Method):
    """Each layer runs with a fixed probability that falls with depth."""

    keep: float = 0.5  # the keep probability of the last layer
    profile: Profile = "linear"
    scaled: Scaled = "branches"

    name: ClassVar[str] = "stochastic-depth"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit("keep", self.keep)

    @property
    def probabilities(self) -> tuple[float, ...]:
        """Each layer's keep probability."""
        layers = self.target.layers
        depths = [(i + 1) / layers if self.profile == "linear" else 1.0 for i in range(layers)]
        return tuple(1 - depth * (1 - self.keep) for depth in depths)

    def subnetwork(self, step: SupportsIndex) -> Subnetwork:
        step = self.check_step(step)
        return self.scaled_layers(tossed(self.probabilities, self.seed, step), step)

    def scaled_layers(self, kept: Sequence[bool], step: int) -> Subnetwork:
        return Subnetwork(tuple(map(float, kept)), scaled=self.scaled)

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(0, self.steps, self.probabilities, self.target.heads, self.target.parts),)

    def evaluated(self, step: SupportsIndex) -> Subnetwork:
        """Return the full model, with each layer scaled by its keep probability."""
        self.last_step(step)
        return Subnetwork(self.probabilities, scaled=self.scaled)


@final
@dataclass(frozen=True)
class LayerDrop(Method):
    """Each layer runs with one fixed probability."""

    keep: float = 0.8

    name: ClassVar[str] = "layerdrop"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit("keep", self.keep)

    def subnetwork(self, step: SupportsIndex) -> Subnetwork:
        step = self.check_step(step)
        return self.scaled_layers(tossed((float(self.keep),) * self.target.layers, self.seed, step), step)

    def phases(self) -> tuple[Phase, ...]:
        keep = (float(self.keep),) * self.target.layers
        return (Phase(0, self.steps, keep, self.target.heads, self.target.parts),)
