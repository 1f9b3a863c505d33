"""Reads a tokenizer: which tokens it has, and whether an objective's special tokens are among them.

The special tokens have the lowest ids, so "is it special" is one comparison. A text that happens to contain "[MASK]"
gets six ordinary characters, never the special token: only the project itself writes those.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tokenizers import Tokenizer

UNUSED = re.compile(r"\[unused\d+\]")
NAMED = 8  # missing tokens that a message names


@final
@dataclass(frozen=True)
class Specials:
    """The special tokens of an objective, in the order of their ids in a vocabulary that is trained for it.

    `end` follows every document on disk. A tokenizer with a `start` puts it before, and `end` behind, each text that it
    encodes for a user; without one it adds nothing.
    """

    objective: str
    tokens: tuple[str, ...]
    end: str
    start: str | None = None


BERT = Specials("mlm", ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), end="[SEP]", start="[CLS]")


@final
@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer, with their ids."""

    ids: Mapping[str, int]

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self.ids)

    def __getitem__(self, token: str) -> int:
        """The id of a token."""
        return self.ids[token]

    def ordinary(self, specials: Specials) -> range:
        """The ids behind these special tokens, among which only unused ones may stand; refused where one is missing."""
        name = specials.objective
        remedy = f"raptr prepare --objective {name}, without --tokenizer, trains a vocabulary that fits."
        if missing := [token for token in specials.tokens if token not in self.ids]:
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            raise ValueError(
                f"the vocabulary lacks {' '.join(missing[:NAMED])}{more}, which the objective {name} needs. {remedy}"
            )
        first = max(self.ids[token] for token in specials.tokens) + 1
        for number, token in sorted((number, token) for token, number in self.ids.items() if number < first):
            if token not in specials.tokens and not UNUSED.fullmatch(token):
                raise ValueError(
                    f"the vocabulary has {token!r} (id {number}) among the special tokens of the objective {name}, "
                    f"whose last has id {first - 1}; only [unused0] and the like may stand there. {remedy}"
                )
        return range(first, self.size)


def load(path: Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`."""
    if not path.is_file():
        raise ValueError(f"{path}: expected a tokenizer, found no file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a bare Exception for a file it cannot read
        raise ValueError(f"{path}: expected a tokenizer, found a file that is not one ({error})") from error
    # Not part of the file's format, and without it a text could smuggle special tokens in.
    tokenizer.encode_special_tokens = True
    return tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The tokens of a tokenizer, special ones included."""
    return Vocabulary(tokenizer.get_vocab(with_added_tokens=True))
