"""The data order: which window sample n reads, as a function of n alone.

Sample n belongs to epoch n // N and reads window P_e(n mod N), where P_e is a permutation of 0..N-1 keyed by
(seed, epoch): a Feistel network (Luby and Rackoff, 1988) on the smallest domain of an even number of bits
that holds N. A value that falls outside 0..N-1 is permuted again until it falls inside (cycle-walking, Black
and Rogaway, 2002), which keeps it a permutation and takes fewer than four turns on average. Nothing is
stored: an order over 10^12 windows costs what an order over ten costs.
"""

import numpy as np

from raptr.hashing import Uint64s, bits_array, mix_array

# Four rounds suffice for large domains; the halves of a tiny one are a bit or two wide and need more.
ROUNDS = 8
LARGEST = 2**62


def permuted(n: Uint64s, size: int, seed: int) -> Uint64s:
    """The window in 0..size-1 that each sample of `n` reads; samples of several epochs may be mixed."""
    assert 1 <= size <= LARGEST, size
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    limit = np.uint64(size)
    keys = _keys(n // limit, seed)
    value = _feistel(n % limit, keys, half)
    while (outside := value >= limit).any():
        value[outside] = _feistel(value[outside], keys[:, outside], half)
    return value


def _keys(epoch: Uint64s, seed: int) -> Uint64s:
    """One key per round and sample."""
    return np.stack([bits_array(seed, "data", epoch, np.full((), r, np.uint64)) for r in range(ROUNDS)])


def _feistel(value: Uint64s, keys: Uint64s, half: int) -> Uint64s:
    """A permutation of 0..4^half-1: each round xors one half with a hash of the other, then swaps them."""
    shift, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & low
    for key in keys:
        left, right = right, left ^ (mix_array(key ^ right) & low)
    return np.asarray((left << shift) | right)
