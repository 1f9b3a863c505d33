"""PLD, progressive layer dropping (Zhang and He 2020; algorithm 2 in the appendix of the RaPTr paper).

In step t (from 1) layer i (from 0) of L runs with probability p_i = 1 - (i / L)·(1 - θ(t)), where
θ(t) = (1 - θ̄)·exp(-γ_f·t / T) + θ̄, and each of its two residual branches is divided by p_i. More and more
layers are dropped; training never ends with the full network.

Deviations: none from algorithm 2. One released implementation divides by the next layer's probability,
another counts layers from 1 and does not rescale; we do neither. `average` sets θ̄ so that this fraction of
the layers runs on average over the whole training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, SupportsIndex, final

from raptr.methods.contract import Method, Phase, check_rate
from raptr.subnetworks import Subnetwork
from raptr.subnetworks.sampling import tossed
from raptr.subnetworks.scaling import inverse
from raptr.subnetworks.value import Scaled


@final
@dataclass(frozen=True)
class PLD(Method):
    """Layers are dropped more and more often, deeper ones more than shallow ones."""

    theta: float | None = None  # the final keep parameter θ̄; 0.5 unless `average` is given
    average: float | None = None
    gamma: float = 100.0  # γ_f: how fast θ falls
    scaled: Scaled = "branches"

    name: ClassVar[str] = "pld"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gamma < math.inf:
            raise ValueError(f"gamma is {self.gamma!r}; a number above 0 is allowed")
        check_rate("theta", self.theta, self.average, 1 - self._per_theta, self.target.layers)

    @cached_property
    def final_theta(self) -> float:
        """θ̄, as given or as solved from `average`."""
        if self.average is not None:
            return 1 - (1 - self.average) / self._per_theta if self._per_theta else 1.0
        return 0.5 if self.theta is None else self.theta

    @property
    def _per_theta(self) -> float:
        """The mean fraction of layers dropped per unit of 1 - θ̄."""
        return (self.target.layers - 1) / (2 * self.target.layers) * (1 - self._mean_decay)

    @cached_property
    def _mean_decay(self) -> float:
        """The mean of exp(-γt) over t = 1 … T, a geometric series."""
        gamma = self.gamma / self.steps
        return math.exp(-gamma) * math.expm1(-self.gamma) / (math.expm1(-gamma) * self.steps)

    def keep(self, step: SupportsIndex) -> tuple[float, ...]:
        """Return each layer's keep probability in step `step` (from 0)."""
        step = self.check_step(step)
        decay = math.exp(-self.gamma * (step + 1) / self.steps)
        return self._profile((1 - self.final_theta) * decay + self.final_theta)

    def _profile(self, theta: float) -> tuple[float, ...]:
        layers = self.target.layers
        return tuple(1 - i / layers * (1 - theta) for i in range(layers))

    def subnetwork(self, step: SupportsIndex) -> Subnetwork:
        step = self.check_step(step)
        return self.scaled_layers(tossed(self.keep(step), self.seed, step), step)

    def scaled_layers(self, kept: Sequence[bool], step: int) -> Subnetwork:
        return Subnetwork(inverse(kept, self.keep(step)), scaled=self.scaled)

    def phases(self) -> tuple[Phase, ...]:
        """Return one phase, with the keep probabilities averaged over it."""
        theta = (1 - self.final_theta) * self._mean_decay + self.final_theta
        return (Phase(0, self.steps, self._profile(theta), self.target.heads, self.target.parts),)
