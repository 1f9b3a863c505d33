"""SwiGLU's activation, silu(gate)·up, from the fused output of the gate and up projections, and its gradient.

Shapes: N rows, F features; a row of the fused output `z` holds the gate's F features, then those of up. Compiled torch
writes the two halves of the gradient with masks, at half of the memory bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

ROWS, COLUMNS = 2, 1024  # a tile's size


@triton.jit
def _places(N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile's offsets in a matrix of F columns, those of its gate in `z`, and the mask of what lies in the matrix."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row * F + column, row * (2 * F) + column, (row < N) & (column < F)


@triton.jit
def _swiglu_forward(z, out, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    here, at, ok = _places(N, F, ROWS, COLUMNS)
    gate = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(z + at + F, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + here, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _swiglu_backward(z, grad, d_z, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    here, at, ok = _places(N, F, ROWS, COLUMNS)
    g = tl.load(grad + here, mask=ok, other=0.0).to(tl.float32)
    gate = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(z + at + F, mask=ok, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    kind = d_z.dtype.element_ty
    tl.store(d_z + at, (g * up * share * (1.0 + gate * (1.0 - share))).to(kind), mask=ok)
    tl.store(d_z + at + F, (g * gate * share).to(kind), mask=ok)


@triton_op("raptr::swiglu", mutates_args=())
def swiglu(z: Tensor) -> Tensor:
    """Return silu(gate)·up, (..., F), of `z`, (..., 2F)."""
    features = z.shape[-1] // 2
    rows = z.numel() // (2 * features)
    out = z.new_empty((*z.shape[:-1], features))
    wrap_triton(_swiglu_forward)[_grid(rows, features)](z.contiguous(), out, rows, features, ROWS, COLUMNS, num_warps=4)
    return out


@triton_op("raptr::swiglu_backward", mutates_args=())
def _gradient(grad: Tensor, z: Tensor) -> Tensor:
    features = z.shape[-1] // 2
    rows = z.numel() // (2 * features)
    d_z = torch.empty_like(z, memory_format=torch.contiguous_format)
    wrap_triton(_swiglu_backward)[_grid(rows, features)](
        z.contiguous(), grad.contiguous(), d_z, rows, features, ROWS, COLUMNS, num_warps=4
    )
    return d_z


def _grid(rows: int, features: int) -> tuple[int, int]:
    return triton.cdiv(rows, ROWS), triton.cdiv(features, COLUMNS)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _vjp(ctx, grad: Tensor) -> Tensor:
    d_z: Tensor = _gradient(grad, *ctx.saved_tensors)
    return d_z


swiglu.register_autograd(_vjp, setup_context=_keep)
