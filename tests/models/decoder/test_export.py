"""The exported decoder, loaded from its folder by stock classes, gives the logits and the ids of our own."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, pipeline

from raptr.data.batch import Batch
from raptr.data.prepare import Document, prepare
from raptr.data.tokenizer import load, read_vocabulary
from raptr.models.decoder.config import DecoderConfig
from raptr.models.decoder.export import stock_tokenizer, to_transformers
from raptr.models.decoder.model import Decoder
from raptr.models.export import save
from raptr.objectives.specials import CAUSAL
from raptr.subnetworks import Subnetwork
from raptr.train.config import Config
from raptr.train.loop import pretrain
from tests.train.legs import QUIET
from tests.walks import scores

SENTENCE = "the quick brown fox jumps over the lazy dog while seven old cats sleep in the warm sun. "
LENGTH = 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [Document(f"{i}", SENTENCE * (2 + i % 3)) for i in range(60)]
    folder = tmp_path_factory.mktemp("data") / "store"
    return prepare(folder, lambda: documents, 300, specials=CAUSAL).path


def decoder(data: Path, kv_heads: int | None, *, tied: bool) -> Decoder:
    vocabulary = read_vocabulary(data / "tokenizer.json")
    config = DecoderConfig(
        *(3, 24, 6, 4, 32), vocabulary=vocabulary.size, positions=LENGTH, kv_heads=kv_heads, tied=tied, rope_base=700.0
    )
    model = Decoder(config, seed=1)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.2)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [None, 3, 1])
@pytest.mark.parametrize("part", [(1.0, 1.0, 1.0), (0.5, 0.0, 2.0)])
def test_logits_are_those_of_a_stock_llama(
    data: Path, tmp_path: Path, kv_heads: int | None, tied: bool, part: tuple[float, ...]
) -> None:
    model, subnetwork = decoder(data, kv_heads, tied=tied), Subnetwork(part, scaled="branches")
    vocabulary = read_vocabulary(data / "tokenizer.json")
    exported = to_transformers(model, subnetwork, vocabulary)
    save(exported, stock_tokenizer(data / "tokenizer.json", LENGTH), tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(stock, LlamaForCausalLM)
    assert stock.config.num_hidden_layers == subnetwork.size
    tokens = torch.randint(0, vocabulary.size, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = scores(model, Batch(tokens, None, tokens), subnetwork)
        torch.testing.assert_close(stock(input_ids=tokens).logits, ours, rtol=0, atol=1e-5)


def test_texts_have_the_ids_of_training(data: Path, tmp_path: Path) -> None:
    stock_tokenizer(data / "tokenizer.json", LENGTH).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer(SENTENCE)["input_ids"] == load(data / "tokenizer.json").encode(SENTENCE).ids
    assert tokenizer.decode(tokenizer(SENTENCE)["input_ids"]) == SENTENCE
    assert tokenizer.eos_token == tokenizer.bos_token == "[EOS]"


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Config.read(
        {
            "model": {"family": "decoder", "layers": 2, "width": 32, "heads": 4, "head_size": 8, "mlp": 64},
            "method": {"name": "raptr"},
            "data": {"source": str(data), "length": LENGTH},
            "optimizer": {"peak": 0.01, "warmup": 5},
            "train": {"steps": 120, "batch": 8, "eval_samples": 8, "device": "cpu"},
        }
    )
    run = tmp_path_factory.mktemp("runs") / "fox"
    result = pretrain(config, run, console=QUIET, export=True)
    assert result.model == run / "export"
    return run / "export"


def test_generation_continues_a_sentence_of_the_training_text(trained: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    begun = "the quick brown fox"
    said = generate(begun, max_new_tokens=12, do_sample=False)[0]["generated_text"]
    assert SENTENCE.startswith(said[: len(begun) + 20])


def test_the_card_says_how_to_use_it(trained: Path) -> None:
    card = (trained / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: text-generation" in card
    assert "[S2S]" not in card
    assert "denoisers" not in card
    code = card.split("```python\n")[1].split("```")[0].replace('folder = "."', f"folder = {str(trained)!r}")
    exec(compile(code, "card", "exec"), {})  # as a reader would paste it
