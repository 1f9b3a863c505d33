"""Three fused operations for bfloat16 on NVIDIA GPUs, in Triton: what compiled torch still leaves on the table.

Shapes: B batch, S sequence, N rows, H heads, K head size, F features, D width, V vocabulary.

`attention` runs a short sequence's whole self-attention in one program per (sequence, head), straight from the
packed product of queries, keys and values and back into one packed gradient: nothing is cut, stacked or kept
beside the product itself. `gelu` is the exact (erf) activation. Both are handed the bias of the product before
them, which already holds it, for the sake of its gradient: their backward pass sums that on the way, where it
would cost another reading of a large tensor (so the product must be made with the bias detached).
`linear_cross_entropy` reads each row of scores once and writes its gradient over it.
No atomic additions: the same inputs give the same bits. Gradients of biases are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

SHORT = 128  # the longest sequence that `attention` takes: its scores stay in registers
VOCABULARY = 1 << 16  # the largest one whose scores of a position fit into one program
ROWS, COLUMNS, CHUNK = 2, 1024, 32  # a tile of the activation, and the rows whose sum one program makes


@triton.jit
def _weights(q, k, columns_ok, SCALE: tl.constexpr):
    """Attention weights of all queries over all keys."""
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


@triton.jit
def _normal(x):
    """The standard normal distribution at x, and its density: erf by Abramowitz and Stegun's 7.1.26 (1.5e-7)."""
    power = tl.exp2(x * x * -0.7213475204444817)  # exp(-x^2 / 2)
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * power
    return tl.where(x >= 0, 1.0 - tail, tail), power * 0.3989422804014327


@triton.jit
def _gelu_forward(h, out, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at, ok = row[:, None] * F + column[None, :], (row[:, None] < N) & (column[None, :] < F)
    loaded = tl.load(h + at, mask=ok, other=0.0)
    x = loaded.to(tl.float32)
    below, _ = _normal(x)
    tl.store(out + at, (x * below).to(loaded.dtype), mask=ok)


@triton.jit
def _gelu_backward(h, grad, d_h, d_bias, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, CHUNK, ROWS):
        row = tl.program_id(0).to(tl.int64) * CHUNK + first + tl.arange(0, ROWS)
        at, ok = row[:, None] * F + column[None, :], (row[:, None] < N) & (column[None, :] < F)
        g = tl.load(grad + at, mask=ok, other=0.0)
        x = tl.load(h + at, mask=ok, other=0.0).to(tl.float32)
        below, density = _normal(x)
        d = g * (below + x * density)
        total += tl.sum(d, 0)
        tl.store(d_h + at, d.to(g.dtype), mask=ok)
    tl.store(d_bias + tl.program_id(0) * F + column, total, mask=column < F)


@triton.jit
def _cross_entropy(scores, labels, losses, V, share, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    ok, at = column < V, scores + row * V + column
    here = column == tl.load(labels + row)
    loaded = tl.load(at, mask=ok, other=float("-inf"))
    x = loaded.to(tl.float32)
    largest = tl.max(x, 0)
    powers = tl.exp(x - largest)
    total = tl.sum(powers, 0)
    tl.store(losses + row, tl.log(total) + largest - tl.sum(tl.where(here, x, 0.0), 0))
    gradient = (powers / total - tl.where(here, 1.0, 0.0)) * tl.load(share)
    tl.store(at, gradient.to(loaded.dtype), mask=ok)


@triton_op("raptr::attention", mutates_args=())
def attention(qkv_BSF: Tensor, bias_F: Tensor, heads: int) -> Tensor:
    """Self-attention of sequences of up to SHORT tokens; F holds queries, keys and values of all heads."""
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


@triton_op("raptr::gelu", mutates_args=())
def gelu(h: Tensor, bias_F: Tensor) -> Tensor:
    """GELU of h, which holds the bias."""
    out = torch.empty_like(h)
    features, rows = h.shape[-1], h.numel() // h.shape[-1]
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(features, COLUMNS))
    wrap_triton(_gelu_forward)[grid](h, out, rows, features, ROWS, COLUMNS, num_warps=4)
    return out


@triton_op("raptr::gelu_backward", mutates_args=())
def _gelu_gradient(grad: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    features, rows = h.shape[-1], h.numel() // h.shape[-1]
    d_h = torch.empty_like(h)
    chunks = triton.cdiv(rows, CHUNK)
    d_bias = h.new_empty((chunks, features), dtype=torch.float32)
    wrap_triton(_gelu_backward)[(chunks, triton.cdiv(features, COLUMNS))](
        h, grad.contiguous(), d_h, d_bias, rows, features, ROWS, COLUMNS, CHUNK, num_warps=4
    )
    return d_h, d_bias.sum(0)


@triton_op("raptr::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    scores_NV = torch.addmm(bias_V.to(x_ND.dtype), x_ND, weight_VD.t())
    rows, vocabulary = scores_NV.shape
    losses = scores_NV.new_empty(rows, dtype=torch.float32)
    share = torch.full((), 1 / rows, device=x_ND.device)
    block = triton.next_power_of_2(vocabulary)
    wrap_triton(_cross_entropy)[(rows,)](scores_NV, labels_N, losses, vocabulary, share, block, num_warps=16)
    return losses.mean(), scores_NV


def linear_cross_entropy(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, labels_N: Tensor) -> Tensor:
    """The mean cross entropy of the scores x·weight + bias; x and weight in the same half precision."""
    loss: Tensor = _linear_cross_entropy(x_ND, weight_VD, bias_V, labels_N)[0]
    return loss


def _rows(length: int) -> int:
    return max(16, int(triton.next_power_of_2(length)))


def _keep(ctx, inputs, output) -> None:
    product, bias, *ctx.rest = inputs
    ctx.save_for_backward(product)
    ctx.bias = bias.dtype


def _attention_vjp(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    d_qkv, d_bias = _attention_gradient(grad, *ctx.saved_tensors, *ctx.rest)
    return d_qkv, d_bias.to(ctx.bias), None


def _gelu_vjp(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
    d_h, d_bias = _gelu_gradient(grad, *ctx.saved_tensors)
    return d_h, d_bias.to(ctx.bias)


def _keep_gradient(ctx, inputs, output) -> None:
    x_ND, weight_VD, bias_V, _ = inputs
    ctx.save_for_backward(x_ND, weight_VD, output[1])
    ctx.bias = bias_V.dtype
    ctx.mark_non_differentiable(output[1])


def _cross_entropy_vjp(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    x_ND, weight_VD, gradient_NV = ctx.saved_tensors
    d_x, d_weight = gradient_NV @ weight_VD, gradient_NV.t() @ x_ND
    d_bias = gradient_NV.sum(0, dtype=torch.float32).to(ctx.bias)
    return d_x * grad, d_weight * grad, d_bias * grad, None


_linear_cross_entropy.register_autograd(_cross_entropy_vjp, setup_context=_keep_gradient)
attention.register_autograd(_attention_vjp, setup_context=_keep)
gelu.register_autograd(_gelu_vjp, setup_context=_keep)
