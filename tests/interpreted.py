"""Whether Triton's interpreter runs the kernels in this process; `conftest.py` turns it on where there is no GPU."""

import torch
from torch.torch_version import TorchVersion

from raptr.models.fused import KERNELS

GPU = torch.cuda.is_available()
INTERPRETED = KERNELS and not GPU and TorchVersion(torch.__version__) >= "2.13"  # 2.11 wraps compiled kernels only
