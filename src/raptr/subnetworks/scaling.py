"""How a running layer's output is scaled, given which layers run (the paper's appendix on scaling).

Square root: kept layer j is scaled by √(j̄ - j), j̄ the next kept layer (L + 1 after the last). Then the squared
scales below each kept layer, and below the output, add up as in the full model, counted from the first kept
layer. The paper's condition "for all j" cannot hold inside a gap. Linear: the inverse of the keep
probability. None: 1 in training; evaluation then multiplies each layer by its keep probability.
"""

import math
from collections.abc import Sequence
from typing import Literal

Scaling = Literal["sqrt", "linear", "none"]


def scales(scaling: Scaling, kept: Sequence[bool], probabilities: Sequence[float]) -> tuple[float, ...]:
    """The scale of every layer; 0 where it does not run."""
    if scaling == "sqrt":
        return square_root(kept)
    if scaling == "linear":
        return inverse(kept, probabilities)
    return tuple(float(runs) for runs in kept)


def square_root(kept: Sequence[bool]) -> tuple[float, ...]:
    """√ of the distance to the next kept layer."""
    result, following = [0.0] * len(kept), len(kept)
    for layer in reversed(range(len(kept))):
        if kept[layer]:
            result[layer] = math.sqrt(following - layer)
            following = layer
    return tuple(result)


def inverse(kept: Sequence[bool], probabilities: Sequence[float]) -> tuple[float, ...]:
    """The inverse of the keep probability: the expected output is the full layer's.

    A layer that training never keeps (probability 0) has no such scale; where it is asked for, it is unscaled.
    """
    return tuple(1 / (p or 1.0) if runs else 0.0 for runs, p in zip(kept, probabilities, strict=True))
