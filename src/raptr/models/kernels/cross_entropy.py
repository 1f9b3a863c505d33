"""The cross entropy of a linear map's scores, which reads each row of them once and writes its gradient over it.

Shapes: N rows, D width, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

VOCABULARY = 1 << 16  # at most: the scores of a position lie in one program


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


def linear_cross_entropy(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, labels_N: Tensor) -> Tensor:
    """The mean cross entropy of the scores x·weight + bias; x and weight in the same half precision."""
    loss: Tensor = _linear_cross_entropy(x_ND, weight_VD, bias_V, labels_N)[0]
    return loss


@triton_op("raptr::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    scores_NV = torch.addmm(bias_V.to(x_ND.dtype), x_ND, weight_VD.t())
    rows, vocabulary = scores_NV.shape
    losses = scores_NV.new_empty(rows, dtype=torch.float32)
    share = torch.full((), 1 / rows, device=x_ND.device)
    block = int(triton.next_power_of_2(vocabulary))
    warps = min(32, max(4, block // 1024))  # 32 scores a thread stay in registers
    wrap_triton(_cross_entropy)[(rows,)](scores_NV, labels_N, losses, vocabulary, share, block, num_warps=warps)
    return losses.mean(), scores_NV


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
