"""The contract of every family of models: a configuration that knows what the model costs and how to build it.

This module imports no torch, because the command line's help lists families and sizes. The model itself is a
`raptr.models.model.Model`. Register a family from another package before use:

    register(Family("mine", {"tiny": MyConfig(...)}, objectives=("causal",)))
    pretrain(Config.read({"model": {"family": "mine"}, ...}), run)
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self, get_args

from raptr.subnetworks import Shape

if TYPE_CHECKING:
    from raptr.models.export import Exporter
    from raptr.models.model import Model

Init = Literal["bert", "fan-in", "paper"]  # how weights are initialised: see init.py
PLAIN: Mapping[str, float] = {"residual_multiplier": 1.0, "norm_scaling": False}  # the values that stock models have
COUNTS = ("layers", "width", "heads", "head_size", "mlp", "vocabulary", "positions", "parts")


@dataclass(frozen=True)
class ModelConfig(ABC):
    """A model's dimensions and initialisation; the MLP's hidden units are divided into `parts` equal parts."""

    layers: int
    width: int
    heads: int
    head_size: int
    mlp: int
    vocabulary: int = 8192
    positions: int = 512
    parts: int = 4
    dropout: float = 0.0
    init: Init = "bert"
    residual_multiplier: float = 1.0  # scales each branch's output; at 1 / layers, the mean of the layers is added
    norm_scaling: bool = False  # divide the outputs of the norms in layer l, counted from 1, by √l

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"model.{name} is {value!r}; a whole number from 1 on is allowed")
        if self.mlp % self.parts:
            raise ValueError(f"model.parts is {self.parts}; a divisor of mlp, {self.mlp}, is allowed")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout is {self.dropout!r}; a number from 0 to below 1 is allowed")
        if self.init not in get_args(Init):
            raise ValueError(f"model.init is {self.init!r}; allowed: {', '.join(get_args(Init))}")
        if not 0 < self.residual_multiplier <= 1:
            multiplier = f"model.residual_multiplier is {self.residual_multiplier!r}"
            raise ValueError(f"{multiplier}; a number above 0 and up to 1 is allowed")

    @property
    def shape(self) -> Shape:
        """The model's numbers of layers, heads and MLP parts, as subnetworks count them."""
        return Shape(layers=self.layers, heads=self.heads, parts=self.parts)

    @property
    def unit_sizes(self) -> Mapping[str, int]:
        """The size of a unit on each axis of `shape`: query heads in one of its heads, hidden units in one MLP part."""
        return {"heads": self.heads // self.shape.heads, "parts": self.mlp // self.parts}

    def resized(self, shape: Shape) -> Self:
        """Return a copy with another shape; the sizes of a head and of an MLP part stay the same."""
        part = self.mlp // self.parts
        return replace(self, layers=shape.layers, heads=shape.heads, parts=shape.parts, mlp=part * shape.parts)

    def norm_scale(self, layer: int) -> float:
        """Return the factor that multiplies the outputs of a layer's norms; layers count from 0."""
        return 1 / math.sqrt(layer + 1) if self.norm_scaling else 1.0

    @abstractmethod
    def build(self, seed: int) -> "Model":
        """Build the model with the initial weights of this seed."""

    @abstractmethod
    def layer_weights(self, heads: int, parts: int) -> int:
        """Return the number of weights in the matrices of one layer with this many heads and MLP parts."""

    def layer_flops(self, heads: int, parts: int, length: int) -> int:
        """Return the FLOPs of a layer with this many heads and MLP parts: forward, one sequence, full attention."""
        attention = 2 * 2 * length * heads * self.head_size
        return length * (2 * self.layer_weights(heads, parts) + attention)

    @abstractmethod
    def head_flops(self, targets: float) -> float:
        """Return the FLOPs of the language-model head for `targets` positions: forward pass, one sequence."""

    def unexportable(self) -> str | None:
        """Return why no stock model of `transformers` can have these dimensions; None: nothing prevents it."""
        return None

    def exporter(self) -> "Exporter | None":
        """Return the conversion to and from a stock class of `transformers`; None if there is no such class."""
        return None


@dataclass(frozen=True)
class Family:
    """Models that differ only in their dimensions; the first size and the first objective are the defaults."""

    name: str
    sizes: Mapping[str, ModelConfig]
    objectives: tuple[str, ...]  # the names of those it can learn
    planned: str | None = None  # the default size of `raptr plan`; None: the first

    @property
    def config(self) -> type[ModelConfig]:
        """The family's subclass of `ModelConfig`, whose fields are settings in the section `model`."""
        return type(next(iter(self.sizes.values())))
