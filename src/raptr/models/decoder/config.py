"""The dimensions of a decoder, its cost, and the named sizes. Imports no torch."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, final

from raptr.models.contract import Family, ModelConfig
from raptr.subnetworks import Shape

if TYPE_CHECKING:
    from raptr.models.decoder.model import Decoder
    from raptr.models.export import Exporter


@final
@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """The dimensions of a decoder.

    With grouped-query attention, each key-value head serves a group of `heads / kv_heads` query heads. Subnetworks
    choose among these groups: one head of a `Shape` is one group.
    """

    kv_heads: int | None = None  # None: one per query head
    tied: bool = True  # the token matrix is also the output matrix
    rope_base: float = 10_000.0
    z_loss: float = 0.0  # weight of the mean of log²Z (Z: the softmax's normaliser) in the training loss; usually 1e-4
    norm_epsilon: float = 1e-6  # of the RMSNorms

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads == self.heads:
            object.__setattr__(self, "kv_heads", None)
        if self.heads % self.groups:
            raise ValueError(f"model.kv_heads is {self.kv_heads}; a divisor of heads, {self.heads}, is allowed")
        if self.head_size % 2:
            raise ValueError(f"model.head_size is {self.head_size}; rotary positions need an even number")
        if not 1 < self.rope_base < float("inf"):
            raise ValueError(f"model.rope_base is {self.rope_base!r}; a number above 1 is allowed")
        if not 0 <= self.z_loss <= 1:
            raise ValueError(f"model.z_loss is {self.z_loss!r}; a number from 0 to 1 is allowed")
        if not 0 < self.norm_epsilon < 1:
            raise ValueError(f"model.norm_epsilon is {self.norm_epsilon!r}; a number above 0 and below 1 is allowed")

    @property
    def groups(self) -> int:
        """The number of key-value heads, each of which serves a group of query heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def shape(self) -> Shape:
        """The model's numbers of layers, groups of heads, and MLP parts, as subnetworks count them."""
        return Shape(layers=self.layers, heads=self.groups, parts=self.parts)

    def resized(self, shape: Shape) -> Self:
        heads, mlp = self.heads // self.groups * shape.heads, self.mlp // self.parts * shape.parts
        kv_heads = None if self.kv_heads is None else shape.heads
        return replace(self, layers=shape.layers, heads=heads, kv_heads=kv_heads, parts=shape.parts, mlp=mlp)

    def build(self, seed: int) -> "Decoder":
        from raptr.models.decoder.model import Decoder

        return Decoder(self, seed)

    def layer_weights(self, heads: int, parts: int) -> int:
        """Return the number of weights in the matrices of one layer with this many groups of heads and MLP parts."""
        queries = heads * (self.heads // self.groups) * self.head_size
        return self.width * (2 * queries + 2 * heads * self.head_size + 3 * parts * (self.mlp // self.parts))

    def layer_flops(self, heads: int, parts: int, length: int) -> int:
        """Return the FLOPs of one layer with this many groups of heads and MLP parts: forward pass, one sequence.

        Attention is counted as causal, even if a prefix is bidirectional.
        """
        inner = heads * (self.heads // self.groups) * self.head_size
        return length * 2 * self.layer_weights(heads, parts) + 2 * length * (length + 1) * inner

    def head_flops(self, targets: float) -> float:
        return targets * 2 * self.width * self.vocabulary

    def exporter(self) -> "Exporter":
        from raptr.models.decoder.export import EXPORTER

        return EXPORTER


SIZES: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(layers=6, width=128, heads=4, head_size=32, mlp=344, init="fan-in"),
    "mini": DecoderConfig(layers=12, width=256, heads=4, head_size=64, mlp=688, init="fan-in"),
    "small": DecoderConfig(layers=12, width=512, heads=8, head_size=64, mlp=1376, init="fan-in"),
    "100m": DecoderConfig(layers=12, width=768, heads=12, head_size=64, mlp=2048, init="fan-in"),
    "1.6b": DecoderConfig(layers=24, width=2048, heads=16, head_size=128, mlp=8192, init="fan-in"),
}
DECODER = Family("decoder", SIZES, objectives=("causal", "ul2"), planned="100m")
