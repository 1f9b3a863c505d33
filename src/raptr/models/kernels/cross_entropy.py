"""Fused linear layer + cross entropy. The logits buffer is reused for its own gradient, one chunk of rows at a time.

Shapes: N rows, R rows of a chunk, D width, V vocabulary. The gradients are computed together with the loss, so the
backward pass only scales them. `scores` are logits, before the bias is added.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from raptr.models.chunked_loss import chunked_loss

BLOCK = 1 << 12  # logits that a program loads at a time


@triton.jit
def _cross_entropy(scores, bias, labels, losses, V, share, z_loss, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one row's loss and overwrite its scores with their gradient; the row is read twice."""
    row = tl.program_id(0).to(tl.int64)
    label, column = tl.load(labels + row), tl.arange(0, BLOCK)
    scores += row * V
    correct = tl.load(scores + label).to(tl.float32)
    if BIASED:
        correct += tl.load(bias + label).to(tl.float32)
    largest, total = float("-inf"), 0.0
    for first in range(0, V, BLOCK):
        x = _scores(scores, bias, first + column, V, BIASED)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    normaliser = tl.log(total) + largest
    tl.store(losses + row, normaliser - correct + z_loss * normaliser * normaliser)
    rise = (1.0 + 2.0 * z_loss * normaliser) / total
    for first in range(0, V, BLOCK):
        here = first + column
        x = _scores(scores, bias, here, V, BIASED)
        gradient = (tl.exp(x - largest) * rise - tl.where(here == label, 1.0, 0.0)) * share
        tl.store(scores + here, gradient.to(scores.dtype.element_ty), mask=here < V)


@triton.jit
def _scores(scores, bias, column, V, BIASED: tl.constexpr):
    x = tl.load(scores + column, mask=column < V, other=float("-inf")).to(tl.float32)
    if BIASED:
        x += tl.load(bias + column, mask=column < V, other=0.0).to(tl.float32)
    return x


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, z_loss: float
) -> Tensor:
    """Return the mean cross entropy of the logits x·weightᵀ + bias, plus z_loss times the mean of log²Z.

    x and weight must have the same half precision. All labels must lie in the vocabulary: none is ignored.
    """
    gradients = torch.is_grad_enabled()
    loss: Tensor = _linear_cross_entropy(x_ND, weight_VD, bias_V, labels_N, z_loss, gradients)[0]
    return loss


@custom_op("raptr::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Not a triton_op: torch's compiler could then reorder the chunks, and hold the logits of several at once.
    return chunked_loss(x_ND, weight_VD, bias_V, labels_N, z_loss, _rowwise, gradients=gradients)


def _rowwise(scores_RV: Tensor, bias_V: Tensor | None, labels_R: Tensor, share: float, z_loss: float) -> Tensor:
    rows, vocabulary = scores_RV.shape
    losses_R = scores_RV.new_empty(rows, dtype=torch.float32)
    bias = scores_RV if bias_V is None else bias_V
    _cross_entropy[(rows,)](
        scores_RV, bias, labels_R, losses_R, vocabulary, share, z_loss, bias_V is not None, BLOCK, num_warps=8
    )
    return losses_R


@_linear_cross_entropy.register_fake
def _shapes(
    x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, none = x_ND.new_empty((), dtype=torch.float32), x_ND.new_empty(0)
    if not gradients:
        return loss, none, weight_VD.new_empty(0), x_ND.new_empty(0)
    d_bias = none if bias_V is None else torch.empty_like(bias_V)
    return loss, torch.empty_like(x_ND), torch.empty_like(weight_VD), d_bias


def _keep_gradients(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])
    ctx.biased = inputs[2] is not None


def _scaled_gradients(ctx, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    d_x, d_weight, d_bias = ctx.saved_tensors
    return d_x * grad, d_weight * grad, d_bias * grad if ctx.biased else None, None, None, None


_linear_cross_entropy.register_autograd(_scaled_gradients, setup_context=_keep_gradients)
