"""BERT as a pre-LN encoder with a masked-language-model head.

Shapes: B batch, S sequence, M masked positions, D width, H heads that run, K head size, F MLP, V vocabulary.

The architecture is that of the stock pre-LN encoder of `transformers` (RoBERTa with pre-layer normalisation):
LayerNorm after the embeddings, two pre-norm residual branches per layer, a final LayerNorm, and a head of a dense
layer, GELU, LayerNorm and the tied embedding matrix. There are no token types and no next-sentence task. The head runs
on the masked positions only. Embedding and head share the token matrix, so the model owns it and passes it to both.
"""

from collections.abc import Mapping
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptr.data.batch import Batch
from raptr.models.attention import Segments, make_segments, self_attention
from raptr.models.bert.config import BertConfig
from raptr.models.fused import Product, linear_cross_entropy, residual_mlp
from raptr.models.inputs import BlockInputs, scaled, times
from raptr.models.layout import Cut, Layout, of_running
from raptr.models.model import Model, at_targets

EPSILON = 1e-5
LAYOUT: Layout = {
    "qkv.weight": Cut("heads", dim=0, maps=3),
    "qkv.bias": Cut("heads", dim=0, maps=3),
    "attention_out.weight": Cut("heads", dim=1),
    "mlp_in.weight": Cut("parts", dim=0),
    "mlp_in.bias": Cut("parts", dim=0),
    "mlp_out.weight": Cut("parts", dim=1),
}


@final
class Block(nn.Module):
    """A pre-LN layer: h = x + attention(LN(x)), then h + MLP(LN(h)). Heads and MLP parts can be left out."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_size
        self.heads, self.head_size, self.parts, self.layout = config.heads, config.head_size, config.parts, LAYOUT
        self.attention_norm = nn.LayerNorm(config.width, eps=EPSILON)
        self.qkv = nn.Linear(config.width, 3 * inner)
        self.attention_out = nn.Linear(inner, config.width)
        self.mlp_norm = nn.LayerNorm(config.width, eps=EPSILON)
        self.mlp_in = nn.Linear(config.width, config.mlp)
        self.mlp_out = nn.Linear(config.mlp, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, inputs: BlockInputs, segments: Segments | None = None) -> Tensor:
        """Return the layer's output, (B, S, D); with a layer scale s, x + s·(layer(x) - x)."""
        s, branch = inputs.layer_scale, inputs.branch_scale
        t = times(times(s, branch), inputs.part_scale)
        qkv, (weight, bias) = self.attention_weights(inputs)
        project = scaled(weight, times(branch, inputs.head_scale)), scaled(bias, branch)
        mlp_in, (weight, bias) = self.mlp_weights(inputs)
        mlp_out = weight, scaled(bias, times(s, branch))
        o_BSE = self_attention(self.attention_norm(x_BSD), *qkv, self.head_size, segments)
        if self.dropout.p == 0:
            y_BSD = residual_mlp(x_BSD, o_BSE, project, self.mlp_norm, mlp_in, mlp_out, s, t)
            if y_BSD is not None:
                return y_BSD
        a_BSD: Tensor = self.dropout(F.linear(o_BSE, *project))
        h_BSD = x_BSD + a_BSD
        g_BSF = F.gelu(F.linear(self.mlp_norm(h_BSD), *mlp_in))
        m_BSD: Tensor = self.dropout(F.linear(g_BSF, scaled(mlp_out[0], t), mlp_out[1]))
        return h_BSD + m_BSD if s is None else x_BSD + s * a_BSD + m_BSD

    def attention_weights(self, inputs: BlockInputs) -> tuple[Product, Product]:
        """Return the QKV and output projections of the running heads, the norm's scale folded into the former."""
        weight = scaled(of_running(self, "qkv.weight", inputs), inputs.norm_scale)
        qkv = weight, of_running(self, "qkv.bias", inputs)
        return qkv, (of_running(self, "attention_out.weight", inputs), self.attention_out.bias)

    def mlp_weights(self, inputs: BlockInputs) -> tuple[Product, Product]:
        """Return the MLP's two linear layers for the running parts, the norm's scale folded into the first."""
        weight = scaled(of_running(self, "mlp_in.weight", inputs), inputs.norm_scale)
        mlp_in = weight, of_running(self, "mlp_in.bias", inputs)
        return mlp_in, (of_running(self, "mlp_out.weight", inputs), self.mlp_out.bias)


@final
class Embedding(nn.Module):
    """The sum of token and position embeddings, normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.positions = nn.Embedding(config.positions, config.width)
        self.norm = nn.LayerNorm(config.width, eps=EPSILON)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens_BS: Tensor, tokens_VD: Tensor, stream: torch.dtype | None) -> Tensor:
        """Return the input of the first layer, (B, S, D), in the precision `stream` (None: as computed)."""
        length = tokens_BS.shape[1]
        x_BSD: Tensor = self.norm(F.embedding(tokens_BS, tokens_VD) + self.positions.weight[:length])
        dropped_BSD: Tensor = self.dropout(x_BSD if stream is None else x_BSD.to(stream))
        return dropped_BSD


@final
class Head(nn.Module):
    """The final norm, the masked-language-model head and its loss."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.final_norm = nn.LayerNorm(config.width, eps=EPSILON)
        self.dense = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=EPSILON)

    def forward(
        self, x_BSD: Tensor, positions_BM: Tensor | None, labels_BM: Tensor, tokens_VD: Tensor, bias_V: Tensor
    ) -> Tensor:
        """Return the mean cross entropy at the masked positions."""
        return linear_cross_entropy(self.predictors(x_BSD, positions_BM), tokens_VD, bias_V, labels_BM.flatten())

    def predictors(self, x_BSD: Tensor, positions_BM: Tensor | None) -> Tensor:
        """Return the inputs of the output matrix, which computes the logits: (N, D), N = B·M masked positions."""
        x_ND = self.final_norm(at_targets(x_BSD, positions_BM))
        normed_ND: Tensor = self.norm(F.gelu(self.dense(x_ND)))
        return normed_ND


@final
class Bert(Model):
    """The encoder and its masked-language-model head."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("attention_out", "mlp_out")
    DRAWN_AS: ClassVar[Mapping[str, str]] = {
        "embedding.positions.weight": "positions.weight",
        "head.dense.weight": "head_dense.weight",
    }
    config: BertConfig

    def __init__(self, config: BertConfig, seed: int = 0) -> None:
        super().__init__()
        self.config, self.layout = config, LAYOUT
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(self.new_block() for _ in range(config.layers))
        self.head = Head(config)
        self.head_bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.initialise(seed)

    def new_block(self) -> Block:
        return Block(self.config)

    def ends(self) -> tuple[nn.Module, ...]:
        return self.embedding, self.head

    def enter(self, batch: Batch, stream: torch.dtype | None) -> Tensor:
        length = batch.tokens_BS.shape[1]
        if length > self.config.positions:
            raise ValueError(f"the sequence has {length} tokens; up to {self.config.positions} are allowed")
        x_BSD: Tensor = self.embedding(batch.tokens_BS, self.tokens.weight, stream)
        return x_BSD

    def context(self, batch: Batch) -> Segments | None:
        """Return the mask that keeps attention within segments; None if each sequence is one segment."""
        return make_segments(batch.segments_BS)

    def loss(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        value: Tensor = self.head(x_BSD, batch.positions_BM, batch.labels_BM, self.tokens.weight, self.head_bias)
        return value

    def scores(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        x_ND = self.head.predictors(x_BSD, batch.positions_BM)
        return F.linear(x_ND, self.tokens.weight, self.head_bias).view(*batch.labels_BM.shape, -1)
