"""Remove text that also occurs elsewhere from held-out documents, so that a held-out loss does not measure memory."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from raptr.hashing import Uint64s

# Two overlapping hashes of HALF bytes each tell whether WINDOW bytes are equal. A token of byte-level BPE is at least
# one byte, so texts that share no WINDOW consecutive bytes share no WINDOW consecutive tokens, whatever the vocabulary.
HALF = 32
WINDOW = 2 * HALF - 1
BASE, MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
PREFIX = 24  # bits of a hash that a first, cheap comparison uses


def without_shared(texts: Sequence[str], others: Iterable[str]) -> list[str]:
    """Remove from the texts every line that touches WINDOW consecutive bytes that `others` contain too."""
    known = _hashes("\0".join(others).encode())
    left = [text.encode() for text in texts]
    while True:
        hashes = [_hashes(text) for text in left]
        shared = _shared(np.concatenate([*hashes, known[:0]]), known)
        if not shared.any():
            return [text.decode() for text in left]
        ends = np.cumsum([len(one) for one in hashes])[:-1]
        # Removing lines joins others, which may create new overlaps, so check the result again.
        left = [_cut(text, np.flatnonzero(mask)) for text, mask in zip(left, np.split(shared, ends), strict=True)]


def _hashes(text: bytes) -> Uint64s:
    """Return a hash of the WINDOW bytes at each position of the text; none if the text is shorter."""
    values: Uint64s = np.frombuffer(text, np.uint8).astype(np.uint64) + np.uint64(1)
    size, factor = 1, BASE
    while size < HALF:
        values = values[:-size] * np.uint64(factor) + values[size:]
        size, factor = 2 * size, factor * factor % 2**64
    second = values[HALF - 1 :]
    return np.asarray(values[: 1 - HALF] * np.uint64(factor) + (second ^ (second >> np.uint64(31))) * np.uint64(MIX))


def _shared(hashes: Uint64s, known: Uint64s) -> NDArray[np.bool_]:
    """Return which hashes are known, as `np.isin` does, without sorting all of the millions of known ones."""
    shift = np.uint64(64 - PREFIX)
    possible = np.zeros(2**PREFIX, np.bool_)
    possible[hashes >> shift] = True
    return np.isin(hashes, known[possible[known >> shift]], kind="sort")  # NumPy 2.0 fails to choose for 64 bits


def _cut(text: bytes, starts: NDArray[np.intp]) -> bytes:
    """Return the text without the lines that the windows at these starts touch."""
    covered = np.zeros(len(text) + 1, np.int64)
    np.add.at(covered, starts, 1)
    np.add.at(covered, starts + WINDOW, -1)
    covered = np.cumsum(covered)
    lines = text.split(b"\n")
    ends = np.minimum(np.cumsum([0, *(len(line) + 1 for line in lines)]), len(text))
    kept = [line for line, (first, last) in zip(lines, pairwise(ends), strict=True) if not covered[first:last].any()]
    return b"\n".join(kept)
