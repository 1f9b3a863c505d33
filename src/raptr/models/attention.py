"""Self-attention over whole sequences, within segments (documents, or everything but padding), or with a bidirectional
prefix.

Shapes: B batch, H heads, G key-value heads, S sequence, K head size, T tiles: the blocks of a block mask.

With a mask, a GPU runs `flex_attention`, which skips blocks without visible pairs. The CPU uses a dense mask, because
`flex_attention` has no backward pass there. Both compute the same. Short unmasked sequences in bfloat16 have a kernel
of their own on a GPU.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from raptr.models.fused import short_attention

BLOCK = 128  # a block of a block mask has as many queries, and as many keys


@dataclass(frozen=True)
class Segments:
    """Which positions may attend to which: a dense mask or a block mask, built once for all layers of a step."""

    dense_B1SS: Tensor | None = None
    blocks: BlockMask | None = None


def make_segments(segments_BS: Tensor | None, *, causal: bool = False) -> Segments | None:
    """Return the mask in which tokens attend only to tokens of their own segment, and if `causal` not to later ones.

    Return None if `segments_BS` is None: each sequence is then one segment, and `attend` needs no mask.
    """
    if segments_BS is None:
        return None
    if segments_BS.is_cuda:
        return Segments(blocks=segment_blocks(segments_BS, causal=causal))
    dense_BSS = segments_BS.unsqueeze(2) == segments_BS.unsqueeze(1)
    return Segments(dense_B1SS=(dense_BSS.tril() if causal else dense_BSS).unsqueeze(1))


def segment_blocks(segments_BS: Tensor, *, causal: bool) -> BlockMask:
    """Return the mask of `make_segments` as a block mask, derived from the least and largest segment of each block.

    If segments ascend along the sequence, it has exactly the blocks with visible pairs; otherwise it may have more.
    """
    length = segments_BS.shape[1]

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = segments_BS[b, q] == segments_BS[b, k]
        return same & (k <= q) if causal else same

    padded_BS = torch.cat([segments_BS, segments_BS[:, -1:].expand(-1, -length % BLOCK)], 1)
    least_BT, largest_BT = padded_BS.view(len(padded_BS), -1, BLOCK).aminmax(dim=-1)
    alike_BT = least_BT == largest_BT
    needed_BTT = (least_BT.unsqueeze(1) <= largest_BT.unsqueeze(2)) & (least_BT.unsqueeze(2) <= largest_BT.unsqueeze(1))
    full_BTT = needed_BTT & alike_BT.unsqueeze(1) & alike_BT.unsqueeze(2)
    if causal:
        row_T1, tile_T = _tiles(length, segments_BS.device)
        needed_BTT, full_BTT = needed_BTT & (tile_T <= row_T1), full_BTT & (tile_T < row_T1)
    return _blocks(needed_BTT, full_BTT, seen, length)


def make_prefix(prefix_B: Tensor, length: int) -> Segments:
    """Return the mask in which position q attends to position k if k <= q or k < prefix."""
    if prefix_B.is_cuda:
        return Segments(blocks=prefix_blocks(prefix_B, length))
    place_S = torch.arange(length, device=prefix_B.device)
    dense_BSS = (place_S <= place_S.unsqueeze(1)) | (place_S < prefix_B.view(-1, 1, 1))
    return Segments(dense_B1SS=dense_BSS.unsqueeze(1))


def prefix_blocks(prefix_B: Tensor, length: int) -> BlockMask:
    """Return the mask of `make_prefix` as a block mask, computed for whole blocks."""

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) | (k < prefix_B[b])

    row_T1, tile_T = _tiles(length, prefix_B.device)
    prefix_B11 = prefix_B.view(-1, 1, 1)
    needed_BTT = (tile_T <= row_T1) | (tile_T * BLOCK < prefix_B11)
    full_BTT = (tile_T < row_T1) | ((tile_T + 1) * BLOCK <= prefix_B11)
    return _blocks(needed_BTT, full_BTT, seen, length)


def _tiles(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The indices of the blocks of queries, (T, 1), and of the blocks of keys, (T,)."""
    tile_T = torch.arange(-(-length // BLOCK), device=device)
    return tile_T.unsqueeze(1), tile_T


def _blocks(needed_BTT: Tensor, full_BTT: Tensor, seen: Any, length: int) -> BlockMask:
    """Build a block mask from the blocks with visible pairs and, among these, the fully visible blocks.

    This and the computation of its arguments use only tensor operations of fixed shapes, so that a CUDA graph can
    contain them. `create_block_mask` would evaluate every pair of positions in every step.
    """
    row_T1, tile_T = _tiles(length, needed_BTT.device)
    # A block that extends beyond the sequence is never fully visible.
    full_BTT = full_BTT & ((torch.maximum(row_T1, tile_T) + 1) * BLOCK <= length)
    partial, full = _ordered(needed_BTT & ~full_BTT), _ordered(full_BTT)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(length, length))


def _ordered(tiles_BTT: Tensor) -> tuple[Tensor, Tensor]:
    """For each row: the number of marked blocks, and the indices of all its blocks, marked ones first.

    The second dimension has size 1, so that all heads share them.
    """
    marked_B1TT = tiles_BTT.unsqueeze(1).int()
    order = torch.argsort(marked_B1TT, dim=-1, descending=True, stable=True)
    return marked_B1TT.sum(-1, dtype=torch.int32), order.int()


def self_attention(
    x_BSD: Tensor, weight: Tensor, bias: Tensor, head_size: int, segments: Segments | None = None
) -> Tensor:
    """Return the concatenated outputs of all heads, (B, S, H·K), before the output projection.

    `weight` and `bias` are those of the fused projection to queries, keys and values.
    """
    fused_BSD = short_attention(x_BSD, weight, bias, head_size) if segments is None else None
    if fused_BSD is not None:
        return fused_BSD
    qkv = F.linear(x_BSD, weight, bias)
    q_BHSK, k_BHSK, v_BHSK = qkv.view(*x_BSD.shape[:2], 3, -1, head_size).permute(2, 0, 3, 1, 4)
    return attend(q_BHSK, k_BHSK, v_BHSK, segments).transpose(1, 2).flatten(2)


def attend(
    q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, segments: Segments | None, *, causal: bool = False
) -> Tensor:
    """Return scaled dot-product attention, (B, H, S, K); H / G neighbouring query heads share keys and values.

    `causal` hides later positions; it applies only if `segments` is None.
    """
    grouped = q_BHSK.shape[1] != k_BGSK.shape[1]
    if segments is not None and segments.blocks is not None:
        mask, qkv = segments.blocks, (q_BHSK, k_BGSK, v_BGSK)
        if torch.compiler.is_compiling():
            attended: Tensor = flex_attention(*qkv, block_mask=mask, enable_gqa=grouped)
        else:
            with torch.compiler.set_stance("default"):  # evaluation runs uncompiled, except for this
                attended = _flex()(*qkv, block_mask=mask, enable_gqa=grouped)
        return attended
    dense = None if segments is None else segments.dense_B1SS
    return F.scaled_dot_product_attention(
        q_BHSK, k_BGSK, v_BGSK, attn_mask=dense, is_causal=causal and dense is None, enable_gqa=grouped
    )


@cache
def _flex() -> Any:
    """Return `flex_attention` compiled; uncompiled it would materialise the whole matrix of attention scores."""
    return torch.compile(flex_attention, dynamic=False)
