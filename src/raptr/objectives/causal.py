"""Causal language modelling: every token is predicted from those before it (Radford et al., 2018, section 3.1).

A sample is a window of S + 1 tokens: the first S are the input, the last S the labels, so there is a target at every
position. A window may hold parts of several documents, each with an end token behind it; nothing is padded.

With isolated documents a position belongs to the document of the token that it predicts. So a document's end token is
in the segment of the next document, as its start token: the first token of a document is predicted from that token
alone, and no token is predicted from another document. All S positions stay targets, so shapes are static and an
average over micro-batches is exact. Generated text begins the same way, after an end token.

Nothing here is random: a window gives the same batch in every epoch.

Shapes: B batch, W window, S sequence, M = S targets.
"""

from typing import ClassVar, final

import torch

from raptr.data.batch import Batch
from raptr.data.source import Windows
from raptr.data.tokenizer import Specials, Vocabulary
from raptr.hashing import Stream
from raptr.objectives.contract import Attention, Mixture, Objective
from raptr.objectives.specials import CAUSAL


@final
class CausalLM(Objective):
    """Next-token prediction over packed windows."""

    name: ClassVar[str] = "causal"
    specials: ClassVar[Specials] = CAUSAL
    attention: ClassVar[Attention] = "causal"
    target: ClassVar[str] = "token"

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Refuse a vocabulary without an end token."""
        vocabulary.ordinary(self.specials)

    @staticmethod
    def window(length: int) -> int:
        """Return the length of the input, and one more token for the last label."""
        return length + 1

    @staticmethod
    def targets(length: int, mixture: Mixture | None = None) -> int:
        return length

    def batch(self, windows: Windows, seed: int, stream: Stream) -> Batch:
        """Return each window's first S tokens as input, and its last S tokens as labels."""
        tokens_BW, segments_BW = windows.tokens_BW, windows.segments_BW
        segments_BS = None if segments_BW is None else torch.tensor(segments_BW[:, 1:])
        return Batch(torch.tensor(tokens_BW[:, :-1]), None, torch.tensor(tokens_BW[:, 1:]), segments_BS)
