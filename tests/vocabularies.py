"""Vocabularies of tokenizers in memory."""

from tokenizers import Tokenizer

from raptr.data.tokenizer import Vocabulary


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The tokens of a tokenizer, special ones included, all under our names."""
    return Vocabulary(tokenizer.get_vocab(with_added_tokens=True))
