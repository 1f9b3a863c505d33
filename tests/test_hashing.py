import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raptr.hashing import STREAMS, bits, bits_array, mix, mix_array, unit

WORD = st.integers(0, 2**64 - 1)


def test_golden_values() -> None:
    # splitmix64 seeded with 0 gives this published first output
    assert mix(0) == 0xE220A8397B1DCDAF
    assert bits(0, "subnetwork", 0, 0, 0) == 12074346875153201677
    assert bits(1, "data", 10_000_000) == 1701760726657804452
    assert bits(2**63, "mask", 3, 5) == 11364467939661037867


@given(WORD)
def test_array_form_equals_the_integer_form(z: int) -> None:
    assert mix_array(np.array([z], dtype=np.uint64)).tolist() == [mix(z)]


@given(st.integers(0, 2**63), st.sampled_from(sorted(STREAMS)), st.lists(WORD, min_size=1, max_size=3))
def test_counters_broadcast(seed: int, stream: str, counters: list[int]) -> None:
    name = next(key for key in STREAMS if key == stream)
    arrays = [np.array([counter, 7], dtype=np.uint64) for counter in counters]
    expected = [bits(seed, name, *counters), bits(seed, name, *([7] * len(counters)))]
    assert bits_array(seed, name, *arrays).tolist() == expected


def test_streams_and_counters_are_told_apart() -> None:
    seen = {bits(seed, stream, a, b) for seed in range(4) for stream in STREAMS for a in range(8) for b in range(8)}
    assert len(seen) == 4 * len(STREAMS) * 64
    assert bits(0, "data", 1) != bits(0, "data", 1, 0)


def test_unit_covers_the_interval_evenly() -> None:
    values = [unit(bits(0, "data", i)) for i in range(20_000)]
    assert 0 <= min(values) < 0.001
    assert 0.999 < max(values) < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert np.abs(counts - 1000).max() < 150  # five standard deviations
