"""Text -> tokens on disk -> batch(step)."""

from raptr.data.batch import Batch
from raptr.data.corpus import Document, builtin
from raptr.data.masking import mask, masked_count
from raptr.data.order import permuted
from raptr.data.preparation import prepare, prepare_builtin
from raptr.data.source import EvalData, TrainData
from raptr.data.store import TokenStore, open_store
from raptr.data.tokenizer import Vocabulary

__all__ = [
    "Batch",
    "Document",
    "EvalData",
    "TokenStore",
    "TrainData",
    "Vocabulary",
    "builtin",
    "mask",
    "masked_count",
    "open_store",
    "permuted",
    "prepare",
    "prepare_builtin",
]
