"""Tokens on disk -> the windows of a step: all that training reads. `raptr.data.prepare` writes what is read here.

The names here need no torch; `Batch` is in `raptr.data.batch`.
"""

from raptr.data.source import EvalData, TrainData, Windows
from raptr.data.store import TokenStore, open_store
from raptr.data.tokenizer import Vocabulary

__all__ = ["EvalData", "TokenStore", "TrainData", "Vocabulary", "Windows", "open_store"]
