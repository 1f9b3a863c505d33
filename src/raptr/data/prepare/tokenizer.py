"""Get the tokenizer: train byte-level BPE on the corpus (Sennrich et al., 2016; Radford et al., 2019), or load a file.

Any text can be encoded, since each of the 256 bytes is a token.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from raptr.data.tokenizer import BERT, CONFIG, STOCK_KEYS, Specials, Vocabulary, load, read_vocabulary

UNKNOWN = "[UNK]"
LARGEST = 2**20  # the limit of data.vocabulary too; the trainer allocates memory for all tokens at once


def checked_size(size: int, specials: Specials) -> None:
    """Refuse a vocabulary size too small to hold every byte, or so large that it must be a mistake."""
    smallest = len(specials.tokens) + 256
    if not smallest <= size <= LARGEST:
        raise ValueError(
            f"vocabulary is {size}; it must lie between {smallest} "
            f"({len(specials.tokens)} special tokens and the 256 bytes) and {LARGEST}"
        )


def train(texts: Iterable[str], size: int, specials: Specials = BERT) -> Tokenizer:
    """Train a tokenizer of at most `size` tokens (fewer if the texts give no more); it depends on the texts alone."""
    checked_size(size, specials)
    tokenizer = Tokenizer(BPE(unk_token=UNKNOWN if UNKNOWN in specials.tokens else None))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=list(specials.tokens),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if specials.start is not None:
        start, end = specials.start, specials.end
        tokenizer.post_processor = TemplateProcessing(
            single=f"{start} $A {end}",
            pair=f"{start} $A {end} $B:1 {end}:1",
            special_tokens=[(token, specials.tokens.index(token)) for token in (start, end)],
        )
    tokenizer.encode_special_tokens = True
    return tokenizer


def existing(path: Path, specials: Specials) -> tuple[Tokenizer, Vocabulary]:
    """Load and check a tokenizer from elsewhere, and turn off its truncation and padding; return its vocabulary too."""
    tokenizer, vocabulary = load(path), read_vocabulary(path)
    names = {token: name for token, name in vocabulary.names.items() if token in specials.tokens}
    vocabulary = Vocabulary(vocabulary.ids, names)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    highest, size = max(vocabulary.ids.values()), vocabulary.size
    if highest != size - 1:
        raise ValueError(f"{path}: tokenizer: expected the ids 0 to {size - 1} for {size} tokens, found {highest}")
    try:
        vocabulary.ordinary(specials)
    except ValueError as error:
        keys = ", ".join(
            STOCK_KEYS[token] for token in specials.tokens if token in STOCK_KEYS and token not in vocabulary
        )
        hint = (
            f"Where the tokenizer has them under other names, {CONFIG} beside it must say so ({keys})." if keys else ""
        )
        raise ValueError(f"{path}: {error} {hint}".rstrip()) from error
    return tokenizer, vocabulary
