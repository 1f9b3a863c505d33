"""Text -> tokens on disk -> batch(step).

The names here need no torch; those of `batch` and `source`, the last step, are imported from there.
"""

from raptr.data.corpus import Document, builtin
from raptr.data.domains import DomainSource, parse_domain
from raptr.data.encoding import Progress
from raptr.data.masking import mask, masked_count
from raptr.data.order import permuted
from raptr.data.preparation import prepare, prepare_builtin, prepare_corpus
from raptr.data.store import Domain, Part, TokenStore, open_store
from raptr.data.tokenizer import Vocabulary

__all__ = [
    "Document",
    "Domain",
    "DomainSource",
    "Part",
    "Progress",
    "TokenStore",
    "Vocabulary",
    "builtin",
    "mask",
    "masked_count",
    "open_store",
    "parse_domain",
    "permuted",
    "prepare",
    "prepare_builtin",
    "prepare_corpus",
]
