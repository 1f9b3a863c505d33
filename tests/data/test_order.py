"""The data order is a permutation in every epoch, the same on every machine, and costs no memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raptr.data.order import ROUNDS, permuted
from raptr.hashing import Uint64s, bits, mix


def samples(first: int, count: int) -> Uint64s:
    return np.arange(first, first + count, dtype=np.uint64)


def reference(n: int, size: int, seed: int) -> int:
    """The definition, on Python's integers."""
    half = 1
    while 4**half < size:
        half += 1
    epoch, value = divmod(n, size)
    while True:
        left, right = divmod(value, 1 << half)
        for r in range(ROUNDS):
            left, right = right, left ^ (mix(bits(seed, "data", epoch, r) ^ right) % (1 << half))
        value = (left << half) + right
        if value < size:
            return value


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 100, 1000, 4095, 4096, 4097, 65537])
def test_every_window_once_per_epoch(size: int) -> None:
    for epoch in (0, 1, 10**6):
        assert sorted(permuted(samples(epoch * size, size), size, seed=0)) == list(range(size))


@given(size=st.integers(1, 300), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_every_window_once_per_epoch_for_any_size_and_seed(size: int, seed: int, epoch: int) -> None:
    order = permuted(samples(epoch * size, size), size, seed)
    assert sorted(order) == list(range(size))
    assert order[-1] == reference(epoch * size + size - 1, size, seed)


@given(size=st.integers(1, 2**40), n=st.integers(0, 2**62), seed=st.integers(-5, 2**64))
@settings(max_examples=50, deadline=None)
def test_large_sizes_follow_the_definition(size: int, n: int, seed: int) -> None:
    assert permuted(np.array([n], dtype=np.uint64), size, seed).tolist() == [reference(n, size, seed)]


def test_golden_values() -> None:
    assert permuted(samples(0, 10), 10, 0).tolist() == [3, 7, 2, 0, 5, 8, 6, 1, 4, 9]
    assert permuted(samples(10, 10), 10, 0).tolist() == [1, 9, 3, 2, 6, 8, 5, 4, 0, 7]
    assert permuted(samples(0, 10), 10, 1).tolist() == [0, 9, 5, 3, 1, 4, 6, 8, 2, 7]
    far = np.array([0, 1, 10**9, 10**12], dtype=np.uint64)
    assert permuted(far, 2**40 - 3, 7).tolist() == [601516135723, 694413952674, 1082543978939, 964512522335]


def test_epochs_and_seeds_differ() -> None:
    orders = [permuted(samples(e * 1000, 1000), 1000, seed).tolist() for e in range(3) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_a_batch_may_mix_epochs() -> None:
    together = permuted(samples(95, 110), 100, 3)
    apart = [permuted(samples(n, 1), 100, 3)[0] for n in range(95, 205)]
    assert together.tolist() == apart


def test_a_billion_windows_without_collisions() -> None:
    size = 10**9 + 7
    drawn = permuted(samples(12345, 100_000), size, 0)
    assert len(np.unique(drawn)) == 100_000
    assert drawn.max() < size


def test_the_order_is_about_uniform() -> None:
    # The first draw of many epochs, for a size that wastes much of its domain: chi-squared with 16 degrees
    # of freedom stays below 45 but for 1 seed in 5,000, and the seed is fixed.
    size, epochs = 17, 17_000
    first = permuted(np.arange(epochs, dtype=np.uint64) * np.uint64(size), size, 0)
    counts = np.bincount(first.astype(np.int64), minlength=size)
    assert ((counts - epochs / size) ** 2 / (epochs / size)).sum() < 45
    # Neighbouring samples read windows that have nothing to do with each other.
    order = permuted(samples(0, 100_000), 100_000, 0).astype(np.float64)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02
