"""The cross entropy of a linear map's scores, which are written by the product and overwritten by their gradient.

Shapes: N rows, D width, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

BLOCK = 1 << 12  # scores at a time


@triton.jit
def _cross_entropy(scores, bias, labels, losses, V, share, BLOCK: tl.constexpr):
    """A row's loss, and its gradient written over the scores, which do not hold the bias yet; read twice."""
    row = tl.program_id(0).to(tl.int64)
    label, column = tl.load(labels + row), tl.arange(0, BLOCK)
    scores += row * V
    correct = tl.load(scores + label).to(tl.float32) + tl.load(bias + label).to(tl.float32)
    largest, total = float("-inf"), 0.0
    for first in range(0, V, BLOCK):
        x = _scores(scores, bias, first + column, V)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    tl.store(losses + row, tl.log(total) + largest - correct)
    rate = tl.load(share)
    for first in range(0, V, BLOCK):
        here = first + column
        x = _scores(scores, bias, here, V)
        gradient = (tl.exp(x - largest) / total - tl.where(here == label, 1.0, 0.0)) * rate
        tl.store(scores + here, gradient.to(scores.dtype.element_ty), mask=here < V)


@triton.jit
def _scores(scores, bias, column, V):
    x = tl.load(scores + column, mask=column < V, other=float("-inf")).to(tl.float32)
    return x + tl.load(bias + column, mask=column < V, other=0.0).to(tl.float32)


def linear_cross_entropy(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, labels_N: Tensor) -> Tensor:
    """The mean cross entropy of the scores x·weight + bias; x and weight in the same half precision.

    Labels lie within the vocabulary: none is left out.
    """
    loss: Tensor = _linear_cross_entropy(x_ND, weight_VD, bias_V, labels_N)[0]
    return loss


@triton_op("raptr::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    scores_NV = x_ND @ weight_VD.t()
    rows, vocabulary = scores_NV.shape
    losses = scores_NV.new_empty(rows, dtype=torch.float32)
    share = torch.full((), 1 / rows, device=x_ND.device)
    wrap_triton(_cross_entropy)[(rows,)](scores_NV, bias_V, labels_N, losses, vocabulary, share, BLOCK, num_warps=8)
    return losses.mean(), scores_NV


def _keep_gradient(ctx, inputs, output) -> None:
    x_ND, weight_VD, bias_V, _ = inputs
    ctx.save_for_backward(x_ND, weight_VD, output[1])
    ctx.bias = bias_V.dtype
    ctx.mark_non_differentiable(output[1])


def _cross_entropy_vjp(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
    x_ND, weight_VD, gradient_NV = ctx.saved_tensors
    d_x, d_weight = gradient_NV @ weight_VD, gradient_NV.t() @ x_ND
    if not ctx.needs_input_grad[2]:  # there is no bias: zeros stand for it
        return d_x * grad, d_weight * grad, None, None
    d_bias = gradient_NV.sum(0, dtype=torch.float32).to(ctx.bias)
    return d_x * grad, d_weight * grad, d_bias * grad, None


_linear_cross_entropy.register_autograd(_cross_entropy_vjp, setup_context=_keep_gradient)
