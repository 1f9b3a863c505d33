"""What the model predicts: objectives turn windows of tokens into batches for training and evaluation.

An objective is one file with one class, an entry in `registry.OBJECTIVES`, and its special tokens in `SPECIALS`.
Importing these names does not import torch.
"""

from raptr.objectives.specials import SPECIALS, specials_of

__all__ = ["SPECIALS", "specials_of"]
