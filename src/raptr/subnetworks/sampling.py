"""Draw the layers, heads and MLP parts that run in a step, as pure functions of (seed, step).

To draw exactly k of n, take the k with the lowest hash. The opposite draw takes the k with the highest hash: first
those that the draw left out, then, if these are fewer than k, some that it kept. The paper defines Bernoulli selection
and implements k of L; both are here. Grouped selection (the paper's remark on implementation) takes an equal share of
each group of neighbouring layers: a stratified draw, not a uniform one. With one group it is plain k of L.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Literal

from raptr.hashing import bits, unit
from raptr.subnetworks.schedule import Stage
from raptr.subnetworks.value import Kept

Selection = Literal["exact", "bernoulli"]

DEPTH, HEADS, PARTS = 0, 1, 2  # the axis is one of the hash's counters, so that axes are drawn independently


def lowest(
    candidates: Iterable[int], k: int, seed: int, step: int, *where: int, opposite: bool = False
) -> tuple[int, ...]:
    """Return the k candidates with the lowest (if `opposite`, highest) hash, ascending: a draw without replacement."""
    ranked = sorted(
        candidates, key=lambda index: (bits(seed, "subnetwork", step, *where, index), index), reverse=opposite
    )
    assert 0 <= k <= len(ranked)
    return tuple(sorted(ranked[:k]))


def tossed(probabilities: Sequence[float], seed: int, step: int, *, opposite: bool = False) -> tuple[bool, ...]:
    """Return for each layer whether it runs, by an independent coin toss; probabilities 0 and 1 are certain."""
    coins = [unit(bits(seed, "subnetwork", step, DEPTH, layer)) for layer in range(len(probabilities))]
    return tuple(
        (coin >= 1 - probability if opposite else coin < probability)
        for coin, probability in zip(coins, probabilities, strict=True)
    )


def keep_probabilities(stage: Stage, layers: int, groups: int = 1) -> tuple[float, ...]:
    """Return the keep probability of each layer in the stage."""
    return tuple(
        float(Fraction(quota, len(free))) if layer in free else 1.0
        for free, quota, members in _shares(stage, layers, groups)
        for layer in members
    )


def draw_layers(
    stage: Stage, layers: int, selection: Selection, groups: int, seed: int, step: int, *, opposite: bool = False
) -> tuple[bool, ...]:
    """Return for each layer whether it runs in the step."""
    if selection == "bernoulli":
        return tossed(keep_probabilities(stage, layers), seed, step, opposite=opposite)
    kept = {layer - 1 for layer in stage.fixed}
    for free, quota, _ in _shares(stage, layers, groups):
        kept.update(lowest(free, quota, seed, step, DEPTH, opposite=opposite))
    return tuple(layer in kept for layer in range(layers))


def draw_units(
    axis: int, k: int, n: int, running: Sequence[bool], seed: int, step: int, *, opposite: bool = False
) -> Kept | None:
    """Draw k of n heads or parts independently in each running layer; return None if all n run."""
    if k == n:
        return None
    return tuple(
        lowest(range(n), k, seed, step, axis, layer, opposite=opposite) if runs else ()
        for layer, runs in enumerate(running)
    )


def check_groups(stage: Stage, layers: int, groups: int) -> None:
    """Raise ValueError unless the groups can be of equal size and each run an equal share of the stage's layers."""
    if groups < 1 or layers % groups or stage.size % groups:
        raise ValueError(
            f"groups is {groups}; a divisor of the {layers} layers and of every stage's size "
            f"(here {stage.size}) is allowed"
        )
    for _, quota, members in _shares(stage, layers, groups):
        if quota < 0:
            raise ValueError(
                f"groups is {groups}: layers {members[0] + 1} to {members[-1] + 1} hold more fixed layers than "
                f"the {stage.size // groups} that run of each group; fewer groups are allowed"
            )


def _shares(stage: Stage, layers: int, groups: int) -> list[tuple[list[int], int, range]]:
    """Return for each group of neighbouring layers: the layers not fixed, how many of these run, and all its layers."""
    width, fixed = layers // groups, {layer - 1 for layer in stage.fixed}
    members = [range(group * width, (group + 1) * width) for group in range(groups)]
    free = [[layer for layer in group if layer not in fixed] for group in members]
    quotas = [stage.size // groups - (width - len(outside)) for outside in free]
    return list(zip(free, quotas, members, strict=True))
