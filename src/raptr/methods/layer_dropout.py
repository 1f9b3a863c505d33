"""Layer dropout with a falling schedule ("Don't Drop Dropout", ICML 2026): many layers dropped early, none at the end.

In step t (from 0) layer i (from 0) of L is dropped with probability drop · depth(i) · time(t). time falls
linearly from 1 to 0 at the start of the recovery: the last part of training, a fraction `recovery`, in which every
layer runs. depth is i / (L - 1) (`profile="linear"`) or 1 (`"constant"`). The branches of a running layer are
divided by its keep probability. `average` sets `drop` so that this fraction of the layers runs on average.

Deviation: one draw for the whole batch, where the paper draws for each sequence, since only a layer that no sequence
uses saves time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, SupportsIndex, final

from raptr.methods.contract import Method, Phase, check_rate, check_unit
from raptr.methods.stochastic_depth import Profile
from raptr.subnetworks import Subnetwork
from raptr.subnetworks.sampling import tossed
from raptr.subnetworks.scaling import inverse
from raptr.subnetworks.value import Scaled


@final
@dataclass(frozen=True)
class LayerDropout(Method):
    """Drop probabilities fall linearly to 0, then a recovery phase trains the full model."""

    drop: float | None = None  # the drop probability at the start; 0.5 unless `average` is given
    average: float | None = None
    recovery: float = 0.1
    profile: Profile = "linear"
    scaled: Scaled = "branches"

    name: ClassVar[str] = "layer-dropout"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit("recovery", self.recovery)
        if self.recovery_start == self.steps:
            raise ValueError(
                f"recovery is {self.recovery!r}, less than one of {self.steps} steps; at least one is allowed"
            )
        check_rate("drop", self.drop, self.average, 1 - self._per_drop, self.target.layers)

    @cached_property
    def recovery_start(self) -> int:
        """The first step in which every layer runs."""
        return self.steps - round(self.recovery * self.steps)

    @cached_property
    def initial_drop(self) -> float:
        """The drop probability at step 0, given or solved from `average`."""
        if self.average is not None:
            return (1 - self.average) / self._per_drop if self._per_drop else 0.0
        return 0.5 if self.drop is None else self.drop

    @property
    def _depths(self) -> tuple[float, ...]:
        layers = self.target.layers
        return tuple(i / max(layers - 1, 1) if self.profile == "linear" else 1.0 for i in range(layers))

    @property
    def _per_drop(self) -> float:
        """The mean fraction of layers dropped per unit of the initial drop probability."""
        # time(t) = 1 - t / R for t < R sums to (R + 1) / 2
        falling = (self.recovery_start + 1) / 2 if self.recovery_start else 0.0
        return falling / self.steps * sum(self._depths) / self.target.layers

    def keep(self, step: SupportsIndex) -> tuple[float, ...]:
        """Return each layer's keep probability in step `step`."""
        step = self.check_step(step)
        time = max(0.0, 1 - step / self.recovery_start) if self.recovery_start else 0.0
        return tuple(1 - self.initial_drop * depth * time for depth in self._depths)

    def subnetwork(self, step: SupportsIndex) -> Subnetwork:
        step = self.check_step(step)
        return self.scaled_layers(tossed(self.keep(step), self.seed, step), step)

    def scaled_layers(self, kept: Sequence[bool], step: int) -> Subnetwork:
        return Subnetwork(inverse(kept, self.keep(step)), scaled=self.scaled)

    def phases(self) -> tuple[Phase, ...]:
        """Return the falling phase, with its keep probabilities averaged, and the recovery."""
        start, heads, parts = self.recovery_start, self.target.heads, self.target.parts
        recovery = Phase(start, self.steps, (1.0,) * self.target.layers, heads, parts)
        if start == 0:
            return (recovery,)
        time = (start + 1) / (2 * start)
        keep = tuple(1 - self.initial_drop * depth * time for depth in self._depths)
        return (Phase(0, start, keep, heads, parts), recovery)
