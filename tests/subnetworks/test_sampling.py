import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from raptr.subnetworks import Stage
from raptr.subnetworks.sampling import (
    HEADS,
    PARTS,
    check_groups,
    draw_layers,
    draw_units,
    keep_probabilities,
    lowest,
    tossed,
)

STEPS = 20_000


def kept(stage: Stage, layers: int, step: int, groups: int = 1, seed: int = 0) -> tuple[int, ...]:
    drawn = draw_layers(stage, layers, "exact", groups, seed, step)
    return tuple(layer for layer, runs in enumerate(drawn) if runs)


def test_golden_draws() -> None:
    stage = Stage(0, 1, 6, (1, 12))
    assert kept(stage, 12, 0) == (0, 2, 3, 4, 10, 11)
    assert kept(stage, 12, 1) == (0, 1, 3, 4, 5, 11)
    assert kept(stage, 12, 1_000_000) == (0, 3, 6, 8, 10, 11)
    assert kept(stage, 12, 0, groups=2, seed=5) == (0, 1, 2, 6, 10, 11)
    heads = draw_units(HEADS, 3, 12, (True, True), seed=5, step=0)
    parts = draw_units(PARTS, 3, 12, (True, False), seed=5, step=0)
    assert heads == ((5, 6, 9), (2, 6, 10))
    assert parts == ((3, 7, 8), ())


def test_integers_of_other_libraries_draw_the_same() -> None:
    stage, probabilities = Stage(0, 1, 6, (1, 12)), (0.5,) * 12
    for step in (np.int64(10**6), np.int32(10**6), torch.tensor(10**6)):
        assert kept(stage, 12, step) == kept(stage, 12, 10**6)  # type: ignore[arg-type]
        assert tossed(probabilities, 0, step) == tossed(probabilities, 0, 10**6)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        kept(stage, 12, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "size", "fixed"),
    [(12, 6, (1, 12)), (7, 4, (2,)), (7, 1, (2,)), (7, 7, (2,)), (5, 3, ()), (20, 8, ()), (1, 1, (1,))],
)
def test_exactly_k_keeps_the_fixed_layers_and_draws_the_others_equally_often(
    layers: int, size: int, fixed: tuple[int, ...]
) -> None:
    stage = Stage(0, STEPS, size, fixed)
    counts: Counter[int] = Counter()
    for step in range(STEPS):
        drawn = kept(stage, layers, step)
        assert len(drawn) == size
        counts.update(drawn)
    for layer, promised in enumerate(keep_probabilities(stage, layers)):
        spread = math.sqrt(STEPS * promised * (1 - promised))
        assert abs(counts[layer] - STEPS * promised) <= 4.5 * spread
    assert all(counts[layer - 1] == STEPS for layer in fixed)


def test_every_subset_is_equally_likely() -> None:
    stage, subsets = Stage(0, STEPS, 3, (2,)), 15  # 2 of the 6 others
    counts = Counter(kept(stage, 7, step) for step in range(STEPS))
    assert len(counts) == subsets
    statistic = sum((count - STEPS / subsets) ** 2 / (STEPS / subsets) for count in counts.values())
    assert statistic < 36.1  # chi-squared, 14 degrees of freedom: one in a thousand lies above


@pytest.mark.parametrize("lag", [1, 2, 64])
def test_steps_are_independent(lag: int) -> None:
    stage = Stage(0, STEPS, 6, (1, 12))
    draws = [set(kept(stage, 12, step)) for step in range(STEPS)]
    together = sum(5 in draws[i] and 5 in draws[i + lag] for i in range(STEPS - lag))
    expected = (STEPS - lag) * 0.4**2
    assert abs(together - expected) < 4.5 * math.sqrt(expected)


def test_seeds_and_axes_are_independent() -> None:
    stage = Stage(0, STEPS, 6, ())
    agree = sum(kept(stage, 12, step, seed=0) == kept(stage, 12, step, seed=1) for step in range(2000))
    assert agree < 12  # 2.2 expected of 924 subsets
    same = sum(
        draw_units(HEADS, 2, 4, (True,), 0, step) == draw_units(PARTS, 2, 4, (True,), 0, step) for step in range(6000)
    )
    assert abs(same - 1000) < 130  # one in six


def test_bernoulli_keeps_each_layer_with_its_probability() -> None:
    probabilities = (1.0, 0.0, 0.3, 0.7)
    draws = [tossed(probabilities, 3, step) for step in range(STEPS)]
    for layer, p in enumerate(probabilities):
        assert abs(sum(draw[layer] for draw in draws) - STEPS * p) <= 4.5 * math.sqrt(STEPS * p * (1 - p))
    both = sum(draw[2] and draw[3] for draw in draws)
    assert abs(both - STEPS * 0.21) < 4.5 * math.sqrt(STEPS * 0.21)


def test_bernoulli_may_keep_nothing() -> None:
    stage = Stage(0, 1, 1, ())
    draws = [draw_layers(stage, 4, "bernoulli", 1, 0, step) for step in range(200)]
    assert (False,) * 4 in draws


def test_groups_give_each_its_share() -> None:
    stage = Stage(0, 1, 6, (1, 12))
    for step in range(500):
        drawn = kept(stage, 12, step, groups=3)
        assert [sum(layer // 4 == group for layer in drawn) for group in range(3)] == [2, 2, 2]
        assert {0, 11} <= set(drawn)
    assert keep_probabilities(stage, 12, 3) == (1.0, *[1 / 3] * 3, *[0.5] * 4, *[1 / 3] * 3, 1.0)


@pytest.mark.parametrize(
    ("size", "groups", "sentence"),
    [
        (6, 5, "groups is 5.* 12 layers"),
        (6, 4, r"groups is 4.*size \(here 6\)"),
        (5, 5, "groups is 5.* 12 layers"),
        (6, 0, "groups is 0.* 12 layers"),
        (6, -3, "groups is -3.* 12 layers"),
        (6, 6, "groups is 6.*layers 1 to 2"),
    ],
)
def test_groups_that_cannot_share_evenly_are_refused(size: int, groups: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_groups(Stage(0, 1, size, (1, 2)), 12, groups)


def test_units_are_drawn_anew_in_each_running_layer() -> None:
    drawn = draw_units(HEADS, 6, 12, (True, False, True), 0, 0)
    assert drawn is not None
    assert [len(units) for units in drawn] == [6, 0, 6]
    assert drawn[0] != drawn[2]
    assert draw_units(HEADS, 12, 12, (True,), 0, 0) is None
    counts: Counter[int] = Counter()
    for step, layer in itertools.product(range(2000), range(3)):
        units = draw_units(PARTS, 1, 4, (True,) * 3, 0, step)
        assert units is not None
        counts.update(units[layer])
    assert all(abs(counts[part] - 1500) < 4.5 * math.sqrt(6000 * 3 / 16) for part in range(4))


def test_lowest_of_none_and_of_all() -> None:
    assert lowest(range(5), 0, 0, 0) == ()
    assert lowest(range(5), 5, 0, 0) == (0, 1, 2, 3, 4)


def test_an_opposite_draw_takes_what_the_other_left_out() -> None:
    for step in range(50):
        one, other = (draw_layers(Stage(0, 1, 6, ()), 12, "exact", 2, 0, step, opposite=turn) for turn in (False, True))
        assert all(a != b for a, b in zip(one, other, strict=True))
        heads, others = (draw_units(HEADS, 2, 4, (True,), 0, step, opposite=turn) for turn in (False, True))
        assert heads is not None
        assert others is not None
        assert sorted(heads[0] + others[0]) == [0, 1, 2, 3]
    wide, rest = (lowest(range(5), 3, 0, 0, opposite=turn) for turn in (False, True))
    assert {*wide, *rest} == set(range(5))
    one, other = (tossed((0.0, 0.3, 0.7, 1.0), 0, 7, opposite=turn) for turn in (False, True))
    assert one[0] is other[0] is False
    assert one[3] is other[3] is True


def test_opposite_coins_keep_their_probability_and_agree_least() -> None:
    pairs = [[tossed((0.3,), 0, step, opposite=turn)[0] for turn in (False, True)] for step in range(STEPS)]
    assert abs(sum(other for _, other in pairs) - STEPS * 0.3) <= 4.5 * math.sqrt(STEPS * 0.21)
    assert not any(one and other for one, other in pairs)
