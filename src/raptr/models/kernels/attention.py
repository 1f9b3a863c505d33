"""Self-attention of short sequences, with one Triton program per (sequence, head).

Shapes: B batch, S sequence, H heads, K head size, F = 3·H·K, N sequence length rounded up to a power of two from 16 on.

The kernels read queries, keys and values from the packed output `qkv` of their projection, and write one packed
gradient. So nothing is split or stacked, and only `qkv` is saved for the backward pass. `attention` also takes the
projection's bias, although `qkv` already contains it, in order to return its gradient. The projection must therefore be
computed with the bias detached.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

SHORT = 128  # tokens: the attention scores of a longer sequence would not fit in registers


@triton.jit
def _weights(q, k, columns_ok, SCALE: tl.constexpr):
    """The attention weights, (N, N), of all queries over all keys."""
    scores = tl.dot(q, tl.trans(k)) * (SCALE * 1.4426950408889634)  # exp(x) = 2^(x log2 e)
    scores = tl.where(columns_ok[None, :], scores, float("-inf"))
    powers = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return powers / tl.sum(powers, 1)[:, None]


@triton.jit
def _attention_forward(qkv, out, S, H: tl.constexpr, K: tl.constexpr, N: tl.constexpr, SCALE: tl.constexpr):
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    row, column = tl.arange(0, N), tl.arange(0, K)
    ok = row[:, None] < S
    here = qkv + (b * S + row[:, None]) * (3 * H * K) + h * K + column[None, :]
    q = tl.load(here, mask=ok, other=0.0)
    k = tl.load(here + H * K, mask=ok, other=0.0)
    v = tl.load(here + 2 * H * K, mask=ok, other=0.0)
    o = tl.dot(_weights(q, k, row < S, SCALE).to(v.dtype), v)
    tl.store(out + (b * S + row[:, None]) * (H * K) + h * K + column[None, :], o.to(v.dtype), mask=ok)


@triton.jit
def _attention_backward(
    qkv, grad, d_qkv, d_bias, S, H: tl.constexpr, K: tl.constexpr, N: tl.constexpr, SCALE: tl.constexpr
):
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    row, column = tl.arange(0, N), tl.arange(0, K)
    ok = row[:, None] < S
    at = (b * S + row[:, None]) * (3 * H * K) + h * K + column[None, :]
    d_bias += b * 3 * H * K + h * K + column
    q = tl.load(qkv + at, mask=ok, other=0.0)
    k = tl.load(qkv + at + H * K, mask=ok, other=0.0)
    v = tl.load(qkv + at + 2 * H * K, mask=ok, other=0.0)
    g = tl.load(grad + (b * S + row[:, None]) * (H * K) + h * K + column[None, :], mask=ok, other=0.0)
    p = _weights(q, k, row < S, SCALE)
    d_v = tl.dot(tl.trans(p.to(g.dtype)), g)
    tl.store(d_qkv + at + 2 * H * K, d_v.to(g.dtype), mask=ok)
    tl.store(d_bias + 2 * H * K, tl.sum(d_v, 0))
    d_p = tl.dot(g, tl.trans(v))
    d_s = (p * (d_p - tl.sum(p * d_p, 1)[:, None]) * SCALE).to(g.dtype)
    d_q = tl.dot(d_s, k)
    tl.store(d_qkv + at, d_q.to(g.dtype), mask=ok)
    tl.store(d_bias, tl.sum(d_q, 0))
    d_k = tl.dot(tl.trans(d_s), q)
    tl.store(d_qkv + at + H * K, d_k.to(g.dtype), mask=ok)
    tl.store(d_bias + H * K, tl.sum(d_k, 0))


@triton_op("raptr::attention", mutates_args=())
def attention(qkv_BSF: Tensor, bias_F: Tensor, heads: int) -> Tensor:
    """Self-attention of sequences of up to SHORT tokens, (B, S, H·K); F holds all heads' queries, keys and values."""
    batch, length, features = qkv_BSF.shape
    size = features // (3 * heads)
    out = qkv_BSF.new_empty(batch, length, heads * size)
    wrap_triton(_attention_forward)[(batch * heads,)](
        qkv_BSF, out, length, heads, size, _rows(length), size**-0.5, num_warps=4
    )
    return out


@triton_op("raptr::attention_backward", mutates_args=())
def _attention_gradient(grad: Tensor, qkv_BSF: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, length, features = qkv_BSF.shape
    size = features // (3 * heads)
    d_qkv = torch.empty_like(qkv_BSF)
    d_bias = qkv_BSF.new_empty((batch, features), dtype=torch.float32)
    wrap_triton(_attention_backward)[(batch * heads,)](
        qkv_BSF, grad.contiguous(), d_qkv, d_bias, length, heads, size, _rows(length), size**-0.5, num_warps=4
    )
    return d_qkv, d_bias.sum(0)


def _rows(length: int) -> int:
    return max(16, int(triton.next_power_of_2(length)))


def _keep(ctx, inputs, output) -> None:
    product, bias, *ctx.rest = inputs
    ctx.save_for_backward(product)
    ctx.bias = bias.dtype


def _attention_vjp(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    d_qkv, d_bias = _attention_gradient(grad, *ctx.saved_tensors, *ctx.rest)
    return d_qkv, d_bias.to(ctx.bias), None


attention.register_autograd(_attention_vjp, setup_context=_keep)
