"""The operations that have kernels of the project's own, where those can run.

The kernels need Triton, which only GPU builds of torch bring, and half-precision products (autocast). They are
other ways to compute the same: everywhere else it is plain torch.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

KERNELS = importlib.util.find_spec("triton") is not None
HEAD_SIZES = (16, 32, 64)
if KERNELS:
    from raptr.models import kernels


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU of a linear map."""
    if _half(x):
        activated: Tensor = kernels.gelu(F.linear(x, weight, bias.detach()), bias)
        return activated
    return F.gelu(F.linear(x, weight, bias))


def short_attention(x_BSD: Tensor, weight: Tensor, bias: Tensor, head_size: int) -> Tensor | None:
    """Self-attention before its output projection, or None where no kernel fits."""
    if not _half(x_BSD) or x_BSD.shape[1] > kernels.SHORT or head_size not in HEAD_SIZES:
        return None
    qkv = F.linear(x_BSD, weight, bias.detach())
    attended: Tensor = kernels.attention(qkv, bias, weight.shape[0] // (3 * head_size))
    return attended


def linear_cross_entropy(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, labels_N: Tensor) -> Tensor:
    """The mean cross entropy of a linear map's scores, in float32 at least."""
    if _half(x_ND) and len(weight_VD) <= kernels.VOCABULARY:
        return kernels.linear_cross_entropy(x_ND.bfloat16(), weight_VD.bfloat16(), bias_V, labels_N)
    scores_NV = F.linear(x_ND, weight_VD, bias_V)
    return F.cross_entropy(scores_NV.to(torch.promote_types(scores_NV.dtype, torch.float32)), labels_N)


def _half(x: Tensor) -> bool:
    return KERNELS and x.is_cuda and torch.is_autocast_enabled("cuda")
