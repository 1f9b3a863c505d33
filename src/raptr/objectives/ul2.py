"""UL2's mixture of denoisers (Tay et al., 2022, section 3): a decoder restores hidden spans, or the end of a text.

A sequence of S tokens is `[mode] inputs targets [EOS]`, without padding. R and X denoisers hide spans: the inputs have
a sentinel in place of each span, and the targets repeat each sentinel with its span behind it (Raffel et al., 2020).
The S denoiser hides the end of the text. Mode and inputs are the prefix, whose positions see each other: position q
sees k where k <= q or k < prefix. The loss is taken where the next token is one of the targets or [EOS].

Deviations. The paper does not give its mixture; ours is a setting: quotas over a cycle of samples. A micro-batch of
whole cycles always has the same number of targets, so shapes are static and averages over micro-batches exact; to this
end the splits of S denoisers come in pairs, p and W - p. A span denoiser has a fixed number of spans and of hidden
tokens: k spans lie in those k gaps between visible tokens that have the lowest hashes, and k - 1 cuts divide the hidden
tokens among them. So every token can be hidden, and no two spans touch. A denoiser that needs fewer than the W tokens
of a window takes them from a random offset on.

Shapes: B batch, W window, S sequence, N targets of the batch; of one denoiser: R raw tokens, H hidden ones, K spans.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from raptr.data.batch import Batch
from raptr.data.source import Int64s, Windows
from raptr.data.tokenizer import Specials, Vocabulary
from raptr.hashing import Stream, Uint64s, bits_array
from raptr.objectives.contract import Attention, Mixture, Objective
from raptr.objectives.specials import MODES, SENTINELS
from raptr.objectives.specials import UL2 as TOKENS

# The low bits of a rank are the ranked number, so no two ranks are equal, and each rank tells its number.
NUMBER_BITS = 20
NUMBER = np.uint64((1 << NUMBER_BITS) - 1)
MOST = 1 << 16  # the most samples of one denoiser in a cycle
# A counter of the hash for each random choice: the denoiser of a held-out window, offset, split, gaps and cuts.
SLOT, OFFSET, SPLIT, GAP, CUT = (np.full((), purpose, np.uint64) for purpose in range(5))


LETTERS = dict(zip("RSX", MODES, strict=True))
NAME = re.compile(r"S|([RX])-([1-9][0-9]{0,5})-(0\.[0-9]{1,6})")
# Every span denoiser equally often, the prefix LM (S) twice as often. At a length of 512, 37.5% of the positions carry
# loss.
STANDARD: Mixture = {
    "R-3-0.15": 2,
    "R-8-0.15": 2,
    "S": 4,
    "X-3-0.5": 2,
    "X-8-0.5": 2,
    "X-64-0.15": 2,
    "X-64-0.5": 2,
}


@final
@dataclass(frozen=True, order=True)
class Denoiser:
    """A denoiser and its number of samples in a cycle, `quota`. S, the prefix LM, has span 0.

    For the others, `span` is the mean length of a hidden span, and `rate` the fraction of tokens that are hidden.
    """

    letter: str
    span: int
    rate: float
    quota: int

    @property
    def name(self) -> str:
        """The name in a mixture: the letter and, for span denoisers, the mean span and the rate of hidden tokens."""
        return f"{self.letter}-{self.span}-{self.rate:g}" if self.span else self.letter

    @property
    def mode(self) -> str:
        return LETTERS[self.letter]

    def targets(self, length: int) -> int:
        """Return the number of targets of all its samples in a cycle."""
        return (
            self.quota * (length - sizes(length, self.span, self.rate).prefix)
            if self.span
            else self.quota * length // 2
        )


def denoisers(mixture: Mixture) -> tuple[Denoiser, ...]:
    """Return the denoisers of a mixture that have samples, in a fixed order; raise a ValueError for a bad mixture."""
    named = sorted(_denoiser(name, quota) for name, quota in mixture.items())
    if not any(denoiser.quota for denoiser in named):
        raise ValueError("objective.mixture gives no denoiser any samples. Give at least one of them 2 or more.")
    return tuple(denoiser for denoiser in named if denoiser.quota)


def _denoiser(name: str, quota: int) -> Denoiser:
    parts = NAME.fullmatch(str(name))
    if type(quota) is not int or not 0 <= quota <= MOST:
        raise ValueError(
            f"objective.mixture gives {name} {quota!r} samples; a whole number from 0 to {MOST} is allowed"
        )
    denoiser = None if parts is None else Denoiser(parts[1] or "S", int(parts[2] or 0), float(parts[3] or 0), quota)
    if denoiser is None or denoiser.name != name or (denoiser.span and not denoiser.rate):
        raise ValueError(
            f"objective.mixture has {name!r}. Use S, or R or X with a mean span and a rate of hidden tokens above 0, "
            f"such as {', '.join(name for name in STANDARD if name != 'S')}."
        )
    if not denoiser.span and quota % 2:
        raise ValueError(
            f"objective.mixture gives S {quota} samples. Use an even number: the splits of S come in pairs."
        )
    return denoiser


class Sizes(NamedTuple):
    """The numbers of a span denoiser in one sequence: raw tokens, hidden tokens among them, and spans."""

    raw: int
    hidden: int
    spans: int

    @property
    def prefix(self) -> int:
        """The length of the prefix: the mode token, the visible tokens and a sentinel for each span."""
        return 1 + self.raw - self.hidden + self.spans


@cache
def sizes(length: int, span: int, rate: float) -> Sizes:
    """Return the sizes that fill a sequence of `length` tokens, with spans of about `span` tokens."""
    possible = [
        Sizes(raw, round(raw * rate), spans) for spans in range(1, length) if (raw := length - 2 - 2 * spans) > 1
    ]
    fitting = [one for one in possible if one.spans <= one.hidden < one.raw and one.spans <= one.raw - one.hidden + 1]
    if not fitting:
        raise ValueError(f"data.length is {length}, too short for a denoiser that hides {rate:g} of the tokens.")
    best = min(fitting, key=lambda one: abs(one.spans - one.hidden / span))
    if best.spans > len(SENTINELS):
        raise ValueError(f"data.length is {length}, which needs {best.spans} sentinels; there are {len(SENTINELS)}.")
    return best


@final
class UL2(Objective):
    """The mixture of denoisers, for a decoder with a prefix."""

    name: ClassVar[str] = "ul2"
    specials: ClassVar[Specials] = TOKENS
    attention: ClassVar[Attention] = "prefix"
    target: ClassVar[str] = "token"
    standard: ClassVar[Mixture] = STANDARD

    def __init__(self, vocabulary: Vocabulary, mixture: Mixture | None = None) -> None:
        """Refuse a vocabulary without modes and sentinels, and a mixture with an odd number of S samples."""
        vocabulary.ordinary(self.specials)
        self.mixture = denoisers(STANDARD if mixture is None else mixture)
        self.slots = np.repeat(np.arange(len(self.mixture)), [one.quota for one in self.mixture])
        self._ids = {token: vocabulary[token] for token in self.specials.tokens if token in vocabulary}
        self._sentinels = np.array([vocabulary[token] for token in SENTINELS])

    @property
    def cycle(self) -> int:
        """The number of samples after which the denoisers repeat. Every whole cycle has the same number of targets."""
        return len(self.slots)

    @staticmethod
    def window(length: int) -> int:
        """Return the length without the mode token and the end token."""
        return length - 2

    @staticmethod
    def targets(length: int, mixture: Mixture | None = None) -> int:
        """Return the number of targets of a whole cycle."""
        return sum(one.targets(length) for one in denoisers(STANDARD if mixture is None else mixture))

    def batch(self, windows: Windows, seed: int, stream: Stream) -> Batch:
        """Turn each window into a sequence of its sample's denoiser.

        In training the denoisers take turns. A hash chooses them for held-out windows, whose numbers lie apart.
        """
        if windows.segments_BW is not None:
            raise ValueError("data.isolate_documents is true, which the objective ul2 does not know. Set it to false.")
        cycle, samples_B, slots_B = np.uint64(self.cycle), windows.samples_B, self._slots(windows, seed, stream)
        length = windows.tokens_BW.shape[1] + 2
        tokens_BS = np.empty((len(samples_B), length), np.int64)
        prefix_B = np.empty(len(samples_B), np.int64)
        for number, (denoiser, here) in enumerate(self._shared(slots_B)):
            raw_BW, samples = windows.tokens_BW[here], samples_B[here]
            if not denoiser.span:
                # Both samples of a pair have the same split; the second counts it from the other end.
                first = np.uint64(np.argmax(self.slots == number))
                pair, second = np.divmod(slots_B[here] - first, np.uint64(2))
                split = _number(seed, stream, (samples // cycle, pair), SPLIT, length - 3).astype(np.int64) + 1
                prefix_B[here] = 1 + np.where(second == 1, length - 2 - split, split)
                tokens_BS[here, 1:-1] = raw_BW
            else:
                spans = sizes(length, denoiser.span, denoiser.rate)
                prefix_B[here] = spans.prefix
                tokens_BS[here, 1:-1] = self._spans(raw_BW, samples, spans, seed, stream)
            tokens_BS[here, 0] = self._ids[denoiser.mode]
        tokens_BS[:, -1] = self._ids["[EOS]"]
        # The targets begin right after the prefix; each is predicted one position earlier.
        flat_N = np.flatnonzero(np.arange(length) >= prefix_B[:, None])
        arrays = tokens_BS, flat_N - 1, tokens_BS.reshape(-1)[flat_N], prefix_B
        tokens, positions, labels, prefix = map(torch.from_numpy, arrays)
        return Batch(tokens, positions, labels, prefix_B=prefix)

    def denoisers(self, windows: Windows) -> dict[str, NDArray[np.bool_]]:
        return {one.name: here for one, here in self._shared(self._slots(windows, 0, "evaluation"))}

    def _slots(self, windows: Windows, seed: int, stream: Stream) -> Uint64s:
        """Return the samples' places in the cycle."""
        samples_B = windows.samples_B
        numbers_B = bits_array(seed, stream, samples_B, SLOT) if stream == "evaluation" else samples_B
        return numbers_B % np.uint64(self.cycle)

    def _shared(self, slots_B: Uint64s) -> Iterator[tuple[Denoiser, NDArray[np.bool_]]]:
        """Yield each denoiser, with a mask of the samples that it gets by their places in the cycle."""
        numbers_B = self.slots[slots_B]
        return ((one, numbers_B == number) for number, one in enumerate(self.mixture))

    def _spans(self, raw_BW: Int64s, samples_B: Uint64s, one: Sizes, seed: int, stream: Stream) -> Int64s:
        """Return the inputs and targets of a span denoiser, without the mode and end tokens: shape (B, W)."""
        width, inputs = raw_BW.shape[1], one.prefix - 1
        offset_B1 = _number(seed, stream, (samples_B,), OFFSET, width - one.raw + 1).astype(np.int64)[:, None]
        raw_BR = np.take_along_axis(raw_BW, offset_B1 + np.arange(one.raw), axis=1)
        gaps_BK = _chosen(seed, stream, samples_B, GAP, one.raw - one.hidden + 1, one.spans)
        cuts_BK = _chosen(seed, stream, samples_B, CUT, one.hidden - 1, one.spans - 1) + 1
        before_BK = np.pad(cuts_BK, ((0, 0), (1, 0)))  # hidden tokens before each span
        ends_BK = np.pad(cuts_BK, ((0, 0), (0, 1)), constant_values=one.hidden)
        opened_BR, closed_BR = (_counted(gaps_BK + hidden_BK, one.raw) for hidden_BK in (before_BK, ends_BK))
        # All gaps differ, so a visible token lies between two spans, and no span ends where another begins.
        hidden_BR = opened_BR > closed_BR
        earlier_BR: Int64s = np.cumsum(hidden_BR, axis=1) - hidden_BR
        shown_BR = np.arange(one.raw) - earlier_BR + opened_BR
        place_BR = np.where(hidden_BR, inputs + earlier_BR + opened_BR, shown_BR)
        tokens_BW = np.empty((len(raw_BR), width), np.int64)
        np.put_along_axis(tokens_BW, place_BR, raw_BR, axis=1)
        sentinels_K = np.arange(one.spans)
        for place_BK in (gaps_BK + sentinels_K, inputs + before_BK + sentinels_K):
            np.put_along_axis(tokens_BW, place_BK, self._sentinels[None, : one.spans], axis=1)
        return tokens_BW


def _number(seed: int, stream: Stream, counters: tuple[Uint64s, ...], purpose: Uint64s, below: int) -> Uint64s:
    """Return a random number in 0..below-1 for each of the counters; the modulo bias is below 2**-44."""
    return bits_array(seed, stream, *counters, purpose) % np.uint64(below)


def _chosen(seed: int, stream: Stream, samples_B: Uint64s, purpose: Uint64s, of: int, count: int) -> Int64s:
    """Return for each sample `count` different numbers of 0..of-1, ascending: those with the lowest hash."""
    if not count:
        return np.empty((len(samples_B), 0), np.int64)
    numbers = np.arange(of, dtype=np.uint64)
    ranks = bits_array(seed, stream, samples_B[:, None], numbers, purpose) & ~NUMBER | numbers
    lowest = np.partition(ranks, count - 1, axis=1)[:, :count]
    return np.sort(lowest & NUMBER, axis=1).astype(np.int64)


def _counted(places_BK: Int64s, width: int) -> Int64s:
    """Return, for each of 0..width-1, how many of the places lie at or before it."""
    marks = np.zeros((len(places_BK), width + 1), np.int64)
    np.put_along_axis(marks, places_BK, 1, axis=1)
    return np.cumsum(marks, axis=1)[:, :width]
