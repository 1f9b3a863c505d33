"""How a running layer's output is scaled, given which layers run (the paper's appendix on scaling).

Square root: kept layer j is scaled by √(j̄ - j), where j̄ is the next kept layer (L + 1 after the last). Summed over the
layers below any kept layer, or below the output, the squared scales are then the same as in the full model, if one
counts from the first kept layer on. The paper's condition "for all j" cannot hold inside a gap. Linear: the inverse of
the keep probability. None: 1 in training; evaluation then multiplies each layer by its keep probability.
"""

import math
from collections.abc import Sequence
from typing import Literal

Scaling = Literal["sqrt", "linear", "none"]


def scales(scaling: Scaling, kept: Sequence[bool], probabilities: Sequence[float]) -> tuple[float, ...]:
    """Return the scale of every layer; 0 for layers that do not run."""
    if scaling == "sqrt":
        return square_root(kept)
    if scaling == "linear":
        return inverse(kept, probabilities)
    return tuple(float(runs) for runs in kept)


def square_root(kept: Sequence[bool]) -> tuple[float, ...]:
    """Return for each kept layer the square root of the distance to the next kept layer; 0 for all other layers."""
    result, following = [0.0] * len(kept), len(kept)
    for layer in reversed(range(len(kept))):
        if kept[layer]:
            result[layer] = math.sqrt(following - layer)
            following = layer
    return tuple(result)


def inverse(kept: Sequence[bool], probabilities: Sequence[float]) -> tuple[float, ...]:
    """Return the inverse keep probabilities, so that a layer's expected output is the full one; 0 if it does not run.

    A layer that training never keeps (probability 0) has no such scale; if a caller keeps it, it is unscaled.
    """
    return tuple(1 / (p or 1.0) if runs else 0.0 for runs, p in zip(kept, probabilities, strict=True))
