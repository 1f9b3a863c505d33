"""Tokenizers that other people made: special tokens of any name, at any id, named by the files beside them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from raptr.cli import app
from raptr.data import TokenStore, open_store
from raptr.data.prepare import DomainSource, prepare_corpus
from raptr.data.store import SPLITS
from raptr.data.tokenizer import CONFIG, read_vocabulary
from raptr.objectives import SPECIALS
from raptr.objectives.causal import CausalLM
from raptr.objectives.mlm import MaskedLM
from raptr.train.config import Config
from raptr.train.exporting import export
from raptr.train.loop import pretrain

TEXTS = [f"Text number {i} says {i * i}, </s> <|endoftext|> and no more.\n" * (1 + i % 7) for i in range(100)]
CAUSAL, MLM = SPECIALS["causal"], SPECIALS["mlm"]


@pytest.fixture
def corpus(tmp_path: Path) -> list[DomainSource]:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return [DomainSource("corpus", (str(file),))]


def saved(tokenizer: Tokenizer, folder: Path, **files: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, facts in files.items():
        (folder / f"{name}.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def trained(first: list[str] | None = None, vocabulary: int = 320) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=vocabulary, special_tokens=first or [], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def gpt2(folder: Path) -> Path:
    """One special token, at the highest id, that no file names."""
    tokenizer = trained()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return saved(tokenizer, folder, tokenizer_config={"model_max_length": 1024})


def llama3(folder: Path) -> Path:
    """Special tokens at the highest ids, most of them reserved; a start token before each text."""
    tokenizer = trained()
    pattern = Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(5)]
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", *reserved])
    start = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", start)]
    )
    return saved(
        tokenizer,
        folder,
        tokenizer_config={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": None},
        special_tokens_map={"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|reserved_special_token_0|>"}},
    )


def llama2(folder: Path) -> Path:
    """A space in front of each text, bytes for unknown characters; special tokens at the lowest ids."""
    specials, pieces = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted(set("▁") | {letter for text in TEXTS for letter in text if letter.isalnum() or letter in ",.<>|/"})
    words = ["▁t", "▁te", "▁T", "▁Te", "▁no", "no"]
    merges = [("▁", "t"), ("▁t", "e"), ("▁", "T"), ("▁T", "e"), ("n", "o"), ("▁", "no")]
    vocabulary = {token: i for i, token in enumerate([*specials, *pieces, *letters, *words])}
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    named = {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}, "unk_token": {"content": "<unk>"}}
    return saved(tokenizer, folder, special_tokens_map=named)


def roberta(folder: Path) -> Path:
    """Special tokens on both ends of the ids, under names of their own."""
    tokenizer = trained(["<s>", "<pad>", "</s>", "<unk>"])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    named = {"cls": "<s>", "bos": "<s>", "pad": "<pad>", "sep": "</s>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
    return saved(tokenizer, folder, tokenizer_config={f"{role}_token": name for role, name in named.items()})


SHAPES = {"gpt2": (gpt2, "<|endoftext|>"), "llama2": (llama2, "</s>"), "llama3": (llama3, "<|end_of_text|>")}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def texts(store: TokenStore) -> list[str]:
    """What was written, decoded; every document must end with the end token, and have no special token before."""
    tokenizer, end, found = store.tokenizer(), store.vocabulary["[EOS]"], []
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for split in SPLITS:
        (tokens,), (ends,) = store.tokens(split, "corpus"), store.documents(split, "corpus")
        for document in np.split(tokens, ends[:-1].astype(np.int64)):
            assert document[-1] == end
            assert not special & set(document[:-1].tolist())
            found.append(tokenizer.decode(document[:-1].tolist(), skip_special_tokens=False))
    return found


@every_shape
def test_documents_end_with_the_tokenizers_own_end_token(
    shape: str, corpus: list[DomainSource], tmp_path: Path
) -> None:
    make, end = SHAPES[shape]
    folder = make(tmp_path / "given")
    store = prepare_corpus(corpus, tmp_path / "out", tokenizer=folder, specials=CAUSAL)
    assert sorted(texts(store)) == sorted(TEXTS)
    assert store.vocabulary.name("[EOS]") == end
    assert store.vocabulary["[EOS]"] == store.tokenizer().token_to_id(end)
    assert json.loads((store.path / CONFIG).read_text()) == {"eos_token": end}
    store.verify()
    CausalLM(store.vocabulary)
    with pytest.raises(ValueError, match=r"lacks .*\[MASK\].*mlm"):
        MaskedLM(store.vocabulary)
    # The same request is recognised, and a data folder or a file serves as a tokenizer too.
    again: list[str] = []
    prepare_corpus(corpus, tmp_path / "out", tokenizer=folder, specials=CAUSAL, say=again.append)
    assert "already prepared" in again[-1]
    for number, other in enumerate((store.path, folder / "tokenizer.json")):
        copy = prepare_corpus(corpus, tmp_path / f"copy{number}", tokenizer=other, specials=CAUSAL)
        assert copy.fingerprint == store.fingerprint


@every_shape
def test_long_documents_have_the_tokens_of_the_whole(
    shape: str, corpus: list[DomainSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SHAPES[shape][0](tmp_path / "given")
    whole = prepare_corpus(corpus, tmp_path / "whole", tokenizer=folder, specials=CAUSAL)
    monkeypatch.setattr("raptr.data.prepare.encoding.PIECE", 50)
    cut = prepare_corpus(corpus, tmp_path / "cut", tokenizer=folder, specials=CAUSAL)
    assert cut.fingerprint == whole.fingerprint


@every_shape
def test_masked_language_modelling_needs_its_tokens(shape: str, corpus: list[DomainSource], tmp_path: Path) -> None:
    folder = SHAPES[shape][0](tmp_path / "given")
    missing = r"\[CLS\] \[SEP\] \[MASK\]"
    with pytest.raises(ValueError, match=rf"tokenizer\.json.*lacks .*{missing}.*mlm.*{CONFIG}.*mask_token"):
        prepare_corpus(corpus, tmp_path / "out", tokenizer=folder)
    assert not (tmp_path / "out").exists()


def test_masked_language_modelling_with_names_of_their_own(corpus: list[DomainSource], tmp_path: Path) -> None:
    store = prepare_corpus(corpus, tmp_path / "out", tokenizer=roberta(tmp_path / "given"))
    vocabulary = store.vocabulary
    assert [vocabulary[token] for token in MLM.tokens] == [1, 3, 0, 2, vocabulary.size - 1]
    assert np.flatnonzero(vocabulary.ordinary(MLM)).tolist() == list(range(4, vocabulary.size - 1))
    assert store.tokens("train", "corpus")[0][-1] == 2
    assert "[EOS]" not in vocabulary


def test_a_run_and_its_export_know_the_names(corpus: list[DomainSource], tmp_path: Path) -> None:
    store = prepare_corpus(corpus, tmp_path / "out", tokenizer=roberta(tmp_path / "given"))
    config = Config.read(
        {
            "model": {"size": "tiny", "layers": 1, "width": 16, "heads": 4, "head_size": 4, "mlp": 16},
            "method": {"name": "full"},
            "data": {"source": str(store.path), "length": 16},
            "train": {"steps": 1, "batch": 4, "eval_samples": 4, "device": "cpu"},
        }
    )
    pretrain(config, tmp_path / "run", console=Console(quiet=True))
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(export(tmp_path / "run"), local_files_only=True)
    ids = store.tokenizer().encode("Text number", add_special_tokens=False).ids
    assert tokenizer("Text number").input_ids == [0, *ids, 2]
    assert tokenizer("<mask>").input_ids == [0, store.vocabulary["[MASK]"], 2]
    assert (tokenizer.mask_token, tokenizer.pad_token, tokenizer.pad_token_id) == ("<mask>", "<pad>", 1)


def test_another_name_is_another_request_and_another_fingerprint(corpus: list[DomainSource], tmp_path: Path) -> None:
    folder = llama3(tmp_path / "given")
    first = prepare_corpus(corpus, tmp_path / "first", tokenizer=folder, specials=CAUSAL)
    (folder / CONFIG).unlink()  # then the other file decides
    with pytest.raises(ValueError, match=r"special_tokens was .*<\|end_of_text\|>.*<\|reserved_special_token_0\|>"):
        prepare_corpus(corpus, tmp_path / "first", tokenizer=folder, specials=CAUSAL)
    second = prepare_corpus(corpus, tmp_path / "second", tokenizer=folder, specials=CAUSAL)
    assert second.vocabulary.name("[EOS]") == "<|reserved_special_token_0|>"
    assert second.fingerprint != first.fingerprint


def test_names_that_were_lost_or_changed_are_reported(corpus: list[DomainSource], tmp_path: Path) -> None:
    store = prepare_corpus(corpus, tmp_path / "out", tokenizer=llama2(tmp_path / "given"), specials=CAUSAL)
    (store.path / CONFIG).write_text(json.dumps({"eos_token": "<s>"}), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{CONFIG}.*</s>.*<s>"):
        open_store(store.path)
    (store.path / CONFIG).write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{CONFIG}.*JSON"):
        open_store(store.path)
    (store.path / CONFIG).unlink()
    with pytest.raises(ValueError, match=rf"{CONFIG}.*</s>"):
        open_store(store.path)


def test_a_tokenizer_that_names_no_end_is_refused(corpus: list[DomainSource], tmp_path: Path) -> None:
    folder = llama2(tmp_path / "given")
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<none>"}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"lacks \[EOS\].*causal"):
        prepare_corpus(corpus, tmp_path / "out", tokenizer=folder, specials=CAUSAL)


def test_a_tokenizer_with_our_names_has_none_of_its_own(tmp_path: Path) -> None:
    tokenizer = trained(list(MLM.tokens))
    folder = saved(tokenizer, tmp_path / "given", tokenizer_config={"cls_token": "the", "mask_token": "[MASK]"})
    assert read_vocabulary(folder / "tokenizer.json").names == {}


@pytest.mark.parametrize(("size", "dtype"), [(2**16, "uint16"), (2**16 + 64, "uint32")])
def test_vocabularies_of_64k_and_more(size: int, dtype: str, tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(size)}
    words["</s>"] = words.pop("w7")
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    documents = [[number, size - 1, 3] for number in range(size - 40, size)]
    lines = ["".join(f"w{number} " for number in document) for document in documents]
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    arguments = ["prepare", "--data", str(tmp_path / "text.txt"), "--documents", "line", "--objective", "causal"]
    folder = saved(tokenizer, tmp_path / "given", tokenizer_config={"eos_token": "</s>"})
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out"), "--tokenizer", str(folder)])
    assert done.exit_code == 0, done.output
    store = open_store(tmp_path / "out")
    assert (store.manifest.dtype, store.vocabulary.size) == (dtype, size)
    found = [number for split in SPLITS for part in store.tokens(split, "text") for number in part.tolist()]
    assert sorted(found) == sorted(number for document in documents for number in (*document, 7))
