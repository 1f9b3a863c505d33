"""Reads a tokenizer: which tokens it has, and whether an objective's special tokens are among them.

A tokenizer trained here has the special tokens at its lowest ids, under the names of `Specials`. One that somebody else
made may have them anywhere and call them otherwise: `tokenizer_config.json` and `special_tokens_map.json` beside it say
how. A text that happens to contain "[MASK]" gets six ordinary characters, never the special token: only the project
itself writes those.
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
NAMED = 8  # missing tokens that a message names
# Which files beside tokenizer.json name special tokens, the first that does so first; and what they call our tokens.
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

    `end` follows every document on disk. A tokenizer with a `start` puts it before, and `end` behind, each text that it
    encodes for a user; without one it adds nothing. A tokenizer that somebody else made may lack the `optional` ones.
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
    """The tokens of a tokenizer, with their ids; `names` are its own names of special tokens, where they differ."""

    ids: Mapping[str, int]
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.ids)

    def __getitem__(self, token: str) -> int:
        """The id of a token; a special one is asked for by our name."""
        return self.ids[self.name(token)]

    def __contains__(self, token: str) -> bool:
        return self.name(token) in self.ids

    def name(self, token: str) -> str:
        """What the tokenizer calls a special token."""
        return self.names.get(token, token)

    def missing(self, specials: Specials) -> list[str]:
        """The special tokens that an objective needs and this vocabulary lacks."""
        return [token for token in specials.tokens if token not in specials.optional and token not in self]

    def ordinary(self, specials: Specials) -> NDArray[np.bool_]:
        """For each id whether the token is ordinary; a vocabulary that lacks a special token is refused.

        Unused tokens are ordinary only behind the last special one.
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
    """The tokenizer in a `tokenizer.json`."""
    from tokenizers import Tokenizer  # not in the base install, which imports this file

    if not path.is_file():
        raise ValueError(f"{path}: there is no such file. Name a tokenizer.json, or a folder that holds one.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a bare Exception for a file it cannot read
        raise ValueError(f"{path}: expected a tokenizer, found a file that is not one ({error})") from error
    # Not part of the file's format, and without it a text could smuggle special tokens in.
    tokenizer.encode_special_tokens = True
    return tokenizer


def read_vocabulary(file: Path) -> Vocabulary:
    """The tokens in a `tokenizer.json`; the files beside it say what its special tokens are called.

    A token that has our name is that token. Where no end token is named, the only special token there is (as GPT-2's)
    ends documents.
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
    """The names of special tokens in a file of `transformers`, by its keys."""
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, found text that is not ({error})") from error
    if not isinstance(facts, dict):
        raise ValueError(f"{path}: expected a mapping, found {type(facts).__name__}")
    found: dict[str, Any] = {key: facts.get(key) for key in STOCK_KEYS.values()}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
    return {key: name for key, name in contents.items() if isinstance(name, str)}
