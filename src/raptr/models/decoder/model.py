"""A decoder with Llama's architecture (Touvron et al., 2023): RMSNorm, rotary positions, SwiGLU, no biases.

Shapes: B batch, S sequence, N targets, D width, G groups of heads that run, R query heads of a group, K head size,
F MLP, V vocabulary.

The network is that of `LlamaForCausalLM`, to which it is exported. Two matrices are fused: queries, keys and values,
and the MLP's gate and up projections. Query head r of group g is at index r·G + g, so the fused QKV matrix consists of
R + 2 blocks of G heads; the last two blocks are keys and values. `layout` describes this to all code that slices it.
"""

from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptr.data.batch import Batch
from raptr.models.attention import Segments, attend, make_prefix, make_segments
from raptr.models.decoder.config import DecoderConfig
from raptr.models.fused import linear_cross_entropy, swiglu
from raptr.models.inputs import BlockInputs, scaled, times
from raptr.models.layout import Cut, Layout, of_running
from raptr.models.model import Model, at_targets


class Context(NamedTuple):
    """What all layers share: cosine and sine of the rotary angles, (S, K/2), and the attention mask (None: causal)."""

    cos_SK: Tensor
    sin_SK: Tensor
    segments: Segments | None


@final
class Block(nn.Module):
    """A layer: h = x + attention(norm(x)), then h + MLP(norm(h)). Groups of heads and MLP parts can be left out."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.parts, self.head_size = config.groups, config.parts, config.head_size
        self.layout = layout(config)
        queries, keys = config.heads * config.head_size, config.groups * config.head_size
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.qkv = nn.Linear(config.width, queries + 2 * keys, bias=False)
        self.attention_out = nn.Linear(queries, config.width, bias=False)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.mlp_in = nn.Linear(config.width, 2 * config.mlp, bias=False)
        self.mlp_out = nn.Linear(config.mlp, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, inputs: BlockInputs, context: Context) -> Tensor:
        """Return the layer's output, (B, S, D); with a layer scale s, x + s·(layer(x) - x)."""
        qkv, project, mlp_in, mlp_out = (
            of_running(self, f"{name}.weight", inputs) for name in ("qkv", "attention_out", "mlp_in", "mlp_out")
        )
        s, branch = inputs.layer_scale, inputs.branch_scale
        t = times(times(s, branch), inputs.part_scale)
        qkv, mlp_in = scaled(qkv, inputs.norm_scale), scaled(mlp_in, inputs.norm_scale)
        o_BSE = self.attended(F.linear(normed(self.attention_norm, x_BSD), qkv), context)
        a_BSD: Tensor = self.dropout(F.linear(o_BSE, scaled(project, times(branch, inputs.head_scale))))
        h_BSD = x_BSD + a_BSD
        activated_BSF = swiglu(F.linear(normed(self.mlp_norm, h_BSD), mlp_in))
        m_BSD: Tensor = self.dropout(F.linear(activated_BSF, scaled(mlp_out, t)))
        return h_BSD + m_BSD if s is None else x_BSD + s * a_BSD + m_BSD

    def attended(self, qkv: Tensor, context: Context) -> Tensor:
        """Return the concatenated outputs of the heads, in the order of the query heads in `qkv`."""
        blocks = self.layout["qkv.weight"].maps
        qkv = qkv.view(*qkv.shape[:2], blocks, -1, self.head_size)  # (B, S, R + 2, G, K)
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        q_BHSK = rotated(q.permute(0, 3, 2, 1, 4), context).flatten(1, 2)  # a group's query heads are neighbours
        k_BGSK = rotated(k.transpose(1, 2), context)
        v_BGSK = v.transpose(1, 2)
        o_BHSK = attend(q_BHSK, k_BGSK, v_BGSK, context.segments, causal=True)
        batch, _, length, _ = o_BHSK.shape
        o = o_BHSK.reshape(batch, -1, blocks - 2, length, self.head_size)  # (B, G, R, S, K)
        return o.permute(0, 3, 2, 1, 4).flatten(2)


@final
class Embedding(nn.Module):
    """The token embeddings."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens_BS: Tensor, tokens_VD: Tensor, stream: torch.dtype | None) -> Tensor:
        """Return the input of the first layer, (B, S, D), in the precision `stream` (None: as computed)."""
        x_BSD = F.embedding(tokens_BS, tokens_VD)
        dropped_BSD: Tensor = self.dropout(x_BSD if stream is None else x_BSD.to(stream))
        return dropped_BSD


@final
class Head(nn.Module):
    """The final norm and the loss."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm, self.z_loss = nn.RMSNorm(config.width, eps=config.norm_epsilon), config.z_loss

    def forward(self, x_BSD: Tensor, positions_BM: Tensor | None, labels_BM: Tensor, output_VD: Tensor) -> Tensor:
        """Return the mean cross entropy at the targets, in training with the z-loss added."""
        x_ND = normed(self.norm, at_targets(x_BSD, positions_BM))
        z_loss = self.z_loss if self.training else 0.0
        return linear_cross_entropy(x_ND, output_VD, None, labels_BM.flatten(), z_loss)


@final
class Decoder(Model):
    """A language model whose attention is causal, or bidirectional within a prefix."""

    OUTPUTS = ("attention_out", "mlp_out")
    config: DecoderConfig

    def __init__(self, config: DecoderConfig, seed: int = 0) -> None:
        super().__init__()
        self.config, self.layout = config, layout(config)
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(self.new_block() for _ in range(config.layers))
        self.head = Head(config)
        self.output = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)
        self.initialise(seed)

    def new_block(self) -> Block:
        return Block(self.config)

    def ends(self) -> tuple[nn.Module, ...]:
        return self.embedding, self.head

    @property
    def output_VD(self) -> Tensor:
        """The output matrix, which computes the logits; the token matrix if they are tied."""
        return self.tokens.weight if self.output is None else self.output.weight

    def enter(self, batch: Batch, stream: torch.dtype | None) -> Tensor:
        x_BSD: Tensor = self.embedding(batch.tokens_BS, self.tokens.weight, stream)
        return x_BSD

    def context(self, batch: Batch) -> Context:
        """Return the rotary angles of the positions and the attention mask."""
        size, wide = self.config.head_size, torch.promote_types(self.tokens.weight.dtype, torch.float32)
        device = batch.tokens_BS.device
        rates_K = self.config.rope_base ** (-torch.arange(0, size, 2, dtype=wide, device=device) / size)
        angle_SK = torch.outer(torch.arange(batch.tokens_BS.shape[1], dtype=wide, device=device), rates_K)
        if batch.prefix_B is None:
            segments = make_segments(batch.segments_BS, causal=True)
        else:
            assert batch.segments_BS is None
            segments = make_prefix(batch.prefix_B, batch.tokens_BS.shape[1])
        return Context(angle_SK.cos(), angle_SK.sin(), segments)

    def loss(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        value: Tensor = self.head(x_BSD, batch.positions_BM, batch.labels_BM, self.output_VD)
        return value

    def scores(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        x_ND = normed(self.head.norm, at_targets(x_BSD, batch.positions_BM))
        return F.linear(x_ND, self.output_VD).view(*batch.labels_BM.shape, -1)


def layout(config: DecoderConfig) -> Layout:
    """Return where a block's matrices hold its groups of heads and MLP parts."""
    queries = config.heads // config.groups
    return {
        "qkv.weight": Cut("heads", dim=0, maps=queries + 2),
        "attention_out.weight": Cut("heads", dim=1, maps=queries),
        "mlp_in.weight": Cut("parts", dim=0, maps=2),
        "mlp_out.weight": Cut("parts", dim=1),
    }


def normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Return norm(x) in the wider precision of x and the norm's gain; torch warns if they differ."""
    y: Tensor = norm(x.to(torch.promote_types(x.dtype, norm.weight.dtype)))
    return y


def rotated(x: Tensor, context: Context) -> Tensor:
    """Apply rotary positions to x, (..., S, K): rotate elements i and i + K/2, as a pair, by their angle."""
    first, second = x.chunk(2, -1)
    cos, sin = context.cos_SK, context.sin_SK
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
