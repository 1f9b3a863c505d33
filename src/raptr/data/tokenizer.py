"""Read a tokenizer: its tokens, its names of the special tokens, and whether it has those that an objective needs.

A tokenizer trained by raptr has the special tokens at its lowest ids, under the names in `Specials`. A tokenizer from
elsewhere may have them at any ids and under other names, which `tokenizer_config.json` and `special_tokens_map.json`
beside it list. A text that happens to contain "[MASK]" is encoded as six ordinary characters, never as the special
token: only raptr itself writes special tokens.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNUSED = re.compile(r"\[unused\d+\]")
NAMED = 8  # the most missing tokens that an error message lists
# The files beside tokenizer.json that may name special tokens, in order of precedence, and their keys for our tokens.
CONFIG = "tokenizer_config.json"
CONFIGS = (CONFIG, "special_tokens_map.json")
STOCK_KEYS = {
    "[PAD]": "pad_token",
    "[UNK]": "unk_token",
    "[CLS]": "cls_token",
    "[SEP]": "sep_token",
    "[MASK]": "mask_token",
    "[EOS]": "eos_token",
}


@final
@dataclass(frozen=True)
class Specials:
    """The special tokens of an objective, in the order of their ids in a vocabulary that is trained for it.

    `end` follows every document on disk. When a trained tokenizer encodes text for a user, it puts `start` in front and
    `end` behind; without a `start` it adds neither. A tokenizer from elsewhere may lack the `optional` tokens.
    """

    objective: str
    tokens: tuple[str, ...]
    end: str
    start: str | None = None
    optional: tuple[str, ...] = ()


BERT = Specials("mlm", ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), end="[SEP]", start="[CLS]")


@final
@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer's tokens; `names` maps our names of special tokens to its own, where they differ."""

    ids: Mapping[str, int]
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.ids)

    def __getitem__(self, token: str) -> int:
        """Return the id of a token; special tokens are looked up by our names."""
        return self.ids[self.name(token)]

    def __contains__(self, token: str) -> bool:
        return self.name(token) in self.ids

    def name(self, token: str) -> str:
        """Return the tokenizer's name of a special token."""
        return self.names.get(token, token)

    def missing(self, specials: Specials) -> list[str]:
        """Return the special tokens that an objective needs and this vocabulary lacks."""
        return [token for token in specials.tokens if token not in specials.optional and token not in self]

    def ordinary(self, specials: Specials) -> NDArray[np.bool_]:
        """Return for each id whether its token is ordinary; raise a ValueError if a special token is missing.

        Placeholders such as [unused7] are ordinary only if their ids are above that of the last special token.
        """
        name = specials.objective
        remedy = f"raptr prepare --objective {name}, without --tokenizer, trains a vocabulary that fits."
        if missing := self.missing(specials):
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            raise ValueError(
                f"the vocabulary lacks {' '.join(missing[:NAMED])}{more}, which the objective {name} needs. {remedy}"
            )
        special = [self[token] for token in specials.tokens if token in self]
        unused = [number for token, number in self.ids.items() if number < max(special) and UNUSED.fullmatch(token)]
        ordinary_V = np.ones(self.size, np.bool_)
        ordinary_V[[*special, *unused]] = False
        return ordinary_V


def load(path: Path) -> "Tokenizer":
    """Load the tokenizer in a `tokenizer.json`; raise a ValueError if it cannot be read."""
    from tokenizers import Tokenizer  # the base install lacks this package, but imports this file

    if not path.is_file():
        raise ValueError(f"{path}: there is no such file. Name a tokenizer.json, or a folder that holds one.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a bare Exception for a file it cannot read
        raise ValueError(f"{path}: expected a tokenizer, found a file that is not one ({error})") from error
    # The file cannot store this setting. Without it, a text could smuggle in special tokens.
    tokenizer.encode_special_tokens = True
    return tokenizer


def read_vocabulary(file: Path) -> Vocabulary:
    """Read the tokens in a `tokenizer.json`, and the names of its special tokens from the files beside it.

    A token with our name always is the special token. If no end token is named and the tokenizer has only one special
    token (as GPT-2 has), that one ends documents.
    """
    tokenizer = load(file)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    stock = {key: name for path in reversed(CONFIGS) for key, name in _special_names(file.with_name(path)).items()}
    names = {
        token: stock[key] for token, key in STOCK_KEYS.items() if token not in ids and stock.get(key, token) in ids
    }
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    if "[EOS]" not in ids and len(special) == 1:
        names.setdefault("[EOS]", special[0])
    return Vocabulary(ids, names)


def _special_names(path: Path) -> dict[str, str]:
    """Return the names of special tokens in a file of `transformers`, by its keys; none if there is no such file."""
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, found text that is not ({error})") from error
    if not isinstance(facts, dict):
        raise ValueError(f"{path}: expected a mapping, found {type(facts).__name__}")
    entries: dict[str, Any] = {key: facts.get(key) for key in STOCK_KEYS.values()}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in entries.items()}
    return {key: name for key, name in contents.items() if isinstance(name, str)}
