"""Everything random here is a pure function of (seed, stream, counters): a counter hash on integers.

The mixing function is the finaliser of splitmix64 (Steele, Lea and Flood, 2014). There is no generator
state to save or to broadcast, step 10,000,000 costs what step 0 costs, and a change of Python, NumPy, torch
or device changes nothing: golden values in the tests pin the numbers. The same function exists for one
integer (`bits`) and for arrays (`bits_array`).
"""

import operator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Stream = Literal["init", "data", "mask", "subnetwork", "dropout", "evaluation", "mixture"]
STREAMS: dict[Stream, int] = {
    "init": 1,
    "data": 2,
    "mask": 3,
    "subnetwork": 4,
    "dropout": 5,
    "evaluation": 6,
    "mixture": 7,
}

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB

Uint64s = NDArray[np.uint64]


def mix(z: int) -> int:
    """Scramble one 64-bit integer; a bijection."""
    z = (z + GOLDEN) & MASK64
    z = ((z ^ (z >> 30)) * FIRST) & MASK64
    z = ((z ^ (z >> 27)) * SECOND) & MASK64
    return z ^ (z >> 31)


def bits(seed: int, stream: Stream, *counters: int) -> int:
    """64 random bits that belong to (seed, stream, counters)."""
    # The integers of NumPy overflow, and those of torch hash to other values: both become plain ones.
    state = mix(mix(operator.index(seed) & MASK64) ^ STREAMS[stream])
    for counter in counters:
        state = mix(state ^ mix(operator.index(counter) & MASK64))
    return state


def mix_array(z: Uint64s) -> Uint64s:
    """`mix` on every element of an array of one or more dimensions; unsigned arithmetic wraps, as it must."""
    z = z + np.uint64(GOLDEN)
    z ^= z >> np.uint64(30)
    z *= np.uint64(FIRST)
    z ^= z >> np.uint64(27)
    z *= np.uint64(SECOND)
    z ^= z >> np.uint64(31)
    return z


def bits_array(seed: int, stream: Stream, *counters: Uint64s) -> Uint64s:
    """`bits` for arrays of counters, broadcast against each other."""
    state = np.full((), mix(mix(seed & MASK64) ^ STREAMS[stream]), dtype=np.uint64)
    with np.errstate(over="ignore"):  # NumPy warns where a counter is a single number
        for counter in counters:
            state = mix_array(state ^ mix_array(counter))
    return state


def unit(value: int) -> float:
    """A number in [0, 1) from 64 random bits, exact in float64."""
    return (value >> 11) * 2.0**-53
