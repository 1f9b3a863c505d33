"""Operations for which raptr has Triton kernels, with plain torch as the fallback.

The kernels need Triton, which only GPU builds of torch include, and autocast to half precision. Both ways compute the
same, up to rounding.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KERNELS = importlib.util.find_spec("triton") is not None
HEAD_SIZES = (16, 32, 64)
Product = tuple[Tensor, Tensor]  # the weight and the bias of a linear layer
if KERNELS:
    from raptr.models import kernels


def short_attention(x_BSD: Tensor, weight: Tensor, bias: Tensor, head_size: int) -> Tensor | None:
    """Self-attention without its output projection, (B, S, H·K), or None if the kernel does not support this input.

    `weight` and `bias` are those of the fused projection to queries, keys and values.
    """
    if not _half(x_BSD) or x_BSD.shape[1] > kernels.SHORT or head_size not in HEAD_SIZES:
        return None
    qkv = F.linear(x_BSD, weight, bias.detach())
    attended: Tensor = kernels.attention(qkv, bias, weight.shape[0] // (3 * head_size))
    return attended


def residual_mlp(
    x_BSD: Tensor,
    o_BSE: Tensor,
    project: Product,
    norm: nn.LayerNorm,
    mlp_in: Product,
    mlp_out: Product,
    layer_scale: Tensor | None,
    mlp_scale: Tensor | None,
) -> Tensor | None:
    """The part of a layer that follows the heads' outputs o; None if the kernel does not support this input.

    It is x + layer_scale·a + out(mlp_scale·gelu(in(norm(x + a)))) with a = project(o); the bias of `out` is not scaled.
    """
    if not _half(x_BSD) or x_BSD.dtype != torch.bfloat16 or x_BSD.shape[-1] > kernels.WIDTH:
        return None
    products = [(weight.bfloat16(), bias) for weight, bias in (project, mlp_in, mlp_out)]
    out_ND = kernels.residual_mlp(x_BSD.flatten(0, 1), o_BSE.flatten(0, 1), products, norm, layer_scale, mlp_scale)
    return out_ND.view_as(x_BSD)


def swiglu(z: Tensor) -> Tensor:
    """silu(gate)·up, (..., F), of `z`, (..., 2F), which holds gate and up side by side."""
    if _half(z) and z.dtype == torch.bfloat16:
        activated: Tensor = kernels.swiglu(z)
        return activated
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, z_loss: float = 0.0
) -> Tensor:
    """The mean cross entropy of a linear layer's logits, in float32 or wider.

    `z_loss` is the factor of the mean of log²Z, which keeps the softmax's normaliser Z near 1.
    """
    if _half(x_ND):
        return kernels.linear_cross_entropy(x_ND.bfloat16(), weight_VD.bfloat16(), bias_V, labels_N, z_loss)
    logits_NV = F.linear(x_ND, weight_VD, bias_V)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    loss = F.cross_entropy(logits_NV, labels_N)
    return loss + z_loss * logits_NV.logsumexp(-1).square().mean() if z_loss else loss


def _half(x: Tensor) -> bool:
    return KERNELS and x.is_cuda and torch.is_autocast_enabled("cuda")
