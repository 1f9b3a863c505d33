"""The contract that every objective fulfils.

An objective turns windows of raw tokens into batches of static shapes. What a sample becomes is a pure function of its
tokens, its number and a seed; the other samples of its batch, and how many there are, do not matter.

An objective may be a mixture of denoisers, which take turns over a cycle of samples. Sequences then differ in their
number of targets, but all whole cycles have the same number, so micro-batches consist of whole cycles.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, final

import numpy as np
from numpy.typing import NDArray

from raptr.data.batch import Batch
from raptr.data.source import Windows
from raptr.data.tokenizer import Specials, Vocabulary
from raptr.hashing import Stream

# What a position attends to: the whole sequence; itself and earlier positions; these and the sequence's prefix. With
# `causal` every token is predicted from those before it, so the loss is the negative log-likelihood of the text.
Attention = Literal["full", "causal", "prefix"]
Mixture = Mapping[str, int]  # the number of samples of each denoiser in a cycle


class Objective(ABC):
    """What a model with a given vocabulary learns to predict."""

    name: ClassVar[str]
    specials: ClassVar[Specials]
    attention: ClassVar[Attention]
    target: ClassVar[str]  # what the loss is averaged over, in words
    standard: ClassVar[Mixture] = {}  # the default mixture; empty if there are no denoisers

    @abstractmethod
    def __init__(self, vocabulary: Vocabulary, mixture: Mixture | None = None) -> None:
        """Refuse a vocabulary without the special tokens. Only objectives with denoisers are given a `mixture`."""

    @staticmethod
    @abstractmethod
    def window(length: int) -> int:
        """Return the number of raw tokens that a sequence of `length` tokens is made of."""

    @staticmethod
    @abstractmethod
    def targets(length: int, mixture: Mixture | None = None) -> int:
        """Return the number of targets in a sequence of `length` tokens; with denoisers, in a cycle of sequences."""

    @abstractmethod
    def batch(self, windows: Windows, seed: int, stream: Stream) -> Batch:
        """Turn windows into a batch; everything random about a sequence depends only on (seed, stream, sample)."""

    @final
    def training(self, windows: Windows, seed: int) -> Batch:
        """Return the batch of a training step."""
        return self.batch(windows, seed, "mask")

    @final
    def evaluation(self, windows: Windows) -> Batch:
        """Return a batch for evaluation: the same for every run, whatever its seed."""
        return self.batch(windows, 0, "evaluation")

    def denoisers(self, windows: Windows) -> dict[str, NDArray[np.bool_]]:
        """Return for each denoiser which of these held-out samples it gets; empty without a mixture."""
        return {}
