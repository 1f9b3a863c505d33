"""A decoder of Llama's kind (Touvron et al., 2023): RMSNorm, rotary positions, SwiGLU, no biases.

Shapes: B batch, S sequence, N targets, D width, G groups of heads that run, R query heads of a group, K head size,
F MLP, V vocabulary.

The network is that of `LlamaForCausalLM`, into which it is exported. Two products are fused: queries, keys and values,
and the MLP's gate and input. A query head r of group g stands at place r·G + g, so that the fused matrix is R + 2
blocks of G heads, of which the last two are keys and values: `layout` says so to everybody who cuts it.
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
    """What every layer sees: the rotation of each position, (S, K/2), and who attends to whom (None: causal)."""

    cos_SK: Tensor
    sin_SK: Tensor
    segments: Segments | None


@final
class Block(nn.Module):
    """A layer: x + attention(norm(x)), then + MLP(norm(·)), as a whole or in part."""

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
        """The layer's output; with a layer scale s, x + s·(layer(x) - x)."""
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
        """The heads' outputs side by side, in the order of the queries."""
        blocks = self.layout["qkv.weight"].maps
        qkv = qkv.view(*qkv.shape[:2], blocks, -1, self.head_size)  # (B, S, R + 2, G, K)
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        q_BHSK = rotated(q.permute(0, 3, 2, 1, 4), context).flatten(1, 2)  # the heads of a group side by side
        k_BGSK = rotated(k.transpose(1, 2), context)
        v_BGSK = v.transpose(1, 2)
        o_BHSK = attend(q_BHSK, k_BGSK, v_BGSK, context.segments, causal=True)
        batch, _, length, _ = o_BHSK.shape
        o = o_BHSK.reshape(batch, -1, blocks - 2, length, self.head_size)  # (B, G, R, S, K)
        return o.permute(0, 3, 2, 1, 4).flatten(2)


@final
class Embedding(nn.Module):
    """Tokens as vectors."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens_BS: Tensor, tokens_VD: Tensor, stream: torch.dtype | None) -> Tensor:
        """What enters the first layer, in the precision of the residual stream."""
        x_BSD = F.embedding(tokens_BS, tokens_VD)
        dropped_BSD: Tensor = self.dropout(x_BSD if stream is None else x_BSD.to(stream))
        return dropped_BSD


@final
class Head(nn.Module):
    """From the last layer's output to the loss."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm, self.z_loss = nn.RMSNorm(config.width, eps=config.norm_epsilon), config.z_loss

    def forward(self, x_BSD: Tensor, positions_BM: Tensor | None, labels_BM: Tensor, output_VD: Tensor) -> Tensor:
        """The mean cross entropy at the targets; in training with the z-loss."""
        x_ND = normed(self.norm, at_targets(x_BSD, positions_BM))
        z_loss = self.z_loss if self.training else 0.0
        return linear_cross_entropy(x_ND, output_VD, None, labels_BM.flatten(), z_loss)


@final
class Decoder(Model):
    """A causal language model, or one that sees a prefix both ways."""

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
        """The matrix that makes scores: the tokens' own where it is tied."""
        return self.tokens.weight if self.output is None else self.output.weight

    def enter(self, batch: Batch, stream: torch.dtype | None) -> Tensor:
        x_BSD: Tensor = self.embedding(batch.tokens_BS, self.tokens.weight, stream)
        return x_BSD

    def context(self, batch: Batch) -> Context:
        """The rotation of each position, and who attends to whom."""
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
    """How a block's matrices are laid out in groups of heads and MLP parts."""
    queries = config.heads // config.groups
    return {
        "qkv.weight": Cut("heads", dim=0, maps=queries + 2),
        "attention_out.weight": Cut("heads", dim=1, maps=queries),
        "mlp_in.weight": Cut("parts", dim=0, maps=2),
        "mlp_out.weight": Cut("parts", dim=1),
    }


def normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """The norm of x in the precision of its gain, float32 at least; torch would warn of two precisions."""
    y: Tensor = norm(x.to(torch.promote_types(x.dtype, norm.weight.dtype)))
    return y


def rotated(x: Tensor, context: Context) -> Tensor:
    """The vectors (..., S, K), each pair of an element of the first half and one of the second turned by its angle."""
    one, two = x.chunk(2, -1)
    cos, sin = context.cos_SK, context.sin_SK
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)
