"""A small Llama and rows of tokens for it."""

from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch.utils.data import Dataset

STEPS = 10


def llama(**settings: Any) -> hf.LlamaForCausalLM:
    """Six layers, the same weights each time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 20}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**sizes, "num_hidden_layers": 6, "use_cache": False, **settings}))


def whole(model: hf.LlamaForCausalLM) -> bool:
    """Whether the model's own blocks are in their list."""
    return all(type(block).__name__ == "LlamaDecoderLayer" for block in model.model.layers)


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens that count up from different numbers."""

    def __init__(self, count: int = 40) -> None:
        self.tokens = (torch.arange(count)[:, None] * 3 + torch.arange(12)) % 20

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[row], "labels": self.tokens[row]}
