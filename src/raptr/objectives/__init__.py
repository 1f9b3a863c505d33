"""WHAT is predicted: from windows of tokens to the batches that a model is trained and judged on.

An objective is one file with one class, an entry in `registry.py`, and its special tokens in `specials.py`. Data can
be prepared for those of SPECIALS that have no class yet. The names here need no torch.
"""

from raptr.objectives.specials import SPECIALS, specials_of

__all__ = ["SPECIALS", "specials_of"]
