"""All randomness, as a pure function of (seed, stream, counters): a counter hash on integers.

The mixing function is the finaliser of splitmix64 (Steele, Lea and Flood, 2014). There is no generator state to save
or to broadcast, step 10,000,000 costs what step 0 costs, and a change of Python, NumPy, torch or device changes
nothing: golden values in the tests fix the numbers. The same function exists for one integer (`bits`) and for arrays
(`bits_array`).
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
    """Scramble a 64-bit integer; different integers give different results."""
    z = (z + GOLDEN) & MASK64
    z = ((z ^ (z >> 30)) * FIRST) & MASK64
    z = ((z ^ (z >> 27)) * SECOND) & MASK64
    return z ^ (z >> 31)


def bits(seed: int, stream: Stream, *counters: int) -> int:
    """Return the 64 random bits of (seed, stream, counters)."""
    # Convert to plain integers, since NumPy's overflow and torch's hash to other values.
    state = mix(mix(operator.index(seed) & MASK64) ^ STREAMS[stream])
    for counter in counters:
        state = mix(state ^ mix(operator.index(counter) & MASK64))
    return state


def mix_array(z: Uint64s) -> Uint64s:
    """Apply `mix` to every element of an array of one or more dimensions; unsigned arithmetic wraps, as it must."""
    z = z + np.uint64(GOLDEN)
    z ^= z >> np.uint64(30)
    z *= np.uint64(FIRST)
    z ^= z >> np.uint64(27)
    z *= np.uint64(SECOND)
    z ^= z >> np.uint64(31)
    return z


def bits_array(seed: int, stream: Stream, *counters: Uint64s) -> Uint64s:
    """Return `bits` for arrays of counters, which are broadcast against each other."""
    state = np.full((), mix(mix(seed & MASK64) ^ STREAMS[stream]), dtype=np.uint64)
    with np.errstate(over="ignore"):  # NumPy warns where a counter is a single number
        for counter in counters:
            state = mix_array(state ^ mix_array(counter))
    return state


def unit(value: int) -> float:
    """Turn 64 random bits into a number in [0, 1), exact in float64."""
    return (value >> 11) * 2.0**-53
