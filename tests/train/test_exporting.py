"""From a run folder to an export: which checkpoint, which layers, which folder, and what is refused."""

import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaPreLayerNormForMaskedLM,
)

from raptr.data import TokenStore
from raptr.data.tokenizer import BERT
from raptr.models.bert.model import Bert
from raptr.subnetworks import Subnetwork
from raptr.train import checkpoint
from raptr.train.config import Config
from raptr.train.exporting import export, export_trained, exported_step, judged, spread
from raptr.train.loop import pretrain
from tests.walks import hidden

QUIET = Console(quiet=True)
STEPS, LAYERS, LENGTH = 8, 6, 16


def settings(store: TokenStore, method: dict[str, Any] | None = None) -> Config:
    return Config.read(
        {
            "model": {"size": "tiny", "layers": LAYERS, "width": 16, "heads": 4, "head_size": 4, "mlp": 16},
            "method": method or {"name": "raptr", "scaling": "sqrt"},
            "data": {"source": str(store.path), "length": LENGTH, "vocabulary": 600},
            "optimizer": {"peak": 0.01, "warmup": 3},
            "train": {"steps": STEPS, "batch": 4, "eval_samples": 8, "checkpoint_every": 4, "device": "cpu"},
        }
    )


@pytest.fixture(scope="module")
def trained(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "hamlet"
    pretrain(settings(store), run, console=QUIET)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, to be written to."""
    return shutil.copytree(trained, tmp_path / "hamlet")


def our_model(run: Path, store: TokenStore, step: int) -> Bert:
    """The model of a checkpoint, filled tensor by tensor from its safetensors."""
    stored: dict[str, Tensor] = {}
    for file in (run / "checkpoints" / f"step-{step}").glob("*.safetensors"):
        stored |= load_file(file)
    model = settings(store).model.build(store.vocabulary.size, LENGTH).build(seed=0).eval()
    assert isinstance(model, Bert)
    model.load_state_dict({name: stored[f"model.{name}"] for name, _ in model.named_parameters()})
    return model


@torch.no_grad()
def assert_same_model(folder: Path, model: Bert, subnetwork: Subnetwork) -> None:
    auto: Any = AutoModelForMaskedLM
    stock = auto.from_pretrained(folder, local_files_only=True)
    tokens = torch.arange(len(BERT.tokens), len(BERT.tokens) + LENGTH).repeat(2, 1)
    theirs = stock.roberta_prelayernorm(input_ids=tokens).last_hidden_state
    assert stock.config.num_hidden_layers == subnetwork.size
    torch.testing.assert_close(theirs, hidden(model, tokens, subnetwork), atol=1e-5, rtol=0)


def test_export_of_the_newest_checkpoint(run: Path, store: TokenStore) -> None:
    folder = export(run)
    assert folder == run / "export"
    assert_same_model(folder, our_model(run, store, STEPS), Subnetwork.full(LAYERS))
    auto: Any = AutoTokenizer
    text = "tos being or noted"
    assert auto.from_pretrained(folder, local_files_only=True)(text).input_ids == store.tokenizer().encode(text).ids
    files = {path.name for path in folder.iterdir()}
    assert files == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert not [path for path in run.iterdir() if path.name.startswith(".export")]


def test_a_checkpoint_that_training_removes_meanwhile(
    run: Path, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, read = run / "checkpoints", checkpoint.Checkpoint.read
    shutil.move(place / "step-8", tmp_path / "step-8")

    def overtaken(self: checkpoint.Checkpoint, *arguments: Any) -> None:
        if self.step == 4:
            shutil.copytree(tmp_path / "step-8", place / "step-8")
            shutil.rmtree(self.path)
        read(self, *arguments)

    monkeypatch.setattr(checkpoint.Checkpoint, "read", overtaken)
    shutil.copytree(place / "step-4", tmp_path / "step-4")
    assert_same_model(export(run), our_model(run, store, 8), Subnetwork.full(LAYERS))
    shutil.move(tmp_path / "step-4", place / "step-4")
    shutil.rmtree(place / "step-8")
    with pytest.raises(ValueError, match="step is 4; allowed, since they have a checkpoint: 8"):
        export(run, step=4)

    def always(self: checkpoint.Checkpoint, *arguments: Any) -> None:
        self.path.rename(checkpoint.place_of(place, self.step + 1))
        read(self, *arguments)

    monkeypatch.setattr(checkpoint.Checkpoint, "read", always)
    with pytest.raises(ValueError, match=r"hamlet', which is being trained .* larger train\.keep"):
        export(run)


def test_export_of_an_earlier_step_and_of_a_part(run: Path, store: TokenStore) -> None:
    assert export(run, step=4) == run / "export-step-4"
    assert_same_model(run / "export-step-4", our_model(run, store, 4), Subnetwork.full(LAYERS))
    assert export(run, layers=3) == run / "export-3-layers"
    part = Subnetwork((1.0, 0.0, 0.0, 1.0, 0.0, 1.0))
    assert_same_model(run / "export-3-layers", our_model(run, store, STEPS), part)


def test_card_has_the_numbers_of_the_run(run: Path) -> None:
    found = checkpoint.load_latest(run / "checkpoints")
    assert found is not None
    text = (export(run) / "README.md").read_text()
    assert yaml.safe_load(text.split("---")[1])["library_name"] == "transformers"
    for line in (
        "# hamlet",
        "| layers | 6 |",
        "| attention heads | 4, each of size 4 |",
        "| training method | raptr (schedule 3-4-5-6, scaling sqrt) |",
        "| training steps | 8 of 8, each on 4 sequences of 16 tokens |",
    ):
        assert f"\n{line}" in text
    assert f"| held-out loss | {found.state['eval_loss']:.4f} nats per masked token" in text
    part = (export(run, layers=2) / "README.md").read_text()
    assert "\n| layers | 2 of the trained model's 6: 1, 6 |" in part
    assert "this part was not measured" in part
    assert "this part was not measured" not in text


def test_the_code_of_the_card_runs(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = export(run)
    monkeypatch.chdir(folder)
    exec((folder / "README.md").read_text().split("```")[1].removeprefix("python\n"), {})
    assert "token_str" in capsys.readouterr().out


def test_the_card_says_that_bert_is_another_class(run: Path, store: TokenStore) -> None:
    folder = export(run)
    text = (folder / "README.md").read_text()
    assert "BertForMaskedLM" in text
    assert f"`{RobertaPreLayerNormForMaskedLM.__name__}`" in text
    stock: Any = RobertaPreLayerNormForMaskedLM
    words = stock.from_pretrained(folder).roberta_prelayernorm.embeddings.word_embeddings.weight
    assert torch.equal(words, our_model(run, store, STEPS).tokens.weight)
    # What the card warns of: no error, and none of the weights.
    bert: Any = BertForMaskedLM
    assert not torch.equal(bert.from_pretrained(folder).bert.embeddings.word_embeddings.weight, words)


def test_another_tokenizer_is_refused(run: Path, store: TokenStore) -> None:
    file = run / "tokenizer.json"
    original = file.read_bytes()
    described = json.loads(original)
    described["model"]["merges"].reverse()
    file.write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the tokenizer.*sha256"):
        export(run)
    assert not (run / "export").exists()
    # A checkpoint of an earlier version does not say which tokenizer it was.
    found = checkpoint.load(run / "checkpoints", STEPS)
    tensors = {name: tensor for part in found.path.glob("*.safetensors") for name, tensor in load_file(part).items()}
    older = {key: value for key, value in found.state.items() if key != "tokenizer"}
    checkpoint.save(run / "checkpoints", STEPS, tensors, older, keep=None)
    file.write_bytes(original)
    assert_same_model(export(run), our_model(run, store, STEPS), Subnetwork.full(LAYERS))


@pytest.mark.parametrize("full_at", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_full_disk_is_named_and_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch, full_at: str) -> None:
    before = {path.name for path in run.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    owner: Any = PreTrainedTokenizerFast if full_at == "tokenizer.json" else PreTrainedModel
    original = owner.save_pretrained

    def on_a_full_disk(*args: Any, **kwargs: Any) -> None:
        # No file may be larger than this, so that the first larger one fails as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000 if full_at == "model.safetensors" else 20, limits[1]))
        original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, "save_pretrained", on_a_full_disk)
        try:
            with pytest.raises(OSError, match=r"could not be written.*'.*/hamlet/export'") as raised:
                export(run)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(run / "export")
    assert {path.name for path in run.iterdir()} == before
    export(run)


def test_an_earlier_export_is_replaced(run: Path, store: TokenStore) -> None:
    place = run / "there" / "model"
    assert export(run, place, step=4) == place
    export(run, place)
    assert_same_model(place, our_model(run, store, STEPS), Subnetwork.full(LAYERS))
    assert [path.name for path in place.parent.iterdir()] == ["model"]


def test_other_things_are_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.md").write_text("one")
    with pytest.raises(ValueError, match=r"out is '.*thesis'.*chapter.md"):
        export(run, tmp_path / "thesis")
    with pytest.raises(ValueError, match=r"out is '\.'; a folder with a name"):
        export(run, Path())
    with pytest.raises(ValueError, match=r"out is '.*config.yaml', a file"):
        export(run, run / "config.yaml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hamlet", "thesis"]
    assert (tmp_path / "thesis" / "chapter.md").read_text() == "one"


def test_a_folder_that_cannot_be_made_is_named(run: Path) -> None:
    (run / "note.txt").write_text("a file")
    with pytest.raises(OSError, match=r"could not be written.*note\.txt/model'"):
        export(run, run / "note.txt" / "model")


def test_an_interrupted_export_leaves_the_earlier_one(
    run: Path, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = export(run, step=4, out=run / "export")
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if Path(source).name.endswith(".partial"):
            raise OSError("the disk is gone")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            export(run)
    assert_same_model(place, our_model(run, store, 4), Subnetwork.full(LAYERS))
    # as a kill between the two renames would leave it
    os.rename(place, run / ".export.replaced")
    (run / ".export.partial").mkdir()
    export(run)
    assert_same_model(place, our_model(run, store, STEPS), Subnetwork.full(LAYERS))
    assert not [path for path in run.iterdir() if path.name.startswith(".export")]


def test_spread_takes_the_first_the_last_and_even_gaps() -> None:
    kept = {count: spread(count, 12).kept for count in range(1, 13)}
    assert kept[1] == (0,)
    assert kept[2] == (0, 11)
    assert kept[3] == (0, 6, 11)
    assert kept[8] == (0, 2, 3, 5, 6, 8, 9, 11)
    assert [len(layers) for layers in kept.values()] == list(range(1, 13))
    assert spread(12, 12) == Subnetwork.full(12)


def test_scales_that_no_stock_model_has(store: TokenStore) -> None:
    config = settings(store, {"name": "raptr", "schedule": "3-6"})
    method = config.make_method()
    assert judged(method, STEPS) == Subnetwork.full(LAYERS)
    with pytest.raises(ValueError, match=r"2 of 8 steps.* raptr .*0\.25"):
        judged(method, 2)
    config = settings(store, {"name": "raptr", "scaled": "branches", "schedule": "3-6"})
    assert judged(config.make_method(), 2).scales[1] == 0.25


def test_refusals(run: Path, store: TokenStore, tmp_path: Path) -> None:
    for count in (0, LAYERS + 1):
        with pytest.raises(ValueError, match=f"layers is {count}.* 1 to 6"):
            export(run, layers=count)
    with pytest.raises(ValueError, match=r"step is 5.*4, 8"):
        export(run, step=5)
    with pytest.raises(ValueError, match=r"nothing.*config.yaml"):
        export(tmp_path / "nothing")
    (run / "checkpoints" / "step-4" / checkpoint.STATE).write_text("{}")
    with pytest.raises(ValueError, match=r"step-4.*damaged.*state.json"):
        export(run, step=4)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match=r"hamlet.*no checkpoint"):
        export(run)
    assert not [path for path in run.iterdir() if "export" in path.name]


def test_export_of_a_model_in_memory(store: TokenStore, tmp_path: Path) -> None:
    model = settings(store).model.build(store.vocabulary.size, LENGTH).build(seed=5).eval()
    part = Subnetwork((0.5, 0.0, 1.0, 0.0, 0.0, 2.0), scaled="branches")
    folder = export_trained(model, part, store.path / "tokenizer.json", tmp_path / "deep" / "out", "a card\n", 7)
    assert exported_step(folder) == 7
    assert isinstance(model, Bert)
    assert_same_model(folder, model, part)
    assert (folder / "README.md").read_text() == "a card\n"
