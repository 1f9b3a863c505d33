"""Turn text into tokens on disk: writes the folders that `raptr.data` reads."""

from raptr.data.prepare.corpus import Document, builtin
from raptr.data.prepare.domains import DomainSource, parse_domain
from raptr.data.prepare.encoding import Progress
from raptr.data.prepare.preparation import prepare, prepare_builtin, prepare_corpus

__all__ = [
    "Document",
    "DomainSource",
    "Progress",
    "builtin",
    "parse_domain",
    "prepare",
    "prepare_builtin",
    "prepare_corpus",
]
