"""WHAT is predicted: from windows of tokens to the batches that a model is trained and judged on.

An objective is one file with one class, an entry in `registry.OBJECTIVES`, and its special tokens in SPECIALS. The
names here need no torch.
"""

from raptr.objectives.specials import SPECIALS, specials_of

__all__ = ["SPECIALS", "specials_of"]
