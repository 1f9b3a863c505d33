"""Masked language modelling: which tokens are hidden, and what replaces them (Devlin et al., 2019, section 3.1).

Deviation: BERT hides each token with probability 0.15; here exactly round(0.15 * S) positions of every sequence are
hidden, those with the lowest hash of (seed, stream, sample, position). So shapes are static, and an average over
micro-batches or processes is exact. As in BERT, a hidden token becomes [MASK] 8 times in 10, a random ordinary token
once, and stays the same once. A sample's mask does not depend on its batch. It changes with every epoch, since the
samples are numbered through all epochs.

A sequence is [CLS] and a window of S-1 tokens, in which documents end with [SEP]. There is no next-sentence task.

Shapes: B batch, W window, S sequence, M masked positions, V vocabulary.
"""

import math
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray

from raptr.data.batch import Batch
from raptr.data.source import Int64s, Windows
from raptr.data.tokenizer import BERT, Specials, Vocabulary
from raptr.hashing import Stream, Uint64s, bits_array
from raptr.objectives.contract import Attention, Mixture, Objective

RATE = 0.15
EIGHT_TENTHS = np.uint64(8 * 2**64 // 10)
NINE_TENTHS = np.uint64(9 * 2**64 // 10)
SPECIAL = np.uint64(1 << 63)
# The low bits of a rank are its position, so no two ranks are equal, and each rank tells its position.
POSITION_BITS = 20
POSITION = np.uint64((1 << POSITION_BITS) - 1)
# A further counter of the hash, after (sample, position): how the token is hidden, and which random token to use.
KIND, REPLACEMENT = np.full((), 1, np.uint64), np.full((), 2, np.uint64)


@final
class MaskedLM(Objective):
    """Masked language modelling, at BERT's rate."""

    name: ClassVar[str] = "mlm"
    specials: ClassVar[Specials] = BERT
    attention: ClassVar[Attention] = "full"
    target: ClassVar[str] = "masked token"

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Refuse a vocabulary without BERT's special tokens."""
        self._ordinary_V = vocabulary.ordinary(self.specials)
        self._cls, self._mask = vocabulary["[CLS]"], vocabulary["[MASK]"]

    @staticmethod
    def window(length: int) -> int:
        """Return the length without [CLS]."""
        return length - 1

    @staticmethod
    def targets(length: int, mixture: Mixture | None = None) -> int:
        return masked_count(length)

    def batch(self, windows: Windows, seed: int, stream: Stream) -> Batch:
        """Put [CLS] in front of each window, and mask the result; [CLS] belongs to the first document of its window."""
        masked = mask(
            _behind(windows.tokens_BW, self._cls),
            windows.samples_B,
            seed=seed,
            stream=stream,
            hidden=self._mask,
            ordinary_V=self._ordinary_V,
        )
        tokens_BS, positions_BM, labels_BM = map(torch.from_numpy, masked)
        segments_BS = None if windows.segments_BW is None else torch.from_numpy(_behind(windows.segments_BW, 0))
        return Batch(tokens_BS, positions_BM, labels_BM, segments_BS)


def _behind(values_BW: Int64s, first: int) -> Int64s:
    """Return the rows with the value `first` put in front of each."""
    return np.pad(values_BW, ((0, 0), (1, 0)), constant_values=first)


def masked_count(length: int, rate: float = RATE) -> int:
    """Return how many positions of a sequence are masked: `round(rate * length)`, halves to even."""
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
    hidden: int,
    ordinary_V: NDArray[np.bool_],
    rate: float = RATE,
) -> tuple[Int64s, Int64s, Int64s]:
    """Return the masked input (B, S), the masked positions (B, M) in ascending order and their labels (B, M).

    `hidden` is the id of [MASK]; `ordinary_V` says for each id whether its token is ordinary, not special.
    """
    ordinary = np.flatnonzero(ordinary_V)
    length = tokens_BS.shape[1]
    count = masked_count(length, rate)
    samples_B1 = samples_B[:, None]

    position_S = np.arange(length, dtype=np.uint64)
    rank_BS = (bits_array(seed, stream, samples_B1, position_S) >> np.uint64(1)) & ~POSITION | position_S
    # Special tokens rank behind all others, so they are chosen only when no others are left.
    rank_BS = np.where(ordinary_V[tokens_BS], rank_BS, rank_BS | SPECIAL)
    lowest_BM = np.partition(rank_BS, count - 1, axis=1)[:, :count]
    positions_BM = np.sort(lowest_BM & POSITION, axis=1).astype(np.int64)

    inputs_BS = tokens_BS.astype(np.int64)
    labels_BM = np.take_along_axis(inputs_BS, positions_BM, axis=1)
    counters = samples_B1, positions_BM.astype(np.uint64)
    kind_BM = bits_array(seed, stream, *counters, KIND)
    # The modulo bias is below vocabulary / 2**64.
    random_BM = ordinary[bits_array(seed, stream, *counters, REPLACEMENT) % np.uint64(len(ordinary))]
    hidden_BM = np.where(kind_BM < NINE_TENTHS, random_BM, labels_BM)
    hidden_BM = np.where(kind_BM < EIGHT_TENTHS, hidden, hidden_BM)
    np.put_along_axis(inputs_BS, positions_BM, hidden_BM, axis=1)
    return inputs_BS, positions_BM, labels_BM
