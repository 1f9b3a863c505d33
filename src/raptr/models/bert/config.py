"""The dimensions of a BERT, its cost, and the named sizes. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from raptr.models.contract import Family, ModelConfig

if TYPE_CHECKING:
    from raptr.models.bert.model import Bert
    from raptr.models.export import Exporter


@final
@dataclass(frozen=True)
class BertConfig(ModelConfig):
    """The dimensions of a BERT."""

    def build(self, seed: int) -> "Bert":
        from raptr.models.bert.model import Bert

        return Bert(self, seed)

    def layer_weights(self, heads: int, parts: int) -> int:
        return self.width * (4 * heads * self.head_size + 2 * parts * (self.mlp // self.parts))

    def head_flops(self, targets: float) -> float:
        return targets * 2 * self.width * (self.width + self.vocabulary)

    def unexportable(self) -> str | None:
        if self.heads * self.head_size == self.width:
            return None
        return (
            f"model.head_size is {self.head_size} with {self.heads} heads and width {self.width}. "
            "In a stock model heads × head_size is the width, so this model cannot be exported."
        )

    def exporter(self) -> "Exporter":
        from raptr.models.bert.export import EXPORTER

        return EXPORTER


# Some are deeper than the published models of these names, so that there is enough depth to train in parts.
SIZES: dict[str, BertConfig] = {
    "tiny": BertConfig(layers=6, width=128, heads=4, head_size=32, mlp=512),
    "mini": BertConfig(layers=12, width=256, heads=4, head_size=64, mlp=1024),
    "small": BertConfig(layers=12, width=512, heads=8, head_size=64, mlp=2048),
    "base": BertConfig(layers=12, width=768, heads=12, head_size=64, mlp=3072),
    "large": BertConfig(layers=24, width=1024, heads=16, head_size=64, mlp=4096),
}
BERT = Family("bert", SIZES, objectives=("mlm",), planned="base")
