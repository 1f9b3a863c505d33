"""Runs that start from a folder of transformers: the weights are the folder's, and what does not fit is refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormForMaskedLM,
)

from raptr.comparison import compare, read_comparison
from raptr.data import TokenStore, open_store
from raptr.data.prepare import Document, prepare
from raptr.objectives.specials import CAUSAL
from raptr.subnetworks import Subnetwork
from raptr.train.config import Config, merged
from raptr.train.flops import flops
from raptr.train.loop import Trainer, pretrain
from raptr.train.resolve import resolve
from raptr.train.run import RunFolder
from tests.commands import call
from tests.comparison.tiny import Killed, at_step, kill
from tests.train.legs import QUIET, records

LENGTH = 24
SENTENCE = "the quick brown fox jumps over the lazy dog while seven old cats sleep in the warm sun. "
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Data for a decoder."""
    documents = [Document(f"{i}", SENTENCE * (2 + i % 3)) for i in range(60)]
    return prepare(tmp_path_factory.mktemp("data") / "store", lambda: documents, 300, specials=CAUSAL)


def llama(store: TokenStore, folder: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A stock Llama with random weights, in whole or in shards."""
    torch.manual_seed(3)
    shard = changes.pop("max_shard_size", "1GB")
    given: dict[str, Any] = {
        "vocab_size": store.vocabulary.size,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        **changes,
    }
    model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**given))
    model.to(dtype)
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def roberta(store: TokenStore, folder: Path, **changes: Any) -> Path:
    """A stock pre-LN encoder with random weights, two token types and more positions than are needed."""
    torch.manual_seed(3)
    given: dict[str, Any] = {
        "vocab_size": store.vocabulary.size,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 40,
        "layer_norm_eps": 1e-5,
        "pad_token_id": store.vocabulary["[PAD]"],
        "initializer_range": 0.2,
        **changes,
    }
    RobertaPreLayerNormForMaskedLM(RobertaPreLayerNormConfig(**given)).save_pretrained(folder)
    return folder


def settings(start: Path, store: TokenStore, method: str = "full", **model: Any) -> dict[str, Any]:
    return {
        "model": {"start": str(start), **model},
        "method": {"name": method},
        "data": {"source": str(store.path), "length": LENGTH},
        "optimizer": {"peak": 0.01, "warmup": 2},
        "train": {
            "steps": 6,
            "batch": 4,
            "eval_samples": 8,
            "log_every": 1,
            "checkpoint_every": 3,
            "device": "cpu",
            "tracker": "none",
        },
    }


def first_loss(given: dict[str, Any], run: Path) -> float:
    """The loss of the first step's batch, before any update."""
    pretrain(Config.read(given), run, until=1, console=QUIET)
    (loss,) = (record["loss"] for record in records(run) if record["kind"] == "train")
    assert isinstance(loss, float)
    return loss


def stock_loss(given: dict[str, Any], kind: Any, run: Path) -> float:
    """The loss that the stock model has on the same batch."""
    config = Config.read(given)
    store = open_store(Path(given["data"]["source"]))
    batch = Trainer(config, RunFolder(run), store, torch.device("cpu")).batch(0)
    stock = kind.from_pretrained(given["model"]["start"], dtype=torch.float32)
    stock.train(False)
    with torch.no_grad():
        scores = stock(input_ids=batch.tokens_BS).logits
    if batch.positions_BM is not None:
        scores = torch.stack([row[at] for row, at in zip(scores, batch.positions_BM, strict=True)])
    return float(torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch.labels_BM.flatten()))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 6, "rms_norm_eps": 1e-6},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16, "max_shard_size": "4KB"},
    ],
    ids=["gqa", "tied", "mha", "bfloat16", "shards"],
)
def test_a_stock_llama_has_its_loss_at_step_0(text: TokenStore, tmp_path: Path, changes: dict[str, Any]) -> None:
    start = llama(text, tmp_path / "llama", **changes)
    assert len(list(start.glob("*.safetensors"))) == 1 or "max_shard_size" in changes
    given = settings(start, text)
    expected = stock_loss(given, AutoModelForCausalLM, tmp_path / "stock")
    assert first_loss(given, tmp_path / "run") == pytest.approx(expected, abs=1e-5)
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]
    assert (saved["family"], saved["layers"], saved["head_size"], saved["rope_base"]) == ("decoder", 3, 8, 700.0)
    assert saved["norm_epsilon"] == changes.get("rms_norm_eps", 1e-5)
    assert saved["tied"] is changes.get("tie_word_embeddings", False)


def test_a_stock_encoder_has_its_loss_at_step_0(store: TokenStore, tmp_path: Path) -> None:
    given = settings(roberta(store, tmp_path / "stock"), store)
    expected = stock_loss(given, AutoModelForMaskedLM, tmp_path / "other")
    assert first_loss(given, tmp_path / "run") == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", ["bert", "decoder"])
def test_an_export_comes_back_as_it_was(store: TokenStore, text: TokenStore, tmp_path: Path, family: str) -> None:
    data = store if family == "bert" else text
    given = settings(Path("none"), data, method="raptr", family=family, width=16, heads=4, head_size=4, mlp=16)
    del given["model"]["start"]
    exported = pretrain(Config.read(given), tmp_path / "first", console=QUIET, export=True).model
    assert exported is not None
    again = settings(exported, data, method="raptr", family=family)
    again["optimizer"]["peak"] = 1e-30  # the weights stay
    again["optimizer"]["decay"] = 0.0
    back = pretrain(Config.read(again), tmp_path / "second", console=QUIET, export=True).model
    assert back is not None
    before, after = (load_file(folder / "model.safetensors") for folder in (exported, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    facts = [json.loads((folder / "config.json").read_text()) for folder in (exported, back)]
    assert facts[0] == facts[1]
    assert f"| started from | {exported} |" in (back / "README.md").read_text()


def changed(**facts: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))

    return change


def retold(**tensors: torch.Tensor | None) -> Change:
    """Add, replace or remove tensors, whose dots are written as two lines."""

    def change(folder: Path) -> None:
        named = {**load_file(folder / "model.safetensors"), **{k.replace("__", "."): v for k, v in tensors.items()}}
        save_file({name: value for name, value in named.items() if value is not None}, folder / "model.safetensors")

    return change


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def torn(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without_a_shard(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    places = {"model.norm.weight": "model-00001-of-00002.safetensors", "lm_head.weight": "model-00002-of-00002"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(architectures=["MistralForCausalLM"]), "MistralForCausalLM.*LlamaForCausalLM.*decoder"),
        (changed(architectures=None), "architectures.*None.*RobertaPreLayerNormForMaskedLM.*bert"),
        (changed(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0}), "rope_type.*linear"),
        (changed(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, rope_parameters=None), "rope_type.*dynamic"),
        (changed(attention_bias=True), "attention_bias.*True.*False"),
        (changed(mlp_bias=True), "mlp_bias.*True.*False"),
        (changed(hidden_act="gelu"), "hidden_act.*gelu.*silu"),
        (changed(quantization_config={"quant_method": "x"}), "quantization_config.*quant_method"),
        (changed(num_hidden_layers="many"), "config.json.*num_hidden_layers.*many"),
        (changed(num_attention_heads=0), r"config\.json"),
        (changed(vocab_size=77), "vocab_size is 77.*300.*--tokenizer"),
        (changed(num_hidden_layers=2), r"model\.layers\.2\."),
        (changed(num_hidden_layers=4), r"lack model\.layers\.3\."),
        (changed(intermediate_size=16), r"gate_proj.*\(32, 24\).*\(16, 24\)"),
        (retold(lm_head__weight=None), "lack lm_head.weight"),
        (retold(model__norm__weight=torch.ones(24, dtype=torch.int64)), "model.norm.weight.*int64"),
        (retold(model__norm__bias=torch.ones(24)), "model.norm.bias"),
        (pickled, r"pytorch_model\.bin.*model\.safetensors"),
        (torn, r"model\.safetensors"),
        (without_a_shard, "model-00002-of-00002"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no weights.*model\.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json.*JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json.*mapping"),
        (shutil.rmtree, "model.start.*llama"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(text: TokenStore, tmp_path: Path, change: Change, message: str) -> None:
    start = llama(text, tmp_path / "llama")
    change(start)
    with pytest.raises(ValueError, match=message):
        pretrain(Config.read(settings(start, text)), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(layer_norm_eps=1e-12), "layer_norm_eps.*1e-12.*1e-05"),
        (changed(hidden_act="relu"), "hidden_act.*relu.*gelu"),
        (changed(tie_word_embeddings=False), "tie_word_embeddings.*False.*True"),
        (changed(is_decoder=True), "is_decoder.*True.*False"),
        (changed(pad_token_id=None), "pad_token_id.*None"),
        (changed(max_position_embeddings=20), "data.length is 24.*19"),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused(
    store: TokenStore, tmp_path: Path, change: Change, message: str
) -> None:
    start = roberta(store, tmp_path / "roberta")
    change(start)
    with pytest.raises(ValueError, match=message):
        pretrain(Config.read(settings(start, store)), tmp_path / "run", console=QUIET)


def test_another_class_is_refused_with_those_that_are_allowed(text: TokenStore, tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*RobertaPreLayerNormForMaskedLM.*LlamaForCausalLM"):
        Config.read(settings(tmp_path, text))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"family": "bert"}, "model.family is 'bert'.*'decoder'"),
        ({"layers": 4}, "model.layers is 4.*is 3"),
        ({"width": 32}, "model.width is 32.*is 24"),
        ({"heads": 2}, "model.heads is 2.*is 6"),
        ({"head_size": 4}, "model.head_size is 4.*is 8"),
        ({"kv_heads": 3}, "model.kv_heads is 3.*is 2"),
        ({"mlp": 64}, "model.mlp is 64.*is 32"),
        ({"tied": True}, "model.tied is True.*is False"),
        ({"rope_base": 10_000.0}, "model.rope_base is 10000.0.*is 700.0"),
        ({"norm_epsilon": "1e-6"}, "model.norm_epsilon is 1e-06.*is 1e-05"),
        ({"residual_multiplier": 0.5}, "model.residual_multiplier is 0.5.*is 1.0"),
        ({"norm_scaling": True}, "model.norm_scaling is True.*is False"),
        ({"size": "mini"}, "model.size is 'mini'.*layers is 12.*is 3"),
        ({"size": "huge"}, "model.size is 'huge'.*100m"),
        ({"breadth": 3}, "model.breadth"),
        ({"start_sha256": "0" * 64, "layers": 3}, "0000"),
    ],
)
def test_settings_that_differ_from_the_folder_are_refused(
    text: TokenStore, tmp_path: Path, model: dict[str, Any], message: str
) -> None:
    start = llama(text, tmp_path / "llama")
    with pytest.raises(ValueError, match=message):
        pretrain(Config.read(settings(start, text, **{"family": "decoder", **model})), tmp_path / "run", console=QUIET)


def test_settings_that_say_what_the_folder_says_are_taken(text: TokenStore, tmp_path: Path) -> None:
    start = llama(text, tmp_path / "llama", num_key_value_heads=6)
    config = Config.read(settings(start, text, layers=3, kv_heads=6, heads=6, parts=2, dropout=0.1))
    saved = config.mapping()
    assert saved["model"]["parts"] == 2
    assert saved["model"]["kv_heads"] is None
    shutil.rmtree(start)
    assert Config.read(saved).mapping() == saved  # with a checksum, the folder is not read


def test_settings_that_were_changed_after_the_folder_was_read_are_refused(text: TokenStore, tmp_path: Path) -> None:
    start = llama(text, tmp_path / "llama")
    saved = Config.read(settings(start, text)).mapping()
    saved["model"]["rope_base"] = 900.0  # no tensor's shape tells
    with pytest.raises(ValueError, match=r"model.rope_base is 900.0.*is 700.0"):
        pretrain(Config.read(saved), tmp_path / "run", console=QUIET)
    changed(rms_norm_eps=1e-3)(start)
    with pytest.raises(ValueError, match=r"model.norm_epsilon is 1e-05.*is 0.001"):
        pretrain(
            Config.read({**saved, "model": {**saved["model"], "rope_base": 700.0}}), tmp_path / "run", console=QUIET
        )


@pytest.mark.parametrize("method", ["stacking", "msg"])
def test_methods_that_grow_are_refused_by_name(text: TokenStore, tmp_path: Path, method: str) -> None:
    with pytest.raises(ValueError, match=f"method.name is '{method}'.*model.start"):
        Config.read(settings(llama(text, tmp_path / "llama"), text, method=method))


def test_text_for_another_objective_is_prepared_with_the_tokenizer_of_the_folder(
    text: TokenStore, tmp_path: Path
) -> None:
    start = llama(text, tmp_path / "llama")
    documents = [Document(f"{i}", f"text number {i} says {i * i} and no more") for i in range(50)]
    other = prepare(tmp_path / "store", lambda: documents, 300)
    with pytest.raises(ValueError, match=rf"prepared for mlm.*--objective causal --tokenizer {start}\.$"):
        pretrain(Config.read(settings(start, other)), tmp_path / "run", console=QUIET)


def test_another_tokenizer_is_refused(text: TokenStore, tmp_path: Path) -> None:
    start = llama(text, tmp_path / "llama")
    tokenizer = json.loads((text.path / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    one, two = list(ids)[-2:]
    ids[one], ids[two] = ids[two], ids[one]
    tokenizer["model"]["merges"] = []
    (start / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"tokenizer.*--tokenizer"):
        pretrain(Config.read(settings(start, text)), tmp_path / "run", console=QUIET)
    shutil.copy(text.path / "tokenizer.json", start)
    pretrain(Config.read(settings(start, text)), tmp_path / "run", until=1, console=QUIET)


def test_a_run_that_is_replaced_stays_where_the_start_does_not_fit(text: TokenStore, tmp_path: Path) -> None:
    start = llama(text, tmp_path / "llama")
    pretrain(Config.read(settings(start, text)), tmp_path / "run", until=3, console=QUIET)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    changed(vocab_size=77)(start)
    with pytest.raises(ValueError, match="vocab_size"):
        pretrain(Config.read(settings(start, text)), tmp_path / "run", fresh=True, console=QUIET)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def options(start: Path, store: TokenStore, run: Path) -> list[str]:
    given = settings(start, store)
    sets = [f"{section}.{key}={value}" for section in ("optimizer", "train") for key, value in given[section].items()]
    flags = [flag for entry in sets for flag in ("--set", entry)]
    data = ["--data", str(store.path), "--length", str(LENGTH), "--method", "raptr"]
    return ["pretrain", "--init", str(start), "--run", str(run), *data, *flags]


def test_other_text_is_prepared_with_the_tokenizer_of_the_folder(
    monkeypatch: pytest.MonkeyPatch, text: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tmp_path / "first"
    exported = pretrain(Config.read(settings(llama(text, tmp_path / "llama"), text)), first, console=QUIET, export=True)
    assert exported.model is not None
    (tmp_path / "other.txt").write_text(
        "\n\n".join([f"{n} brown dogs sleep while the sun is warm. " * 5 for n in range(50)])
    )
    prepared = ["prepare", "--data", str(tmp_path / "other.txt"), "--objective", "causal", "--out"]
    assert call(monkeypatch, *prepared, str(tmp_path / "own"), "--vocabulary", "300") == 0
    assert call(monkeypatch, *prepared, str(tmp_path / "fits"), "--tokenizer", str(exported.model)) == 0
    capsys.readouterr()
    assert call(monkeypatch, *options(exported.model, open_store(tmp_path / "own"), tmp_path / "run")) == 2
    assert f"--tokenizer {exported.model}" in capsys.readouterr().err
    assert call(monkeypatch, *options(exported.model, open_store(tmp_path / "fits"), tmp_path / "run")) == 0


def test_the_command_goes_on_after_the_folder_is_gone(
    monkeypatch: pytest.MonkeyPatch, text: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = llama(text, tmp_path / "llama", num_hidden_layers=4)
    assert call(monkeypatch, *options(start, text, tmp_path / "whole")) == 0
    command = options(start, text, tmp_path / "run")
    assert call(monkeypatch, *command, "--until", "4") == 0
    shutil.rmtree(start)
    capsys.readouterr()
    assert call(monkeypatch, *command, "--set", "model.layers=5") == 2
    assert "model.layers: was 4, now 5" in capsys.readouterr().err
    assert call(monkeypatch, *command) == 0
    assert "from step 4 of 6" in capsys.readouterr().err
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert call(monkeypatch, *command, "--fresh") == 2  # would need the folder
    assert "model.start" in capsys.readouterr().err
    assert (tmp_path / "run" / "export").exists()


def test_a_run_killed_before_its_first_checkpoint_starts_from_the_folder_again(
    monkeypatch: pytest.MonkeyPatch, text: TokenStore, tmp_path: Path
) -> None:
    start = llama(text, tmp_path / "llama")
    config = Config.read(settings(start, text))
    pretrain(config, tmp_path / "whole", console=QUIET)
    for step in (2, 5):  # without a checkpoint, and with one
        with monkeypatch.context() as patched:
            at_step(step, kill, patched)
            with pytest.raises(Killed):
                pretrain(config, tmp_path / "run", console=QUIET)
        if step == 2:
            start.rename(tmp_path / "away")
            with pytest.raises(ValueError, match=r"model.start"):
                pretrain(config, tmp_path / "run", console=QUIET)
            (tmp_path / "away").rename(start)
    shutil.rmtree(start)
    pretrain(config, tmp_path / "run", console=QUIET)
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_the_path_may_change_between_starts_and_the_weights_may_not(text: TokenStore, tmp_path: Path) -> None:
    start = llama(text, tmp_path / "llama")
    pretrain(Config.read(settings(start, text)), tmp_path / "run", until=3, console=QUIET)
    moved = start.rename(tmp_path / "moved")
    pretrain(Config.read(settings(moved, text)), tmp_path / "run", until=4, console=QUIET)
    retold(model__norm__weight=torch.full((24,), 2.0))(moved)
    with pytest.raises(ValueError, match=r"model.start_sha256: was"):
        pretrain(Config.read(settings(moved, text)), tmp_path / "run", console=QUIET)


def test_a_plan_counts_the_model_in_the_folder(
    text: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = llama(text, tmp_path / "llama")
    asked = ["plan", "2-3", "--batch", "2", "--length", str(LENGTH), "--steps", "10", "--json"]
    assert call(monkeypatch, *asked, "--set", f"model.start={start}") == 0
    planned = json.loads(capsys.readouterr().out)
    config = Config.read(settings(start, text))
    dimensions = config.model.build(text.vocabulary.size, LENGTH)
    step = flops(dimensions, Subnetwork.full(3), sequences=2, length=LENGTH, targets=config.objective.targets(LENGTH))
    assert (planned["layers"], planned["full_flops"]) == (3, 10 * step.total)
    assert call(monkeypatch, *asked, "--set", f"model.start={start}", "--size", "100m") == 2
    assert re.search(r"model\.size is '100m'.*llama", capsys.readouterr().err)


def test_a_start_replaces_the_dimensions_that_were_given_before(text: TokenStore, tmp_path: Path) -> None:
    start, other = llama(text, tmp_path / "one"), llama(text, tmp_path / "two", num_hidden_layers=2)
    begun = Config.read(settings(start, text)).mapping()
    assert resolve("demo", None, {"model.start": str(start)}, []).model.family == "decoder"
    later = Config.read(merged(begun, {"model": {"start": str(other)}}))
    assert later.mapping()["model"]["layers"] == 2
    with pytest.raises(ValueError, match=r"model.size is 'small'"):
        Config.read(merged(begun, {"model": {"size": "small"}}))
    with pytest.raises(ValueError, match=r"model.family is 'bert'"):
        Config.read(merged(begun, {"model": {"family": "bert"}}))
    with pytest.raises(ValueError, match=r"model.width is 16"):
        Config.read(merged(begun, {"model": {"width": 16}}))
    with pytest.raises(ValueError, match=r"model.start_sha256 is 'x'"):
        Config.read({"model": {"start_sha256": "x"}, "train": {"steps": 2}})


def test_a_comparison_starts_all_entries_from_the_folder(text: TokenStore, tmp_path: Path) -> None:
    given = settings(llama(text, tmp_path / "llama"), text)
    del given["method"]
    given["optimizer"] = {"warmup": 2}
    spec = {"recipe": "demo", "settings": given, "peaks": [0.01]}
    done = compare({**spec, "entries": {"raptr": {"name": "raptr"}}}, tmp_path / "out", console=QUIET)
    assert done.finished == done.runs >= 2
    pretrain(Config.read(settings(tmp_path / "llama", text)), tmp_path / "alone", until=1, console=QUIET)
    expected = records(tmp_path / "alone")[0]
    firsts = [records(path.parent)[0] for path in (tmp_path / "out").rglob("full*/metrics.jsonl")]
    assert len(firsts) == 2  # full training, and the reduced one
    assert [first["loss"] for first in firsts] == [expected["loss"]] * 2
    with pytest.raises(ValueError, match=r"entries.msg.*model\.start"):
        read_comparison({**spec, "entries": {"msg": {"name": "msg"}}})
