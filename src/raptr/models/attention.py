"""Self-attention over whole sequences, inside segments of them (documents, all but padding), or with a prefix.

Shapes: B batch, H heads, S sequence, K head size, T tiles: the blocks of a block mask. Under a mask, a GPU runs
`flex_attention`, which skips the blocks that nobody sees; the CPU, where that has no backward pass, uses a dense mask.
Both compute the same. Short whole sequences in bfloat16 have a kernel of their own on a GPU.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from raptr.models.fused import short_attention

BLOCK = 128  # positions of a block of a block mask, on both sides


@dataclass(frozen=True)
class Segments:
    """Which positions may attend to which, made once for all layers: a dense mask or a block mask."""

    dense_B1SS: Tensor | None = None
    blocks: BlockMask | None = None


def make_segments(segments_BS: Tensor | None, *, causal: bool = False) -> Segments | None:
    """The mask under which tokens attend to those of their own segment only; if `causal`, of these not to later ones.

    None where a sequence is one segment: `attend` then needs no mask.
    """
    if segments_BS is None:
        return None
    if segments_BS.is_cuda:
        return Segments(blocks=segment_blocks(segments_BS, causal=causal))
    dense_BSS = segments_BS.unsqueeze(2) == segments_BS.unsqueeze(1)
    return Segments(dense_B1SS=(dense_BSS.tril() if causal else dense_BSS).unsqueeze(1))


def segment_blocks(segments_BS: Tensor, *, causal: bool) -> BlockMask:
    """The same as a block mask, from the least and the largest segment of each block.

    Where segments ascend, these are the blocks in which something is seen; elsewhere there may be more of them.
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
    """The mask under which position q attends to k where k <= q or k < prefix."""
    if prefix_B.is_cuda:
        return Segments(blocks=prefix_blocks(prefix_B, length))
    place_S = torch.arange(length, device=prefix_B.device)
    dense_BSS = (place_S <= place_S.unsqueeze(1)) | (place_S < prefix_B.view(-1, 1, 1))
    return Segments(dense_B1SS=dense_BSS.unsqueeze(1))


def prefix_blocks(prefix_B: Tensor, length: int) -> BlockMask:
    """The same as a block mask, from what a prefix means for whole blocks."""

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) | (k < prefix_B[b])

    row_T1, tile_T = _tiles(length, prefix_B.device)
    prefix_B11 = prefix_B.view(-1, 1, 1)
    needed_BTT = (tile_T <= row_T1) | (tile_T * BLOCK < prefix_B11)
    full_BTT = (tile_T < row_T1) | ((tile_T + 1) * BLOCK <= prefix_B11)
    return _blocks(needed_BTT, full_BTT, seen, length)


def _tiles(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The numbers of the blocks of queries, as a column, and of those of keys."""
    tile_T = torch.arange(-(-length // BLOCK), device=device)
    return tile_T.unsqueeze(1), tile_T


def _blocks(needed_BTT: Tensor, full_BTT: Tensor, seen: Any, length: int) -> BlockMask:
    """A block mask from the blocks of which something is seen, and of these the ones that are seen whole.

    Like what it is given, of tensor operations of fixed shapes alone, so that a CUDA graph can hold them;
    `create_block_mask` would look at every pair of positions in every step.
    """
    row_T1, tile_T = _tiles(length, needed_BTT.device)
    # A tile that reaches beyond the sequence is never seen whole.
    full_BTT = full_BTT & ((torch.maximum(row_T1, tile_T) + 1) * BLOCK <= length)
    some, whole = _ordered(needed_BTT & ~full_BTT), _ordered(full_BTT)
    return BlockMask.from_kv_blocks(*some, *whole, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(length, length))


def _ordered(tiles_BTT: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are marked, and all blocks of the row, these first; for all heads."""
    marked_B1TT = tiles_BTT.unsqueeze(1).int()
    order = torch.argsort(marked_B1TT, dim=-1, descending=True, stable=True)
    return marked_B1TT.sum(-1, dtype=torch.int32), order.int()


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


def attend(
    q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, segments: Segments | None, *, causal: bool = False
) -> Tensor:
    """Scaled dot-product attention, (B, H, S, K); H / G neighbouring queries share keys and values.

    `causal` says what None as `segments` means: not to attend to later positions.
    """
    grouped = q_BHSK.shape[1] != k_BGSK.shape[1]
    if segments is not None and segments.blocks is not None:
        mask, given = segments.blocks, (q_BHSK, k_BGSK, v_BGSK)
        if torch.compiler.is_compiling():
            attended: Tensor = flex_attention(*given, block_mask=mask, enable_gqa=grouped)
        else:
            with torch.compiler.set_stance("default"):  # evaluation runs uncompiled but for this
                attended = _flex()(*given, block_mask=mask, enable_gqa=grouped)
        return attended
    dense = None if segments is None else segments.dense_B1SS
    return F.scaled_dot_product_attention(
        q_BHSK, k_BGSK, v_BGSK, attn_mask=dense, is_causal=causal and dense is None, enable_gqa=grouped
    )


@cache
def _flex() -> Any:
    """`flex_attention` compiled: uncompiled it would build the whole matrix of scores."""
    return torch.compile(flex_attention, dynamic=False)
