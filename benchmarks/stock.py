"""Hugging Face's models of the same dimensions as ours, with their training losses: the peers in the benchmarks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptr.data.batch import Batch
from raptr.models.bert.config import BertConfig
from raptr.models.contract import ModelConfig
from raptr.models.decoder.config import DecoderConfig
from raptr.models.model import at_targets

COMPILED = ("eager", "compiled", "compiled by block")
Head = Callable[["Stock", Tensor, Batch], Tensor]


class Stock(nn.Module):
    """A stock model: `body` gives the hidden states, `scores` the logits, and `parts` can be compiled one by one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if isinstance(config, BertConfig):
            self.model = masked_lm(config)
            self.body, self.scores = self.model.bert, self.model.cls
            self.parts = (self.body.embeddings, *self.body.encoder.layer)
        else:
            assert isinstance(config, DecoderConfig)
            self.model = causal_lm(config)
            self.body, self.scores = self.model.model, self.model.lm_head
            self.parts = (self.body.embed_tokens, *self.body.layers)
        assert self.model.config._attn_implementation == "sdpa"


def masked_lm(config: BertConfig) -> Any:
    """Return a `BertForMaskedLM` of these dimensions, without dropout."""
    from transformers import BertConfig as StockConfig
    from transformers import BertForMaskedLM

    stock = StockConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp,
        max_position_embeddings=config.positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(stock).train()


def causal_lm(config: DecoderConfig) -> Any:
    """Return a `LlamaForCausalLM` of these dimensions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    stock = LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        intermediate_size=config.mlp,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.groups,
        head_dim=config.head_size,
        max_position_embeddings=config.positions,
        rms_norm_eps=1e-6,
        tie_word_embeddings=config.tied,
        use_cache=False,
    )
    return LlamaForCausalLM(stock).train()


def all_positions(stock: Stock, hidden_BSD: Tensor, batch: Batch) -> Tensor:
    """Return the stock loss: the head runs on every position, and labels are -100 where nothing is predicted."""
    return F.cross_entropy(stock.scores(hidden_BSD).flatten(0, 1), batch.labels_BS().flatten())


def target_positions(stock: Stock, hidden_BSD: Tensor, batch: Batch) -> Tensor:
    """Return the same loss, with the head on the target positions only."""
    return F.cross_entropy(stock.scores(at_targets(hidden_BSD, batch.positions_BM)), batch.labels_BM.flatten())


HEADS: dict[str, Head] = {"all positions": all_positions, "masked positions": target_positions}
PEERS = tuple(f"Hugging Face, {head}, {how}" for head in HEADS for how in COMPILED)


def peer_loss(stock: Stock, head: Head, how: str) -> Callable[[Batch], Tensor]:
    """Return the loss of a batch as a function: eager, compiled as one, or compiled layer by layer (`how`)."""
    if how == "compiled by block":
        for module in stock.parts:
            module.compile(dynamic=False)
        head = torch.compile(head, dynamic=False)

    def loss(batch: Batch) -> Tensor:
        return head(stock, stock.body(input_ids=batch.tokens_BS).last_hidden_state, batch)

    return torch.compile(loss, dynamic=False) if how == "compiled" else loss
