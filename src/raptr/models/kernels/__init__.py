"""Four fused operations for bfloat16 on NVIDIA GPUs, in Triton: what compiled torch still leaves on the table.

Gradients of biases, gains and shifts are summed in float32 where a kernel holds their terms anyway. No atomic
additions: the same inputs give the same bits.
"""

from raptr.models.kernels.attention import SHORT, attention
from raptr.models.kernels.cross_entropy import linear_cross_entropy
from raptr.models.kernels.residual_mlp import WIDTH, residual_mlp
from raptr.models.kernels.swiglu import swiglu

__all__ = ["SHORT", "WIDTH", "attention", "linear_cross_entropy", "residual_mlp", "swiglu"]
