"""Four fused operations in Triton for bfloat16 on NVIDIA GPUs, where they are faster than compiled torch.

Gradients of biases, gains and shifts are summed in float32, in kernels that have their terms in registers anyway. There
are no atomic additions, so the same inputs give the same bits.
"""

from raptr.models.kernels.attention import SHORT, attention
from raptr.models.kernels.cross_entropy import linear_cross_entropy
from raptr.models.kernels.residual_mlp import WIDTH, residual_mlp
from raptr.models.kernels.swiglu import swiglu

__all__ = ["SHORT", "WIDTH", "attention", "linear_cross_entropy", "residual_mlp", "swiglu"]
