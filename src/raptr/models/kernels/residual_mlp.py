"""What follows attention in a layer: output projection, both residual sums, the norm and an MLP with the exact GELU.

Shapes: N rows, E width of all heads together, D width, F MLP width. Scaling a layer needs no extra pass over memory,
and the second residual sum is part of the matrix multiplication before it.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import custom_op, triton_op, wrap_triton

WIDTH = 1 << 12  # the largest width D that the norm's kernels support
ROWS, COLUMNS, CHUNK = 2, 1024, 32  # a tile's size; the rows whose bias gradient one program of _gelu_backward sums
WARPS = 1 << 11  # in all, to compute the norm's gradient: enough to fill a large GPU at 128 registers per thread


@triton.jit
def _normal(x):
    """The standard normal CDF and density at x; erf is Abramowitz and Stegun's 7.1.26, with an error of 1.5e-7."""
    power = tl.exp2(x * x * -0.7213475204444817)  # exp(-x^2 / 2)
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * power
    return tl.where(x >= 0, 1.0 - tail, tail), power * 0.3989422804014327


@triton.jit
def _gelu_forward(h, scale, out, N, F, SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at, ok = row[:, None] * F + column[None, :], (row[:, None] < N) & (column[None, :] < F)
    loaded = tl.load(h + at, mask=ok, other=0.0)
    x = loaded.to(tl.float32)
    below, _ = _normal(x)
    activated = x * below
    if SCALED:
        activated *= tl.load(scale)
    tl.store(out + at, activated.to(loaded.dtype), mask=ok)


@triton.jit
def _gelu_backward(
    h, grad, scale, d_h, d_bias, N, F,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, CHUNK, ROWS):
        row = tl.program_id(0).to(tl.int64) * CHUNK + first + tl.arange(0, ROWS)
        at, ok = row[:, None] * F + column[None, :], (row[:, None] < N) & (column[None, :] < F)
        g = tl.load(grad + at, mask=ok, other=0.0)
        x = tl.load(h + at, mask=ok, other=0.0).to(tl.float32)
        below, density = _normal(x)
        d = g * (below + x * density)
        if SCALED:
            d *= tl.load(scale)
        total += tl.sum(d, 0)
        tl.store(d_h + at, d.to(g.dtype), mask=ok)
    tl.store(d_bias + tl.program_id(0) * F + column, total, mask=column < F)


@triton.jit
def _norm_forward(
    x, a, gain, shift, bias, scale, h, normed, base, mean, rate, N, D,
    EPSILON: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute h = x + a, its layer norm, and base = x + scale·a + bias, to which the MLP's output is added later."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at, ok = row[:, None] * D + column[None, :], (row[:, None] < N) & (column[None, :] < D)
    loaded = tl.load(x + at, mask=ok, other=0.0)
    stream, branch = loaded.to(tl.float32), tl.load(a + at, mask=ok, other=0.0).to(tl.float32)
    rounded = (stream + branch).to(loaded.dtype)
    tl.store(h + at, rounded, mask=ok)
    both = rounded.to(tl.float32)
    middle = tl.sum(both, 1) / D
    centred = tl.where(ok, both - middle[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 1) / D + EPSILON)
    tl.store(mean + row, middle, mask=row < N)
    tl.store(rate + row, inverse, mask=row < N)
    g, b = _row(gain, column, D), _row(shift, column, D)
    tl.store(normed + at, (centred * inverse[:, None] * g + b).to(loaded.dtype), mask=ok)
    if SCALED:
        branch *= tl.load(scale)
    tl.store(base + at, (stream + branch + _row(bias, column, D)).to(loaded.dtype), mask=ok)


@triton.jit
def _norm_backward(
    d_normed, d_base, h, mean, rate, gain, scale, d_a, d_x, sums, N, D, SHARE,
    SCALED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a and x, which are equal without a scale, and partial sums of the vectors' gradients.

    The vectors are, in this order, the norm's gain and shift, the bias of the projection that computes a, and the
    MLP's output bias. Each program goes through its share of the rows one by one, and loads the next row before it
    works on the current one.
    """
    column = tl.arange(0, COLUMNS)
    g = tl.load(gain + column, mask=column < D, other=0.0).to(tl.float32)
    for_gain, for_shift = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for_a, for_bias = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    start = tl.program_id(0) * SHARE
    stop = tl.minimum(start + SHARE, N)
    at = start.to(tl.int64) * D + column
    ok = (column < D) & (start < stop)
    next_n, next_b = tl.load(d_normed + at, mask=ok, other=0.0), tl.load(d_base + at, mask=ok, other=0.0)
    next_h = tl.load(h + at, mask=ok, other=0.0)
    for row in range(start, stop):
        d_n, d_b, both = next_n.to(tl.float32), next_b.to(tl.float32), next_h.to(tl.float32)
        ok = (column < D) & (row + 1 < stop)
        next_n, next_b = tl.load(d_normed + at + D, mask=ok, other=0.0), tl.load(d_base + at + D, mask=ok, other=0.0)
        next_h = tl.load(h + at + D, mask=ok, other=0.0)
        inverse = tl.load(rate + row)
        unit = (both - tl.load(mean + row)) * inverse
        d = d_n * g
        d = (d - tl.sum(d, 0) / D - unit * (tl.sum(d * unit, 0) / D)) * inverse
        for_gain += d_n * unit
        for_shift += d_n
        for_bias += d_b
        if SCALED:
            tl.store(d_x + at, (d + d_b).to(next_h.dtype), mask=column < D)
            d_b *= tl.load(scale)
        d += d_b
        for_a += d
        tl.store(d_a + at, d.to(next_h.dtype), mask=column < D)
        at += D
    sums += tl.program_id(0) * 4 * D + column
    tl.store(sums, for_gain, mask=column < D)
    tl.store(sums + D, for_shift, mask=column < D)
    tl.store(sums + 2 * D, for_a, mask=column < D)
    tl.store(sums + 3 * D, for_bias, mask=column < D)


@triton.jit
def _row(start, column, D):
    return tl.load(start + column, mask=column < D, other=0.0).to(tl.float32)[None, :]


def residual_mlp(
    x_ND: Tensor,
    o_NE: Tensor,
    products: Sequence[tuple[Tensor, Tensor]],
    norm: nn.LayerNorm,
    layer_scale: Tensor | None,
    mlp_scale: Tensor | None,
) -> Tensor:
    """Return x + layer_scale·a + out(mlp_scale·gelu(in(norm(x + a)))) with a = project(o).

    `products` are the weights and biases of project, in and out. x, o and the weights must have the same half
    precision. The bias of out is not scaled.
    """
    project, mlp_in, mlp_out = products
    vectors, scales = (norm.weight, norm.bias), (layer_scale, mlp_scale)
    y_ND: Tensor = _residual_mlp(x_ND, o_NE, *project, *vectors, *mlp_in, *mlp_out, *scales, norm.eps)[0]
    return y_ND


@custom_op("raptr::add_product", mutates_args=("total_ND",))
def _add_product(total_ND: Tensor, x_NF: Tensor, weight_DF: Tensor) -> None:
    """Add x·weightᵀ to the total, in place, within the matrix multiplication."""
    torch.addmm(total_ND, x_NF, weight_DF.t(), out=total_ND)


@triton_op("raptr::residual_mlp", mutates_args=())
def _residual_mlp(
    x_ND: Tensor,
    o_NE: Tensor,
    project_DE: Tensor,
    project_bias_D: Tensor,
    gain_D: Tensor,
    shift_D: Tensor,
    in_FD: Tensor,
    in_bias_F: Tensor,
    out_DF: Tensor,
    out_bias_D: Tensor,
    layer_scale: Tensor | None,
    mlp_scale: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (rows, width), features, like = x_ND.shape, len(in_FD), x_ND.dtype
    a_ND = torch.addmm(project_bias_D.to(like), o_NE, project_DE.t())
    h_ND, normed_ND, y_ND = (torch.empty_like(x_ND) for _ in range(3))
    mean_N, rate_N = (x_ND.new_empty(rows, dtype=torch.float32) for _ in range(2))
    columns = int(triton.next_power_of_2(width))
    wrap_triton(_norm_forward)[(triton.cdiv(rows, _tall(columns)),)](
        x_ND, a_ND, gain_D, shift_D, out_bias_D, gain_D if layer_scale is None else layer_scale,
        h_ND, normed_ND, y_ND, mean_N, rate_N, rows, width,
        epsilon, layer_scale is not None, _tall(columns), columns, num_warps=4,
    )  # fmt: skip
    z_NF = torch.addmm(in_bias_F.to(like), normed_ND, in_FD.t())
    g_NF = torch.empty_like(z_NF)
    wrap_triton(_gelu_forward)[(triton.cdiv(rows, ROWS), triton.cdiv(features, COLUMNS))](
        z_NF, gain_D if mlp_scale is None else mlp_scale, g_NF, rows, features,
        mlp_scale is not None, ROWS, COLUMNS, num_warps=4,
    )  # fmt: skip
    _add_product(y_ND, g_NF, out_DF)
    return y_ND, h_ND, normed_ND, mean_N, rate_N, z_NF, g_NF


@triton_op("raptr::gelu_backward", mutates_args=())
def _gelu_gradient(grad_NF: Tensor, z_NF: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, features = z_NF.shape
    d_z, chunks = torch.empty_like(z_NF), triton.cdiv(rows, CHUNK)
    terms = z_NF.new_empty((chunks, features), dtype=torch.float32)
    wrap_triton(_gelu_backward)[(chunks, triton.cdiv(features, COLUMNS))](
        z_NF, grad_NF, z_NF if scale is None else scale, d_z, terms, rows, features,
        scale is not None, ROWS, COLUMNS, CHUNK, num_warps=4,
    )  # fmt: skip
    return d_z, terms.sum(0)


@triton_op("raptr::norm_backward", mutates_args=())
def _norm_gradient(
    d_normed: Tensor, d_base: Tensor, h_ND: Tensor, mean_N: Tensor, rate_N: Tensor, gain_D: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = h_ND.shape
    d_a = torch.empty_like(h_ND)
    d_x = torch.empty_like(h_ND if scale is not None else gain_D)
    columns = int(triton.next_power_of_2(width))
    warps = min(16, max(1, columns // 256))
    programs = WARPS // warps
    terms = h_ND.new_empty((programs, 4, width), dtype=torch.float32)
    wrap_triton(_norm_backward)[(programs,)](
        d_normed, d_base, h_ND, mean_N, rate_N, gain_D, gain_D if scale is None else scale, d_a, d_x, terms,
        rows, width, triton.cdiv(rows, programs), scale is not None, columns, num_warps=warps,
    )  # fmt: skip
    return d_a, d_x, terms.sum(0)


def _tall(columns: int) -> int:
    """The number of rows in a tile that holds whole rows."""
    return max(1, ROWS * COLUMNS // columns)


def _keep_layer(ctx, inputs, output) -> None:
    _, o, project, project_bias, gain, shift, in_, in_bias, out, out_bias, *scales, _ = inputs
    ctx.save_for_backward(*scales, o, project, gain, in_, out, *output[1:])
    ctx.vectors = [vector.dtype for vector in (project_bias, gain, shift, in_bias, out_bias)]
    ctx.mark_non_differentiable(*output[1:])


def _layer_vjp(ctx, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    layer_scale, mlp_scale, o_NE, project_DE, gain_D, in_FD, out_DF, *intermediates = ctx.saved_tensors
    h_ND, normed_ND, mean_N, rate_N, z_NF, g_NF = intermediates
    grad = grad.contiguous()
    d_out = grad.t() @ g_NF
    d_z, d_in_bias = _gelu_gradient(grad @ out_DF, z_NF, mlp_scale)
    d_in = d_z.t() @ normed_ND
    d_a, d_x, sums = _norm_gradient(d_z @ in_FD, grad, h_ND, mean_N, rate_N, gain_D, layer_scale)
    d_gain, d_shift, d_project_bias, d_out_bias = sums
    vectors = (d_project_bias, d_gain, d_shift, d_in_bias, d_out_bias)
    d_project_bias, d_gain, d_shift, d_in_bias, d_out_bias = (
        vector.to(kind) for vector, kind in zip(vectors, ctx.vectors, strict=True)
    )
    if layer_scale is None:
        d_x = d_a
    return (
        d_x, d_a @ project_DE, d_a.t() @ o_NE, d_project_bias, d_gain, d_shift,
        d_in, d_in_bias, d_out, d_out_bias, None, None, None,
    )  # fmt: skip


_residual_mlp.register_autograd(_layer_vjp, setup_context=_keep_layer)
