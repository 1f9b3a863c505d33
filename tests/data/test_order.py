"""The data order is a permutation in every epoch, the same on every machine, and costs no memory."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raptr.data.order import CYCLE, ROUNDS, mixed, permuted, quotas
from raptr.hashing import Uint64s, bits, mix


def samples(first: int, count: int) -> Uint64s:
    return np.arange(first, first + count, dtype=np.uint64)


def reference(n: int, size: int, seed: int) -> int:
    """The definition, on Python's integers."""
    high = math.isqrt(size - 1) + 1
    low = math.ceil(Fraction(size, high))
    epoch, value = divmod(n, size)
    while True:
        left, right = divmod(value, low)
        for r in range(0, ROUNDS, 2):
            left = (left + mix(bits(seed, "data", 0, epoch, r) ^ right) % high) % high
            right = (right + mix(bits(seed, "data", 0, epoch, r + 1) ^ left) % low) % low
        value = left * low + right
        if value < size:
            return value


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 100, 1000, 4095, 4096, 4097, 65537])
def test_every_window_once_per_epoch(size: int) -> None:
    for epoch in (0, 1, 10**6):
        assert sorted(permuted(samples(epoch * size, size), [size], seed=0)) == list(range(size))


@given(size=st.integers(1, 300), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_every_window_once_per_epoch_for_any_size_and_seed(size: int, seed: int, epoch: int) -> None:
    order = permuted(samples(epoch * size, size), [size], seed)
    assert sorted(order) == list(range(size))
    assert order[-1] == reference(epoch * size + size - 1, size, seed)


@given(size=st.integers(1, 2**40), n=st.integers(0, 2**62), seed=st.integers(-5, 2**64))
@settings(max_examples=50, deadline=None)
def test_large_sizes_follow_the_definition(size: int, n: int, seed: int) -> None:
    assert permuted(np.array([n], dtype=np.uint64), [size], seed).tolist() == [reference(n, size, seed)]


def test_golden_values() -> None:
    assert permuted(samples(0, 10), [10], 0).tolist() == [9, 0, 3, 1, 6, 2, 7, 5, 8, 4]
    assert permuted(samples(10, 10), [10], 0).tolist() == [9, 4, 2, 3, 5, 7, 1, 0, 6, 8]
    assert permuted(samples(0, 10), [10], 1).tolist() == [0, 6, 7, 4, 2, 9, 8, 5, 1, 3]
    far = np.array([0, 1, 10**9, 10**12], dtype=np.uint64)
    assert permuted(far, [2**40 - 3], 7).tolist() == [182287297149, 755977024177, 94030359102, 504643497674]


def test_epochs_and_seeds_differ() -> None:
    orders = [permuted(samples(e * 1000, 1000), [1000], seed).tolist() for e in range(3) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_a_batch_may_mix_epochs() -> None:
    together = permuted(samples(95, 110), [100], 3)
    apart = [permuted(samples(n, 1), [100], 3)[0] for n in range(95, 205)]
    assert together.tolist() == apart


def test_domains_are_permuted_apart() -> None:
    domains = np.arange(300) % 3
    sizes = [100, 100, 7]
    numbers = (np.arange(300) // 3).astype(np.uint64)
    together = permuted(numbers, sizes, 3, domains)
    assert sorted(together[domains == 0]) == sorted(together[domains == 1]) == list(range(100))
    assert together[domains == 0].tolist() != together[domains == 1].tolist()
    assert sorted(together[domains == 2][:7]) == list(range(7))
    assert together[domains == 0].tolist() == permuted(numbers[::3], [100], 3).tolist()


def test_a_billion_windows_without_collisions() -> None:
    size = 10**9 + 7
    drawn = permuted(samples(12345, 100_000), [size], 0)
    assert len(np.unique(drawn)) == 100_000
    assert drawn.max() < size


def test_the_order_is_about_uniform() -> None:
    # The first draw of many epochs, for a size that wastes much of its domain: chi-squared with 16 degrees
    # of freedom stays below 45 but for 1 seed in 5,000, and the seed is fixed.
    size, epochs = 17, 17_000
    first = permuted(np.arange(epochs, dtype=np.uint64) * np.uint64(size), [size], 0)
    counts = np.bincount(first.astype(np.int64), minlength=size)
    assert ((counts - epochs / size) ** 2 / (epochs / size)).sum() < 45
    # Neighbouring samples read windows that have nothing to do with each other.
    order = permuted(samples(0, 100_000), [100_000], 0).astype(np.float64)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1.0], (100,)), ([17, 57, 17, 9], (17, 57, 17, 9)), ([1, 1, 1], (34, 33, 33)), ([0.001, 1], (0, 100))],
)
def test_quotas_fill_a_cycle(weights: list[float], expected: tuple[int, ...]) -> None:
    assert quotas(weights) == expected


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_quotas_are_within_one_of_the_share(weights: list[float]) -> None:
    counts = quotas(weights)
    assert sum(counts) == CYCLE
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - CYCLE * weight / sum(weights)) < 1 + 1e-9


def test_a_cycle_holds_each_quota_and_each_domain_is_read_in_order() -> None:
    counts = (17, 57, 17, 9)
    domains, numbers = mixed(samples(0, 1000), counts, seed=2)
    for cycle in range(10):
        assert tuple(np.bincount(domains[100 * cycle : 100 * (cycle + 1)], minlength=4)) == counts
    for domain, count in enumerate(counts):
        assert numbers[domains == domain].tolist() == list(range(10 * count))
    assert domains[:100].tolist() != domains[100:200].tolist()
    assert domains[:100].tolist() != sorted(domains[:100])


def test_one_domain_is_read_as_if_there_were_no_mixture() -> None:
    domains, numbers = mixed(samples(5, 500), (100,), seed=0)
    assert not domains.any()
    assert numbers.tolist() == list(range(5, 505))


def test_the_mixture_is_a_function_of_the_sample() -> None:
    far = samples(10**12 + 37, 250)
    together = mixed(far, (30, 70), seed=9)
    apart = [mixed(far[i : i + 1], (30, 70), seed=9) for i in range(250)]
    assert together[0].tolist() == [int(domain[0]) for domain, _ in apart]
    assert together[1].tolist() == [int(number[0]) for _, number in apart]
    assert "".join(map(str, mixed(samples(0, 20), (30, 70), seed=0)[0])) == "11101111101101001010"
