"""The contract that every objective fulfils.

An objective turns windows of raw tokens into batches of static shapes. A sample's part of a batch is a pure function
of its tokens, its number and a seed: whichever batch it turns up in, and however large that is, it is the same.

An objective may be a mixture of denoisers, which take turns over a cycle of samples. Sequences then differ in their
targets, but whole cycles have equally many, so micro-batches are made of whole cycles.
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

# What a position may attend to: the whole sequence; itself and what stands before it; these and the sequence's prefix.
# With `causal` every token is predicted from those before it, so the loss is the negative log-likelihood of the text.
Attention = Literal["full", "causal", "prefix"]
Mixture = Mapping[str, int]  # the samples of each denoiser in a cycle


class Objective(ABC):
    """What a model with a given vocabulary learns to predict."""

    name: ClassVar[str]
    specials: ClassVar[Specials]
    attention: ClassVar[Attention]
    target: ClassVar[str]  # what the loss is the mean over, in words
    standard: ClassVar[Mixture] = {}  # the mixture unless another is set; empty: there are no denoisers

    @abstractmethod
    def __init__(self, vocabulary: Vocabulary, mixture: Mixture | None = None) -> None:
        """Refuse a vocabulary without the special tokens; `mixture` is given only where there are denoisers."""

    @staticmethod
    @abstractmethod
    def window(length: int) -> int:
        """The raw tokens of a sample whose sequence has `length` tokens."""

    @staticmethod
    @abstractmethod
    def targets(length: int, mixture: Mixture | None = None) -> int:
        """The positions at which the loss is taken, of a sequence of `length` tokens, or of a cycle of a mixture's."""

    @abstractmethod
    def batch(self, windows: Windows, seed: int, stream: Stream) -> Batch:
        """The sequences made of these windows; everything random about them belongs to (seed, stream, sample)."""

    @final
    def training(self, windows: Windows, seed: int) -> Batch:
        """What a training step reads."""
        return self.batch(windows, seed, "mask")

    @final
    def evaluation(self, windows: Windows) -> Batch:
        """What an evaluation reads: the same for every run, whatever its seed."""
        return self.batch(windows, 0, "evaluation")

    def denoisers(self, windows: Windows) -> dict[str, NDArray[np.bool_]]:
        """Which of these held-out samples each denoiser of a mixture judges."""
        return {}
