"""Initial weights as a pure function of (seed, parameter name, element): the same on any device and version.

Matrices and embeddings are N(0, 0.02²), as in BERT; biases and norm shifts 0, norm gains 1. A parameter's
name keys its stream, so a deeper model starts with the shallower one's weights in the layers they share.
"""

import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from raptr.hashing import bits, mix_array
from raptr.models.roles import roles

DEVIATION = 0.02
CHUNK = 1 << 20  # bounds the memory of the float64 intermediates


def initialise(model: nn.Module, seed: int) -> None:
    """Set every parameter of the model to its initial value, in place; one of no known role is an error."""
    known = roles(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if known[name] in ("matrix", "embedding"):
                values = normal(seed, name, parameter.numel()) * np.float32(DEVIATION)
                parameter.copy_(torch.from_numpy(values).view(parameter.shape))
            else:
                parameter.fill_(1 if known[name] == "gain" else 0)


def normal(seed: int, name: str, count: int) -> NDArray[np.float32]:
    """Standard normal numbers that belong to (seed, name): Box and Muller's transform of hashed counters."""
    key = np.uint64(bits(seed, "init", zlib.crc32(name.encode())))
    result = np.empty(count + count % 2, dtype=np.float32)
    for start in range(0, len(result), CHUNK):
        stop = min(start + CHUNK, len(result))
        hashed = mix_array(key ^ mix_array(np.arange(start, stop, dtype=np.uint64)))
        unit = ((hashed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        radius, angle = np.sqrt(-2 * np.log(unit[0::2])), 2 * np.pi * unit[1::2]
        result[start:stop:2] = radius * np.cos(angle)
        result[start + 1 : stop : 2] = radius * np.sin(angle)
    return result[:count]
