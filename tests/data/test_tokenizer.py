"""The tokenizer is decided by its texts, encodes any text, and keeps its special tokens to itself."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel, WordPiece

from raptr.data.prepare.tokenizer import train
from raptr.data.tokenizer import BERT, load
from tests.vocabularies import vocabulary_of

TEXTS = [f"def f{i}(value): return value * {i}  # naïve, [MASK] and [SEP]\n" for i in range(200)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TEXTS, 320)


def test_the_same_texts_give_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    assert train(iter(TEXTS), 320).to_str() == tokenizer.to_str()
    assert train(TEXTS[::-1], 320).to_str() == tokenizer.to_str()


def test_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    assert [tokenizer.id_to_token(i) for i in range(5)] == list(BERT.tokens)
    assert np.flatnonzero(vocabulary_of(tokenizer).ordinary(BERT)).tolist() == list(range(5, 320))


def test_the_template(tokenizer: Tokenizer) -> None:
    single, pair = tokenizer.encode("def").tokens, tokenizer.encode("def", "value").tokens
    assert (single[0], single[-1]) == ("[CLS]", "[SEP]")
    assert [token for token in pair if token in BERT.tokens] == ["[CLS]", "[SEP]", "[SEP]"]


@pytest.mark.parametrize("text", ["def f(value)", "[MASK] [SEP][CLS]", "日本語 \x00\t 🐍", "  spaces\n\n  kept  "])
def test_any_text_survives_and_none_becomes_special(tokenizer: Tokenizer, tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    for one in (tokenizer, load(path)):
        ids = one.encode(text, add_special_tokens=False).ids
        assert min(ids) >= 5
        assert one.decode(ids) == text


def test_a_small_corpus_gives_a_small_vocabulary() -> None:
    assert vocabulary_of(train(["abcab"], 5000)).size == 5 + 256 + 1


def test_training_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    train(TEXTS, 300)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_bad_input_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vocabulary.* 100.*261"):
        train(TEXTS, 100)
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*no such file"):
        load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*not"):
        load(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"lacks \[CLS\] \[SEP\] \[MASK\],.*raptr prepare --objective mlm"):
        vocabulary_of(Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))).ordinary(BERT)


def word_pieces(*tokens: str) -> Tokenizer:
    return Tokenizer(WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))


def test_special_tokens_may_have_unused_ones_among_them() -> None:
    stock = word_pieces("[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##s")
    vocabulary = vocabulary_of(stock)
    assert np.flatnonzero(vocabulary.ordinary(BERT)).tolist() == [7, 8]
    assert [vocabulary[token] for token in BERT.tokens] == [0, 3, 4, 5, 6]
    with pytest.raises(ValueError, match=r"lacks \[MASK\],"):
        vocabulary_of(word_pieces("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the")).ordinary(BERT)


def test_special_tokens_may_lie_anywhere() -> None:
    vocabulary = vocabulary_of(word_pieces("[PAD]", "[UNK]", "[CLS]", "the", "[unused0]", "[MASK]", "a", "[SEP]", "b"))
    assert np.flatnonzero(vocabulary.ordinary(BERT)).tolist() == [3, 6, 8]
    # Behind the last special token unused ones count, as they always did.
    stock = vocabulary_of(word_pieces(*BERT.tokens, "[unused0]", "the"))
    assert np.flatnonzero(stock.ordinary(BERT)).tolist() == [5, 6]
