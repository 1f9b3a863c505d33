"""Read folders of prepared tokens, as the windows of each training step. `raptr.data.prepare` writes these folders.

Importing these names does not import torch; `Batch`, which needs it, is in `raptr.data.batch`.
"""

from raptr.data.source import EvalData, TrainData, Windows
from raptr.data.store import TokenStore, open_store
from raptr.data.tokenizer import Vocabulary

__all__ = ["EvalData", "TokenStore", "TrainData", "Vocabulary", "Windows", "open_store"]
