"""The data order: which window sample n reads, as a function of n and the seed alone.

Within a domain, sample m belongs to epoch m // N and reads window P_e(m mod N), where P_e is a permutation of
0..N-1 keyed by (seed, domain, epoch). It is a Feistel network (Luby and Rackoff, 1988) on pairs of digits, which
index the smallest near-square rectangle that holds N. A value outside 0..N-1 is permuted again until it falls
inside (cycle-walking, Black and Rogaway, 2002); the rectangle is so tight that this is rare.

Several domains are mixed in cycles of 100 samples: each domain fills a fixed number of a cycle's slots, its quota,
and the slots are shuffled by (seed, cycle). So the mixture is exact in every cycle, and mixing does not change the
order in which a domain is read. Nothing is stored: an order over 10^12 windows costs what one over ten costs.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raptr.hashing import Uint64s, bits_array, mix_array

CYCLE = 100
# Four rounds suffice for large domains. In tiny ones, digits are only a bit or two wide and need more.
ROUNDS = 8
LARGEST = 2**62


def permuted(n: Uint64s, sizes: Sequence[int], seed: int, domains: NDArray[np.int64] | None = None) -> Uint64s:
    """Return the window, 0..size-1 in its domain, that each sample reads.

    `n` numbers the samples within their domains, `sizes` has the windows of each domain, and `domains` names the domain
    of each sample, by default 0. Samples of different epochs and domains may be mixed.
    """
    assert all(1 <= size <= LARGEST for size in sizes), sizes
    if domains is None:
        domains = np.zeros(n.shape, np.int64)
    highs = [math.isqrt(size - 1) + 1 for size in sizes]
    lows = [-(-size // high) for size, high in zip(sizes, highs, strict=True)]
    limit, high, low = (np.array(column, np.uint64)[domains] for column in (sizes, highs, lows))
    keys = _keys(n // limit, seed, domains.astype(np.uint64))
    value = _feistel(n % limit, keys, high, low)
    while len(outside := np.flatnonzero(value >= limit)):
        value[outside] = _feistel(value[outside], keys[:, outside], high[outside], low[outside])
    return value


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many samples of a cycle each domain gets: proportional to its weight, rounded by largest remainder."""
    shares = [CYCLE * weight / sum(weights) for weight in weights]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: CYCLE - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def mixed(n: Uint64s, counts: Sequence[int], seed: int) -> tuple[NDArray[np.int64], Uint64s]:
    """Return the domain of each sample in `n`, and the sample's number among those of its domain."""
    assert sum(counts) == CYCLE
    cycles, where = np.unique(n // np.uint64(CYCLE), return_inverse=True)
    slots = np.arange(CYCLE, dtype=np.uint64)
    shuffled = np.argsort(bits_array(seed, "mixture", cycles[:, None], slots), axis=1, kind="stable")
    domains = np.repeat(np.arange(len(counts)), counts)[shuffled]
    numbers = np.zeros(domains.shape, np.uint64)
    for domain, count in enumerate(counts):
        here = domains == domain
        earlier = np.cumsum(here, axis=1).astype(np.uint64) - np.uint64(1)
        numbers[here] = (cycles[:, None] * np.uint64(count) + earlier)[here]
    slot = (n % np.uint64(CYCLE)).astype(np.int64)
    return domains[where, slot], numbers[where, slot]


def _keys(epoch: Uint64s, seed: int, domains: Uint64s) -> Uint64s:
    """Return one key for each round and sample."""
    rounds = np.arange(ROUNDS, dtype=np.uint64)[:, None]
    return bits_array(seed, "data", domains, epoch, rounds)


def _feistel(value: Uint64s, keys: Uint64s, high: Uint64s, low: Uint64s) -> Uint64s:
    """Permute 0..high·low-1: in each round, a hash of one digit shifts the other; the digits take turns."""
    left, right = value // low, value % low
    for r, key in enumerate(keys):
        if r % 2:
            right = (right + mix_array(key ^ left) % low) % low
        else:
            left = (left + mix_array(key ^ right) % high) % high
    return np.asarray(left * low + right)
