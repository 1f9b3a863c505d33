"""What the project asks of a family of models: dimensions that know what they cost and how to build the model.

No torch here: the help of the command line lists families and sizes. The model itself is a `raptr.models.model.Model`.
A family from elsewhere is registered before it is used:

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

Init = Literal["bert", "fan-in", "paper"]  # how weights start: init.py
PLAIN: Mapping[str, float] = {"residual_multiplier": 1.0, "norm_scaling": False}  # of every stock model
COUNTS = ("layers", "width", "heads", "head_size", "mlp", "vocabulary", "positions", "parts")


@dataclass(frozen=True)
class ModelConfig(ABC):
    """The dimensions of a model and how it starts; `parts` is the number of equal pieces the MLP is cut into."""

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
    residual_multiplier: float = 1.0  # times what each branch adds to the residual stream; 1 / layers is their mean
    norm_scaling: bool = False  # whether the norms of layer l (from 1) give 1/√l of what they would

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
        """The counts on the axes along which a part of the model can run."""
        return Shape(layers=self.layers, heads=self.heads, parts=self.parts)

    @property
    def unit_sizes(self) -> Mapping[str, int]:
        """How many heads a unit of heads has, and how many of the MLP's dimensions a part has."""
        return {"heads": self.heads // self.shape.heads, "parts": self.mlp // self.parts}

    def resized(self, shape: Shape) -> Self:
        """The same model with other counts of layers, heads and MLP parts; head and part sizes stay."""
        part = self.mlp // self.parts
        return replace(self, layers=shape.layers, heads=shape.heads, parts=shape.parts, mlp=part * shape.parts)

    def norm_scale(self, layer: int) -> float:
        """What the outputs of a layer's norms are multiplied by; layers count from 0."""
        return 1 / math.sqrt(layer + 1) if self.norm_scaling else 1.0

    @abstractmethod
    def build(self, seed: int) -> "Model":
        """The model with its initial weights."""

    @abstractmethod
    def layer_weights(self, heads: int, parts: int) -> int:
        """The weights in the matrices of one layer with this many heads and MLP parts."""

    def layer_flops(self, heads: int, parts: int, length: int) -> int:
        """The FLOPs of a layer with this many heads and MLP parts: forward, one sequence, all tokens attend to all."""
        attention = 2 * 2 * length * heads * self.head_size
        return length * (2 * self.layer_weights(heads, parts) + attention)

    @abstractmethod
    def head_flops(self, targets: float) -> float:
        """The FLOPs of the head on `targets` positions: forward, one sequence."""

    def unexportable(self) -> str | None:
        """Why no stock model of `transformers` has these dimensions; None: there is nothing against them."""
        return None

    def exporter(self) -> "Exporter | None":
        """How a model becomes a stock one of `transformers`; None where there is no such class."""
        return None


@dataclass(frozen=True)
class Family:
    """Models that differ in their dimensions only; the first size and the first objective are the defaults."""

    name: str
    sizes: Mapping[str, ModelConfig]
    objectives: tuple[str, ...]  # what it can be trained on
    planned: str | None = None  # the size of a plan that names none; None: the first

    @property
    def config(self) -> type[ModelConfig]:
        """The class of its dimensions, whose fields are the settings of `model`."""
        return type(next(iter(self.sizes.values())))
