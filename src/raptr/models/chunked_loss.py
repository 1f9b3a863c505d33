"""The cross entropy of a linear layer's logits and its gradients, computed in chunks of rows, so that the logits of all
rows never exist at once.

Shapes: N rows, R rows of a chunk, D width, V vocabulary. `scores` are logits, before the bias is added.
"""

from collections.abc import Callable

import torch
from torch import Tensor

SCORES = 1 << 29  # numbers in a chunk of scores, at most (but at least one row): 1 GiB in half precision

# (scores_RV, bias_V, labels_R, share, z_loss) -> losses_R, the loss of each row with its z-loss. The function adds the
# bias itself, and overwrites the scores with their gradient of `share` times the sum of the losses.
Rowwise = Callable[[Tensor, Tensor | None, Tensor, float, float], Tensor]


def chunked_loss(
    x_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    z_loss: float,
    rowwise: Rowwise,
    *,
    gradients: bool = True,
    scores: int = SCORES,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the mean loss and its gradients for x, the weight and the bias.

    Without `gradients` they are empty tensors, and without a bias its gradient is one. The gradients of weight and bias
    are summed over the chunks in float32 or wider. `scores` is the largest number of scores in a chunk.
    """
    rows = len(x_ND)
    chunks = -(-rows // max(1, scores // len(weight_VD)))
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    losses, d_x = [], []
    d_weight, d_bias = weight_VD.new_empty(0), x_ND.new_empty(0)
    for x_RD, labels_R in zip(x_ND.chunk(chunks), labels_N.chunk(chunks), strict=True):
        scores_RV = x_RD @ weight_VD.t()
        losses.append(rowwise(scores_RV, bias_V, labels_R, 1 / rows, z_loss))
        if not gradients:
            continue
        d_x.append(scores_RV @ weight_VD)
        product_VD = scores_RV.t() @ x_RD
        if len(d_weight):
            d_weight += product_VD
        else:
            d_weight = product_VD if chunks == 1 else product_VD.to(wide)
        if bias_V is not None:
            sums_V = scores_RV.sum(0, dtype=wide)
            d_bias = d_bias + sums_V if len(d_bias) else sums_V
    d_weight = d_weight.to(weight_VD.dtype)
    d_bias = d_bias if bias_V is None else d_bias.to(bias_V.dtype)
    return torch.cat(losses).mean(), torch.cat(d_x) if d_x else x_ND.new_empty(0), d_weight, d_bias
