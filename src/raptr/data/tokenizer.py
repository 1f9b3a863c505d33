"""The tokenizer: byte-level BPE trained on the corpus (Sennrich et al., 2016; Radford et al., 2019).

Every text can be encoded, since each of the 256 bytes is a token. The special tokens have the lowest ids, so
"is it special" is one comparison. A text that happens to contain "[MASK]" gets six ordinary characters, never
the special token: only the project itself writes those.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
UNUSED = re.compile(r"\[unused\d+\]")
SMALLEST = len(SPECIALS) + 256
LARGEST = 2**32


@dataclass(frozen=True)
class Vocabulary:
    """What the model and the masking need to know of a tokenizer; ids below `specials` are special."""

    size: int
    pad: int
    cls: int
    sep: int
    mask: int
    specials: int


def checked_size(size: int) -> None:
    """Refuse a vocabulary that cannot hold every byte, or that no token type can count."""
    if not SMALLEST <= size <= LARGEST:
        raise ValueError(
            f"vocabulary is {size}; it must lie between {SMALLEST} "
            f"({len(SPECIALS)} special tokens and the 256 bytes) and {LARGEST}"
        )


def train(texts: Iterable[str], size: int) -> Tokenizer:
    """A tokenizer of at most `size` tokens (fewer when the texts hold no more), given by the texts alone."""
    checked_size(size)
    tokenizer = Tokenizer(BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = [(token, SPECIALS.index(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    tokenizer.encode_special_tokens = True
    return tokenizer


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


def existing(path: Path) -> Tokenizer:
    """A tokenizer that somebody else made, checked, and kept from cutting or filling up what it encodes."""
    tokenizer = load(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        size = vocabulary_of(tokenizer).size
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if highest != size - 1:
        raise ValueError(f"{path}: tokenizer: expected the ids 0 to {size - 1} for {size} tokens, found {highest}")
    return tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The facts about a tokenizer whose special tokens, and perhaps unused ones, have the lowest ids."""
    known = tokenizer.get_vocab(with_added_tokens=True)
    if missing := [token for token in SPECIALS if token not in known]:
        raise ValueError(f"tokenizer: expected the special tokens {' '.join(SPECIALS)}, found no {' '.join(missing)}")
    found = {token: known[token] for token in SPECIALS}
    specials = max(found.values()) + 1
    below = (tokenizer.id_to_token(number) for number in range(specials))
    if ordinary := [token for token in below if token not in SPECIALS and not UNUSED.fullmatch(token or "")]:
        raise ValueError(
            f"tokenizer: expected {' '.join(SPECIALS)} before all ordinary tokens (only [unused0] and the like may "
            f"stand among them), found {ordinary[0]!r} below id {specials - 1}"
        )
    pad, cls, sep, mask = (found[token] for token in ("[PAD]", "[CLS]", "[SEP]", "[MASK]"))
    return Vocabulary(tokenizer.get_vocab_size(), pad, cls, sep, mask, specials)
