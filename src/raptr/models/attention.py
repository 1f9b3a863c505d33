"""Self-attention over whole sequences, or inside segments of them (documents, or everything but padding).

Shapes: B batch, H heads, S sequence, K head size. Inside segments, a GPU runs `flex_attention`, which skips the
blocks of other segments; the CPU, where that has no backward pass, uses a dense mask. Both compute the same. Short
whole sequences in bfloat16 have a kernel of their own on a GPU.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from raptr.models.fused import short_attention


@dataclass(frozen=True)
class Segments:
    """Which positions may attend to which, made once for all layers: a dense mask or a block mask."""

    dense_B1SS: Tensor | None = None
    blocks: BlockMask | None = None


def make_segments(segments_BS: Tensor | None) -> Segments | None:
    """The mask under which tokens attend to those of their own segment only."""
    if segments_BS is None:
        return None
    if not segments_BS.is_cuda:
        return Segments(dense_B1SS=(segments_BS.unsqueeze(2) == segments_BS.unsqueeze(1)).unsqueeze(1))
    batch, length = segments_BS.shape

    def together(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return segments_BS[b, q] == segments_BS[b, k]

    return Segments(blocks=create_block_mask(together, batch, None, length, length, device=segments_BS.device.type))


def self_attention(
    x_BSD: Tensor, weight: Tensor, bias: Tensor, head_size: int, segments: Segments | None = None
) -> Tensor:
    """All heads' outputs side by side, before the projection; `weight` makes queries, keys and values of x."""
    fused_BSD = short_attention(x_BSD, weight, bias, head_size) if segments is None else None
    if fused_BSD is not None:
        return fused_BSD
    qkv = F.linear(x_BSD, weight, bias)
    q_BHSK, k_BHSK, v_BHSK = qkv.view(*x_BSD.shape[:2], 3, -1, head_size).permute(2, 0, 3, 1, 4)
    return attend(q_BHSK, k_BHSK, v_BHSK, segments).transpose(1, 2).flatten(2)


def attend(q_BHSK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, segments: Segments | None) -> Tensor:
    """Scaled dot-product attention, (B, H, S, K)."""
    if segments is not None and segments.blocks is not None:
        if torch.compiler.is_compiling():
            attended: Tensor = flex_attention(q_BHSK, k_BHSK, v_BHSK, block_mask=segments.blocks)
        else:
            with torch.compiler.set_stance("default"):  # evaluation runs uncompiled but for this
                attended = _flex()(q_BHSK, k_BHSK, v_BHSK, block_mask=segments.blocks)
        return attended
    return F.scaled_dot_product_attention(
        q_BHSK, k_BHSK, v_BHSK, attn_mask=None if segments is None else segments.dense_B1SS
    )


@cache
def _flex() -> Any:
    """`flex_attention` compiled: uncompiled it would build the whole matrix of scores."""
    return torch.compile(flex_attention, dynamic=False)
