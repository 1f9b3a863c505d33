"""Initial weights as a pure function of (seed, parameter name, element): the same on every device and version.

Biases and norm shifts are 0, norm gains 1. Matrices and embeddings are normally distributed; `model.init` chooses their
standard deviation:

    bert     0.02 everywhere, as in BERT
    fan-in   1/√fan_in for a matrix, so that outputs are as large as inputs at any width; divided by √(2·layers) where
             a layer writes to the residual stream, so that these 2·layers updates add up to the size of one
    paper    √(2/m) for the matrix that computes the m hidden units of the MLP, 1/√width for all others, so that each
             branch adds about as much as the normed stream has (the RaPTr paper's appendix on scaling)

With `fan-in`, embeddings have 1/√width: the token matrix is also the output matrix, whose fan-in is the width, and the
norm after the embeddings makes their size irrelevant as inputs. `layers` is the depth at which the model is built, not
the depth to which it may grow: training starts with that many updates, and new layers come from trained ones. With
`paper`, embeddings have 0.02, since the paper does not mention them.

A parameter's random numbers are keyed by its name. So a layer starts from the same normal numbers in a shallower and a
deeper model, and every shard can be computed by itself.
"""

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from raptr.distributed.sharding import local
from raptr.hashing import bits, mix_array
from raptr.models.contract import Init
from raptr.models.roles import roles

BERT = 0.02
CHUNK = 1 << 20  # bounds the memory of the float64 intermediates


def initialise(
    model: nn.Module,
    seed: int,
    *,
    init: Init = "bert",
    layers: int = 1,
    outputs: Sequence[str] = (),
    hidden: Mapping[str, int] | None = None,
    drawn_as: Mapping[str, str] | None = None,
) -> None:
    """Set every parameter of the model to its initial value, in place; raise ValueError for one of unknown role.

    `layers` is the model's depth, and `outputs` names the modules that write to its residual stream. `hidden` names the
    modules that compute the MLP's hidden units, with the number of projections fused in each. `drawn_as` maps a
    parameter to the name that keys its random numbers, if that is not its own. Of a sharded parameter this process
    fills its rows; a parameter on the `meta` device is left out.
    """
    role_of, keys = roles(model), drawn_as or {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                continue
            mine, first = local(parameter)
            if role_of[name] in ("matrix", "embedding"):
                residual = not set(outputs).isdisjoint(name.split("."))
                if init == "fan-in":
                    deviation = fan_in(parameter.shape[1], layers if residual else None)
                elif init == "paper" and role_of[name] == "matrix":
                    rows, columns = parameter.shape
                    maps = next((maps for module, maps in (hidden or {}).items() if module in name.split(".")), None)
                    deviation = paper(rows if residual else columns, rows // maps if maps else None)
                else:
                    deviation = BERT
                values = normal(seed, keys.get(name, name), mine.numel(), first) * np.float32(deviation)
                mine.copy_(torch.from_numpy(values).view(mine.shape))
            else:
                mine.fill_(1 if role_of[name] == "gain" else 0)


def fan_in(inputs: int, layers: int | None) -> float:
    """The standard deviation of a matrix with this many inputs, or of an embedding of this width.

    `layers` is the model's depth if the matrix writes to the residual stream, else None.
    """
    return 1 / math.sqrt(inputs * (1 if layers is None else 2 * layers))


def paper(width: int, hidden: int | None = None) -> float:
    """The standard deviation of a matrix in the paper's theorem.

    `hidden` is the number of the MLP's hidden units if the matrix computes them, else None.
    """
    return 1 / math.sqrt(width) if hidden is None else math.sqrt(2 / hidden)


def normal(seed: int, name: str, count: int, first: int = 0) -> NDArray[np.float32]:
    """Return `count` numbers of the standard normal sequence of (seed, name), from number `first` on.

    The Box–Muller transform turns pairs of hashed counters into pairs of normal numbers.
    """
    key = np.uint64(bits(seed, "init", zlib.crc32(name.encode())))
    odd = first % 2
    result = np.empty(odd + count + (odd + count) % 2, dtype=np.float32)
    for start in range(0, len(result), CHUNK):
        stop = min(start + CHUNK, len(result))
        counters = np.arange(first - odd + start, first - odd + stop, dtype=np.uint64)
        hashed = mix_array(key ^ mix_array(counters))
        unit = ((hashed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        radius, angle = np.sqrt(-2 * np.log(unit[0::2])), 2 * np.pi * unit[1::2]
        result[start:stop:2] = radius * np.cos(angle)
        result[start + 1 : stop : 2] = radius * np.sin(angle)
    return result[odd : odd + count]
