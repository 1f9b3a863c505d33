"""The two operations of a block that have kernels of the project's own, where those can run.

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


def _half(x: Tensor) -> bool:
    return KERNELS and x.is_cuda and torch.is_autocast_enabled("cuda")
