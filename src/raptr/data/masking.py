"""Masked language modelling: which tokens are hidden, and behind what (Devlin et al., 2019, section 3.1).

Deviation: BERT hides each token with probability 0.15; here exactly round(0.15 * S) positions of every
sequence are hidden, those with the lowest hash of (seed, stream, sample, position). Shapes are then static,
and an average over micro-batches or processes is exact. As in BERT, a hidden token becomes [MASK] 8 times in
10, a random ordinary token once, and stays as it is once. A sample's mask is the same in whichever batch it
turns up; it is another one in every epoch, since the sample number goes on counting.

Shapes: B batch, S sequence, M masked positions.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raptr.data.tokenizer import Vocabulary
from raptr.hashing import Stream, Uint64s, bits_array

RATE = 0.15
EIGHT_TENTHS = np.uint64(8 * 2**64 // 10)
NINE_TENTHS = np.uint64(9 * 2**64 // 10)
SPECIAL = np.uint64(1 << 63)
# The low bits of a rank are its position: no two ranks are equal, and a rank tells where it came from.
POSITION_BITS = 20
POSITION = np.uint64((1 << POSITION_BITS) - 1)
# Further counters after (sample, position): what hides the token, and which random token it may be.
KIND, REPLACEMENT = np.full((), 1, np.uint64), np.full((), 2, np.uint64)

Int64s = NDArray[np.int64]


def masked_count(length: int, rate: float = RATE) -> int:
    """How many positions of a sequence are masked: `round(rate * length)`, halves to even."""
    if not 0.0 < rate < 1.0:
        raise ValueError(f"rate is {rate}; the masked fraction must lie between 0 and 1")
    count = round(rate * length)
    if count < 1 or length > 1 << POSITION_BITS:
        raise ValueError(
            f"length is {length}; it must be at least {math.ceil(0.5 / rate)} for a rate of {rate} to mask a "
            f"position, and at most {1 << POSITION_BITS}"
        )
    return count


def mask(
    tokens_BS: NDArray[np.integer[Any]],
    samples_B: Uint64s,
    *,
    seed: int,
    stream: Stream,
    vocabulary: Vocabulary,
    rate: float = RATE,
) -> tuple[Int64s, Int64s, Int64s]:
    """The masked input (B, S), the masked positions (B, M) in ascending order and their labels (B, M)."""
    length = tokens_BS.shape[1]
    count = masked_count(length, rate)
    samples_B1 = samples_B[:, None]

    position_S = np.arange(length, dtype=np.uint64)
    rank_BS = (bits_array(seed, stream, samples_B1, position_S) >> np.uint64(1)) & ~POSITION | position_S
    # Special tokens rank behind all others: they are chosen only when nothing else is left.
    rank_BS = np.where(tokens_BS < vocabulary.specials, rank_BS | SPECIAL, rank_BS)
    lowest_BM = np.partition(rank_BS, count - 1, axis=1)[:, :count]
    positions_BM = np.sort(lowest_BM & POSITION, axis=1).astype(np.int64)

    inputs_BS = tokens_BS.astype(np.int64)
    labels_BM = np.take_along_axis(inputs_BS, positions_BM, axis=1)
    counters = samples_B1, positions_BM.astype(np.uint64)
    kind_BM = bits_array(seed, stream, *counters, KIND)
    # The bias of the remainder is below vocabulary / 2**64.
    ordinary = np.uint64(vocabulary.size - vocabulary.specials)
    random_BM = (bits_array(seed, stream, *counters, REPLACEMENT) % ordinary).astype(np.int64)
    hidden_BM = np.where(kind_BM < NINE_TENTHS, random_BM + vocabulary.specials, labels_BM)
    hidden_BM = np.where(kind_BM < EIGHT_TENTHS, vocabulary.mask, hidden_BM)
    np.put_along_axis(inputs_BS, positions_BM, hidden_BM, axis=1)
    return inputs_BS, positions_BM, labels_BM
