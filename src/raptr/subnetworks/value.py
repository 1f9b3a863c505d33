"""The subnetwork: a frozen value that says what runs in one training step.

Layers, heads and MLP parts are counted from 0 here; schedules and everything a user types count layers
from 1, as the paper does.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

Scaled = Literal["layer", "branches"]
Kept = tuple[tuple[int, ...], ...]
Width = Literal["heads", "parts"]  # the axes within a layer
WIDTHS: tuple[Width, ...] = ("heads", "parts")


@dataclass(frozen=True)
class Shape:
    """How many layers, heads and MLP parts a model has: the three axes along which only a part of it may run."""

    layers: int
    heads: int = 1
    parts: int = 1

    def __post_init__(self) -> None:
        for axis in ("layers", "heads", "parts"):
            count = getattr(self, axis)
            if type(count) is not int or count < 1:
                raise ValueError(f"shape: {axis} is {count!r}; a whole number from 1 on is allowed")


@dataclass(frozen=True)
class Subnetwork:
    """What runs in a step: a scale per layer (0: bypassed), and the kept heads and MLP parts of each layer.

    `scaled` says what a layer's scale multiplies: the whole layer, y = x + s·(layer(x) - x), or each of its
    residual branches. `heads` and `parts` are None if all run; otherwise they have one ascending tuple per layer. The
    output of the heads (MLP parts) is multiplied by `head_scale` (`part_scale`); the bias added to it is not.
    `head_gates` and `part_gates` fade in heads and parts: each head (part) has one gate, the same in every layer, that
    multiplies the weights that compute it. None: all gates are 1, as they must be if only some heads (parts) are kept.
    """

    scales: tuple[float, ...]
    scaled: Scaled = "layer"
    heads: Kept | None = None
    parts: Kept | None = None
    head_scale: float = 1.0
    part_scale: float = 1.0
    head_gates: tuple[float, ...] | None = None
    part_gates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        gates = (*(self.head_gates or ()), *(self.part_gates or ()))
        for scale in (*self.scales, self.head_scale, self.part_scale, *gates):
            if not (math.isfinite(scale) and scale >= 0):
                raise ValueError(f"subnetwork: a scale is {scale!r}; finite numbers from 0 on are allowed")
        for axis, kept in self._widths:
            if kept is None:
                continue
            if (self.head_gates if axis == "heads" else self.part_gates) is not None:
                raise ValueError(f"subnetwork: {axis} are both chosen and under gates; one of the two is allowed")
            if len(kept) != len(self.scales):
                raise ValueError(f"subnetwork: {axis} has {len(kept)} entries for {len(self.scales)} layers")
            for layer in self.kept:
                if not kept[layer] or list(kept[layer]) != sorted(set(kept[layer])):
                    raise ValueError(
                        f"subnetwork: {axis} of layer {layer} is {kept[layer]}; "
                        "at least one, ascending and without repetition, is allowed"
                    )

    @classmethod
    def full(cls, layers: int) -> "Subnetwork":
        """Return the whole model, unscaled."""
        return cls(scales=(1.0,) * layers)

    @property
    def layers(self) -> int:
        return len(self.scales)

    @property
    def kept(self) -> tuple[int, ...]:
        """The layers that run, ascending."""
        return tuple(layer for layer, scale in enumerate(self.scales) if scale != 0)

    @property
    def size(self) -> int:
        return len(self.kept)

    @property
    def counts(self) -> dict[str, int]:
        """How much runs: `size` counts layers; `heads` and `parts` those of each running layer, unless all run."""
        first = self.kept[:1]
        widths = {axis: len(kept[first[0]]) for axis, kept in self._widths if kept is not None and first}
        return {"size": self.size, **widths}

    @property
    def _widths(self) -> tuple[tuple[str, Kept | None], ...]:
        return ("heads", self.heads), ("parts", self.parts)

    @property
    def digest(self) -> str:
        """A short fingerprint, equal exactly for equal subnetworks."""
        fields: tuple[object, ...] = (
            self.scales,
            self.scaled,
            self.heads,
            self.parts,
            self.head_scale,
            self.part_scale,
        )
        if (self.head_gates, self.part_gates) != (None, None):  # older records have digests without gates
            fields = (*fields, self.head_gates, self.part_gates)
        return hashlib.blake2b(repr(fields).encode(), digest_size=8).hexdigest()
