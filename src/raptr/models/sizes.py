"""The dimensions of a BERT, and the named sizes. No torch: the help of the command line lists the names."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from raptr.subnetworks import Shape

Init = Literal["bert", "fan-in"]  # how weights start: init.py


@dataclass(frozen=True)
class BertConfig:
    """The dimensions of a BERT and how it starts; `parts` is the number of equal pieces the MLP is cut into."""

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

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "head_size", "mlp", "vocabulary", "positions", "parts"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"model.{name} is {value!r}; a whole number from 1 on is allowed")
        if self.mlp % self.parts:
            raise ValueError(f"model.parts is {self.parts}; a divisor of mlp, {self.mlp}, is allowed")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout is {self.dropout!r}; a number from 0 to below 1 is allowed")
        if self.init not in get_args(Init):
            raise ValueError(f"model.init is {self.init!r}; allowed: {', '.join(get_args(Init))}")

    @property
    def shape(self) -> Shape:
        """The counts on the axes along which a part of the model can run."""
        return Shape(layers=self.layers, heads=self.heads, parts=self.parts)

    def resized(self, shape: Shape) -> "BertConfig":
        """The same model with other counts of layers, heads and MLP parts; head and part sizes stay."""
        part = self.mlp // self.parts
        return replace(self, layers=shape.layers, heads=shape.heads, parts=shape.parts, mlp=part * shape.parts)


# Deeper than other models of these names: depth is what is trained in parts here.
SIZES: dict[str, BertConfig] = {
    "tiny": BertConfig(layers=6, width=128, heads=4, head_size=32, mlp=512),
    "mini": BertConfig(layers=12, width=256, heads=4, head_size=64, mlp=1024),
    "small": BertConfig(layers=12, width=512, heads=8, head_size=64, mlp=2048),
    "base": BertConfig(layers=12, width=768, heads=12, head_size=64, mlp=3072),
    "large": BertConfig(layers=24, width=1024, heads=16, head_size=64, mlp=4096),
}
