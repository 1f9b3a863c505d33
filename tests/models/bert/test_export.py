"""The exported model, loaded from its folder by stock classes, gives the logits and the ids of our own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from raptr.data.prepare.tokenizer import train
from raptr.data.tokenizer import Vocabulary, load
from raptr.models.bert.config import BertConfig
from raptr.models.bert.export import stock_tokenizer, to_transformers
from raptr.models.bert.model import Bert
from raptr.models.export import save
from raptr.subnetworks import Subnetwork
from tests.vocabularies import vocabulary_of
from tests.walks import hidden

LAYERS, POSITIONS = 5, 24
TEXTS = [
    "to be or not to be, that is the question",
    "whether ’tis nobler in the mind\n\tto suffer",
    "def f(x): return x",
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr("socket.socket.connect", refuse)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_text(train(TEXTS * 4, 400).to_str(), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return load(tokenizer_file)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return vocabulary_of(tokenizer)


@pytest.fixture(scope="module")
def model(vocabulary: Vocabulary) -> Bert:
    """A model none of whose tensors has its initial value, so that a forgotten one shows."""
    size = vocabulary.size
    config = BertConfig(
        layers=LAYERS, width=16, heads=4, head_size=4, mlp=24, vocabulary=size, positions=POSITIONS, dropout=0.1
    )
    model, source = Bert(config).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=source), alpha=0.3)
    return model


@pytest.fixture(scope="module")
def folder(model: Bert, vocabulary: Vocabulary, tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    exported = to_transformers(model, Subnetwork.full(LAYERS), vocabulary)
    save(exported, stock_tokenizer(tokenizer_file, POSITIONS), folder)
    return folder


def stock_model(folder: Path) -> Any:
    auto: Any = AutoModelForMaskedLM
    return auto.from_pretrained(folder, local_files_only=True)


def random_tokens(vocabulary: Vocabulary, *shape: int) -> Tensor:
    return torch.randint(vocabulary["[PAD]"] + 1, vocabulary.size, shape, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def ours(model: Bert, tokens_BS: Tensor, subnetwork: Subnetwork, segments_BS: Tensor | None = None) -> Tensor:
    """Our logits at every position, (B, S, V)."""
    x_BSD = hidden(model, tokens_BS, subnetwork, segments_BS)
    x_BSD = model.head.norm(F.gelu(model.head.dense(x_BSD)))
    return F.linear(x_BSD, model.tokens.weight, model.head_bias)


@torch.no_grad()
def theirs(stock: Any, tokens_BS: Tensor, mask_BS: Tensor | None = None) -> Tensor:
    logits: Tensor = stock(input_ids=tokens_BS, attention_mask=mask_BS).logits
    return logits


def assert_close(one: Tensor, other: Tensor) -> None:
    assert one.abs().max() > 1
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("length", [1, 7, POSITIONS])
def test_logits_are_equal_at_every_position(model: Bert, vocabulary: Vocabulary, folder: Path, length: int) -> None:
    tokens = random_tokens(vocabulary, 3, length)
    assert_close(ours(model, tokens, Subnetwork.full(LAYERS)), theirs(stock_model(folder), tokens))


def test_padding_is_a_segment_of_its_own(model: Bert, vocabulary: Vocabulary, folder: Path) -> None:
    lengths = torch.tensor([POSITIONS, 11, 1])
    real = torch.arange(POSITIONS) < lengths[:, None]
    tokens = random_tokens(vocabulary, 3, POSITIONS).masked_fill(~real, vocabulary["[PAD]"])
    stock = theirs(stock_model(folder), tokens, real.long())
    assert_close(ours(model, tokens, Subnetwork.full(LAYERS), real.long())[real], stock[real])
    assert (ours(model, tokens, Subnetwork.full(LAYERS))[real] - stock[real]).abs().max() > 1e-2


@pytest.mark.parametrize(
    "subnetwork",
    [
        Subnetwork((1.0, 0.0, 1.0, 0.0, 1.0)),
        Subnetwork((1.0, 0.5, 2.0, 0.25, 1.0), scaled="branches"),
        Subnetwork((0.5, 0.0, 0.0, 1.5, 1.0), scaled="branches", head_scale=0.75, part_scale=1.25),
        Subnetwork((1.0,) * LAYERS, heads=((0, 1, 2, 3),) * LAYERS, parts=((0, 1, 2, 3),) * LAYERS),
        Subnetwork((0.0,) * LAYERS),
    ],
    ids=["3-of-5", "branches", "widths", "all-listed", "none"],
)
def test_parts_and_folded_scales(model: Bert, vocabulary: Vocabulary, tmp_path: Path, subnetwork: Subnetwork) -> None:
    to_transformers(model, subnetwork, vocabulary).save_pretrained(tmp_path)
    stock, tokens = stock_model(tmp_path), random_tokens(vocabulary, 2, 9)
    assert stock.config.num_hidden_layers == len(stock.roberta_prelayernorm.encoder.layer) == subnetwork.size
    assert_close(ours(model, tokens, subnetwork), theirs(stock, tokens))


def test_folder_holds_no_code_and_nothing_pickled(folder: Path) -> None:
    files = {path.name for path in folder.rglob("*")}
    assert files == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    assert facts["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert facts["model_input_names"] == ["input_ids", "attention_mask"]


def test_configuration(model: Bert, vocabulary: Vocabulary, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["RobertaPreLayerNormForMaskedLM"]
    assert (config["vocab_size"], config["max_position_embeddings"]) == (vocabulary.size, POSITIONS + 1)
    ids = (config["pad_token_id"], config["bos_token_id"], config["eos_token_id"])
    assert ids == (vocabulary["[PAD]"], vocabulary["[CLS]"], vocabulary["[SEP]"])
    assert config["hidden_dropout_prob"] == model.config.dropout
    stock = stock_model(folder)
    assert stock.lm_head.decoder.weight is stock.roberta_prelayernorm.embeddings.word_embeddings.weight
    assert not stock.training


def test_the_export_shares_no_memory_and_draws_no_random_number(model: Bert, vocabulary: Vocabulary) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    exported = to_transformers(model, Subnetwork.full(LAYERS), vocabulary)
    assert torch.equal(before, torch.get_rng_state())
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert not own & {parameter.data_ptr() for parameter in exported.parameters()}


def test_tokenizer_gives_the_same_ids(tokenizer: Tokenizer, vocabulary: Vocabulary, folder: Path) -> None:
    auto: Any = AutoTokenizer
    stock = auto.from_pretrained(folder, local_files_only=True)
    for text in (*TEXTS, "", " two  spaces ", "naïve 中文 🙂\x00", "x" * 99):
        assert stock(text).input_ids == tokenizer.encode(text).ids
        assert stock.decode(stock(text).input_ids, skip_special_tokens=True) == text
    assert stock("to be", "or not").input_ids == tokenizer.encode("to be", "or not").ids
    specials = (stock.pad_token_id, stock.cls_token_id, stock.sep_token_id, stock.mask_token_id)
    assert specials == (vocabulary["[PAD]"], vocabulary["[CLS]"], vocabulary["[SEP]"], vocabulary["[MASK]"])
    assert (stock.bos_token_id, stock.eos_token_id) == (vocabulary["[CLS]"], vocabulary["[SEP]"])
    assert (len(stock), stock.model_max_length) == (vocabulary.size, POSITIONS)
    assert stock("x" * 99, truncation=True).input_ids[-1] == vocabulary["[SEP]"]


def test_pairs_and_batches_run(tokenizer: Tokenizer, folder: Path) -> None:
    auto: Any = AutoTokenizer
    stock = auto.from_pretrained(folder, local_files_only=True)
    given = stock(["to be", "or"], ["or not", "x"], padding=True, return_tensors="pt", return_token_type_ids=True)
    assert not given.token_type_ids.any()
    assert stock_model(folder)(**given).logits.isfinite().all()
    assert set(stock("to be", "or not")) == {"input_ids", "attention_mask"}


def test_a_written_mask_is_the_mask_and_takes_its_space(
    tokenizer: Tokenizer, vocabulary: Vocabulary, folder: Path
) -> None:
    auto: Any = AutoTokenizer
    ids = auto.from_pretrained(folder, local_files_only=True)("to be [MASK] not").input_ids
    before, after = tokenizer.encode("to be").ids[:-1], tokenizer.encode(" not").ids[1:]
    assert ids == [*before, vocabulary["[MASK]"], *after]
    assert vocabulary["[MASK]"] not in tokenizer.encode("to be [MASK] not").ids


def test_fill_mask(model: Bert, tokenizer: Tokenizer, vocabulary: Vocabulary, folder: Path) -> None:
    fill: Any = pipeline("fill-mask", model=str(folder), device="cpu")
    found = fill("to be [MASK] not", top_k=5)
    ids = [*tokenizer.encode("to be").ids[:-1], vocabulary["[MASK]"], *tokenizer.encode(" not").ids[1:]]
    logits = ours(model, torch.tensor([ids]), Subnetwork.full(LAYERS))[0, ids.index(vocabulary["[MASK]"])]
    assert [entry["token"] for entry in found] == logits.topk(5).indices.tolist()


@pytest.mark.parametrize(
    ("subnetwork", "sentence"),
    [
        (Subnetwork((1.0, 0.5, 1.0, 1.0, 1.0)), r"layer 2 .*0\.5.* 1 "),
        (Subnetwork((1.0,) * 5, heads=((0, 2),) * 5), "layer 1 .*2 of 4 heads"),
        (Subnetwork((1.0,) * 5, parts=((0, 1, 2),) * 5), "layer 1 .*3 of 4 MLP parts"),
        (Subnetwork((1.0,) * 5, head_gates=(1.0, 1.0, 0.5, 0.5)), "heads.*gate"),
        (Subnetwork((1.0,) * 5, part_gates=(1.0, 1.0, 0.5, 0.5)), "MLP parts.*gate"),
        (Subnetwork.full(4), "4 layers.* 5"),
    ],
    ids=["whole-layer", "heads", "parts", "head gates", "part gates", "layers"],
)
def test_refused_subnetworks(model: Bert, vocabulary: Vocabulary, subnetwork: Subnetwork, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        to_transformers(model, subnetwork, vocabulary)


def test_refused_models(model: Bert, vocabulary: Vocabulary) -> None:
    narrow = Bert(replace(model.config, heads=2))
    with pytest.raises(ValueError, match=r"head_size is 4 .*2 heads.*width 16"):
        to_transformers(narrow, Subnetwork.full(LAYERS), vocabulary)
    other = Vocabulary({**vocabulary.ids, "more": vocabulary.size})
    with pytest.raises(ValueError, match=f"{vocabulary.size + 1} tokens.*{vocabulary.size}"):
        to_transformers(model, Subnetwork.full(LAYERS), other)
