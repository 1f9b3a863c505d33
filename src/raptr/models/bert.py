"""BERT as a pre-LN encoder with a masked-language-model head, whose forward takes the step's subnetwork.

Shapes: B batch, S sequence, M masked positions, D width, H heads that run, K head size, F MLP, V vocabulary.

The layout is that of the stock pre-LN encoder of `transformers` (RoBERTa with pre-layer normalisation):
LayerNorm after the embeddings, two pre-normed residual branches a layer, a final LayerNorm, and a head of
dense, GELU, LayerNorm and the tied embedding matrix. There are no token types and no next-sentence task. The
head runs on the masked positions only. Layers are chosen here in Python, outside any compiled code; scales
and indices reach a block as tensors. `embed`, `Block.forward` and `loss` are the three pieces that are compiled.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptr.data.batch import Batch
from raptr.models.attention import Segments, make_segments, self_attention
from raptr.models.fused import Product, linear_cross_entropy, residual_mlp
from raptr.models.init import initialise
from raptr.models.inputs import BlockInputs, block_inputs
from raptr.models.sizes import BertConfig
from raptr.subnetworks import Subnetwork

EPSILON = 1e-5


class Block(nn.Module):
    """A pre-LN Transformer layer: x + attention(LN(x)), then + MLP(LN(·)), as a whole or in part."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_size
        self.heads, self.head_size, self.parts = config.heads, config.head_size, config.parts
        self.attention_norm = nn.LayerNorm(config.width, eps=EPSILON)
        self.qkv = nn.Linear(config.width, 3 * inner)
        self.attention_out = nn.Linear(inner, config.width)
        self.mlp_norm = nn.LayerNorm(config.width, eps=EPSILON)
        self.mlp_in = nn.Linear(config.width, config.mlp)
        self.mlp_out = nn.Linear(config.mlp, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, inputs: BlockInputs, segments: Segments | None = None) -> Tensor:
        """The layer's output; with a layer scale s, x + s·(layer(x) - x)."""
        s, t = inputs.layer_scale, _times(inputs.layer_scale, inputs.mlp_scale)
        qkv, project = self.attention_weights(inputs)
        mlp_in, mlp_out = self.mlp_weights(inputs)
        project = _scaled(project, inputs.attention_scale)
        o_BSE = self_attention(self.attention_norm(x_BSD), *qkv, self.head_size, segments)
        if self.dropout.p == 0:
            y_BSD = residual_mlp(x_BSD, o_BSE, project, self.mlp_norm, mlp_in, mlp_out, s, t)
            if y_BSD is not None:
                return y_BSD
        a_BSD: Tensor = self.dropout(F.linear(o_BSE, *project))
        h_BSD = x_BSD + a_BSD
        g_BSF = F.gelu(F.linear(self.mlp_norm(h_BSD), *mlp_in))
        m_BSD: Tensor = self.dropout(F.linear(g_BSF, *_scaled(mlp_out, t)))
        return h_BSD + m_BSD if s is None else x_BSD + s * a_BSD + m_BSD

    def attention_weights(self, inputs: BlockInputs) -> tuple[Product, Product]:
        """What makes queries, keys and values, and what projects; of all heads, or as if the chosen were all."""
        qkv_weight: Tensor = self.qkv.weight
        qkv_bias: Tensor = self.qkv.bias
        out_weight: Tensor = self.attention_out.weight
        if inputs.heads_H is not None:
            width, cut = out_weight.shape[0], (3, self.heads, self.head_size)
            qkv_weight = qkv_weight.view(*cut, width).index_select(1, inputs.heads_H).reshape(-1, width)
            qkv_bias = qkv_bias.view(*cut).index_select(1, inputs.heads_H).reshape(-1)
            out_weight = out_weight.view(width, *cut[1:]).index_select(1, inputs.heads_H).reshape(width, -1)
        return (qkv_weight, qkv_bias), (out_weight, self.attention_out.bias)

    def mlp_weights(self, inputs: BlockInputs) -> tuple[Product, Product]:
        """What the MLP enters and leaves with; all of it, or as if the chosen parts were all."""
        in_weight: Tensor = self.mlp_in.weight
        in_bias: Tensor = self.mlp_in.bias
        out_weight: Tensor = self.mlp_out.weight
        if inputs.parts_P is not None:
            width = out_weight.shape[0]
            in_weight = in_weight.view(self.parts, -1, width).index_select(0, inputs.parts_P).reshape(-1, width)
            in_bias = in_bias.view(self.parts, -1).index_select(0, inputs.parts_P).reshape(-1)
            out_weight = out_weight.view(width, self.parts, -1).index_select(1, inputs.parts_P).reshape(width, -1)
        return (in_weight, in_bias), (out_weight, self.mlp_out.bias)


class Bert(nn.Module):
    """The encoder and its masked-language-model head."""

    LAYERS: ClassVar[str] = "blocks"
    OUTPUTS: ClassVar[tuple[str, ...]] = ("attention_out", "mlp_out")  # where a block writes to the residual stream

    def __init__(self, config: BertConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.embedding_norm = nn.LayerNorm(config.width, eps=EPSILON)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width, eps=EPSILON)
        self.head_dense = nn.Linear(config.width, config.width)
        self.head_norm = nn.LayerNorm(config.width, eps=EPSILON)
        self.head_bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.stream: torch.dtype | None = None  # of what layers hand on; None: as the embeddings
        initialise(self, seed, init=config.init, layers=config.layers, outputs=self.OUTPUTS)

    def forward(self, batch: Batch, subnetwork: Subnetwork) -> Tensor:
        """The mean cross entropy over the masked positions, from the part of the model that runs."""
        return self.loss(self.encoded(batch.tokens_BS, subnetwork, batch.segments_BS), *batch[1:3])

    def logits(self, batch: Batch, subnetwork: Subnetwork) -> Tensor:
        """Scores over the vocabulary at the masked positions, (B, M, V)."""
        x_BSD = self.encoded(batch.tokens_BS, subnetwork, batch.segments_BS)
        x_ND = self.predictors(x_BSD, batch.positions_BM)
        return F.linear(x_ND, self.tokens.weight, self.head_bias).view(*batch.labels_BM.shape, -1)

    def hidden(self, tokens_BS: Tensor, subnetwork: Subnetwork, segments_BS: Tensor | None = None) -> Tensor:
        """The encoder's output; with segments, attention stays inside each."""
        normed_BSD: Tensor = self.final_norm(self.encoded(tokens_BS, subnetwork, segments_BS))
        return normed_BSD

    def encoded(self, tokens_BS: Tensor, subnetwork: Subnetwork, segments_BS: Tensor | None = None) -> Tensor:
        """The encoder's output before the final norm."""
        if subnetwork.layers != len(self.blocks):
            raise ValueError(f"the subnetwork is made for {subnetwork.layers} layers; the model has {len(self.blocks)}")
        x_BSD, segments = self.embed(tokens_BS), make_segments(segments_BS)
        for layer, inputs in block_inputs(subnetwork, x_BSD):
            x_BSD = self.blocks[layer](x_BSD, inputs, segments)
        return x_BSD

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """What enters the first layer, in the precision that the layers hand on."""
        length = tokens_BS.shape[1]
        if length > self.config.positions:
            raise ValueError(f"the sequence has {length} tokens; up to {self.config.positions} are allowed")
        x_BSD: Tensor = self.embedding_norm(self.tokens(tokens_BS) + self.positions.weight[:length])
        dropped_BSD: Tensor = self.dropout(x_BSD if self.stream is None else x_BSD.to(self.stream))
        return dropped_BSD

    def loss(self, x_BSD: Tensor, positions_BM: Tensor | None, labels_BM: Tensor) -> Tensor:
        """The mean cross entropy at the masked positions, from the encoder's output before the final norm."""
        x_ND = self.predictors(x_BSD, positions_BM)
        return linear_cross_entropy(x_ND, self.tokens.weight, self.head_bias, labels_BM.flatten())

    def predictors(self, x_BSD: Tensor, positions_BM: Tensor | None) -> Tensor:
        """What the scores are made of, for all N = B·M masked positions."""
        batch, length, _ = x_BSD.shape
        x_ND = x_BSD.flatten(0, 1)
        if positions_BM is not None:
            first_B = torch.arange(0, batch * length, length, device=x_BSD.device)
            x_ND = x_ND.index_select(0, (first_B.unsqueeze(1) + positions_BM).flatten())
        normed_ND: Tensor = self.head_norm(F.gelu(self.head_dense(self.final_norm(x_ND))))
        return normed_ND


def _scaled(product: Product, scale: Tensor | None) -> Product:
    """Times the scale: weights are few, what comes out of them is much."""
    return product if scale is None else (scale * product[0], scale * product[1])


def _times(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    return two if one is None else one if two is None else one * two
