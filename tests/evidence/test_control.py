"""The control: a plain loop over a stock model comes to what our loop comes to, from the same initial weights."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from evidence import control
from raptr import compare
from raptr.data import TokenStore
from raptr.data.tokenizer import Vocabulary
from raptr.models.bert.config import BertConfig
from raptr.models.bert.export import to_transformers as to_bert
from raptr.models.bert.model import Bert
from raptr.models.decoder.config import DecoderConfig
from raptr.models.decoder.export import to_transformers as to_llama
from raptr.models.decoder.model import Decoder
from raptr.subnetworks import Subnetwork
from tests.comparison.tiny import asked

ENTRIES = {
    "raptr": {"name": "raptr"},
    "scaled": {"name": "raptr", "scaling": "sqrt"},
    "growing": {"name": "progressive-stacking"},
}


@pytest.fixture(scope="module")
def records(stores: dict[str, TokenStore], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A comparison of each family."""
    made = {}
    for family, store in stores.items():
        out = tmp_path_factory.mktemp(family)
        file = asked(store, seeds=[0], peaks=[0.01], entries=ENTRIES)
        file["settings"]["model"] |= {"family": family, "init": "bert"}  # the same weights at each depth
        compare(file, out, console=Console(quiet=True))
        made[family] = out / "compare.json"
    return made


@pytest.fixture(scope="module")
def record(records: dict[str, Path]) -> Path:
    return records["bert"]


def exported_bert(size: dict[str, Any], vocabulary: Vocabulary, positions: int) -> Any:
    """Our BERT with its initial weights, as a stock model."""
    dimensions = BertConfig(**dimensions_of(BertConfig, size), vocabulary=vocabulary.size, positions=positions)
    model = to_bert(Bert(dimensions, seed=0), Subnetwork.full(size["layers"]), vocabulary)
    model.roberta_prelayernorm.embeddings.token_type_embeddings.requires_grad_(False)  # ours has no such parameter
    return model


def exported_decoder(size: dict[str, Any], vocabulary: Vocabulary, positions: int) -> Any:
    """Our decoder with its initial weights, as a stock model."""
    dimensions = DecoderConfig(**dimensions_of(DecoderConfig, size), vocabulary=vocabulary.size, positions=positions)
    return to_llama(Decoder(dimensions, seed=0), Subnetwork.full(size["layers"]), vocabulary).train()


def dimensions_of(kind: type[BertConfig] | type[DecoderConfig], size: dict[str, Any]) -> dict[str, Any]:
    return {field.name: size[field.name] for field in fields(kind) if field.name in size}


EXPORTED = {"bert": exported_bert, "decoder": exported_decoder}


@pytest.mark.parametrize("entry", ["full (reduced)", *ENTRIES])
@pytest.mark.parametrize("family", EXPORTED)
def test_both_paths_end_alike_from_the_same_weights(
    family: str,
    entry: str,
    records: dict[str, Path],
    stores: dict[str, TokenStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "stock_model", EXPORTED[family])
    monkeypatch.setattr(control, "draw", lambda *_: None)
    out, data = tmp_path / "new" / "control.json", str(stores[family].path)
    control.main(["--data", data, "--record", str(records[family]), "--entry", entry, "--out", str(out)])
    (result,) = json.loads(out.read_text())
    assert result["loss"] == pytest.approx(result["record"], abs=2e-4)


def test_initial_weights_have_the_standard_deviations_of_the_record(stores: dict[str, TokenStore]) -> None:
    vocabulary = stores["decoder"].vocabulary
    size: dict[str, Any] = {
        "layers": 3,
        "width": 64,
        "heads": 4,
        "head_size": 16,
        "mlp": 96,
        "kv_heads": None,
        "rope_base": 1e4,
    }
    size |= {"family": "decoder", "norm_epsilon": 1e-6, "tied": True}
    ours = Decoder(
        DecoderConfig(**dimensions_of(DecoderConfig, size), vocabulary=vocabulary.size, positions=64, init="fan-in")
    )
    expected = to_llama(ours, Subnetwork.full(3), vocabulary)
    drawn = control.stock_model(size, vocabulary, 64)
    before = [parameter.clone() for parameter in drawn.parameters()]
    control.draw(drawn, "bert", 3)
    assert all(torch.equal(old, new) for old, new in zip(before, drawn.parameters(), strict=True))
    control.draw(drawn, "fan-in", 3)
    for (name, mine), theirs in zip(drawn.named_parameters(), expected.parameters(), strict=True):
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.05), name


def test_the_stock_weights_are_its_own_and_results_are_added(record: Path, store: TokenStore, tmp_path: Path) -> None:
    out = tmp_path / "control.json"
    for _ in range(2):
        control.main(["--data", str(store.path), "--record", str(record), "--entry", "raptr", "--out", str(out)])
    one, two = json.loads(out.read_text())
    assert one["loss"] == two["loss"]
    assert one["loss"] != pytest.approx(one["record"], abs=1e-6)


def test_two_runs_at_once_come_to_what_one_after_the_other_does(
    record: Path, store: TokenStore, tmp_path: Path
) -> None:
    asked = ["--data", str(store.path), "--record", str(record), "--entry", "raptr", "--entry", "full (reduced)"]
    found = []
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.json"
        control.main([*asked, "--jobs", jobs, "--out", str(out)])
        found.append({result["entry"]: result["loss"] for result in json.loads(out.read_text())})
    assert found[0] == found[1]
    assert set(found[0]) == {"raptr", "full (reduced)"}


def test_a_trial_says_how_long_a_run_takes_and_adds_nothing(
    record: Path, store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "control.json"
    options = ["--data", str(store.path), "--record", str(record), "--entry", "raptr", "--out", str(out)]
    control.main([*options, "--trial", "2"])
    assert "step 2 of" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [(["--entry", "nobody"], "nobody"), (["--entry", "raptr", "--record", "gone.json"], "gone.json")],
)
def test_mistakes_are_named(
    options: list[str], told: str, record: Path, store: TokenStore, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        control.main(["--data", str(store.path), "--record", str(record), *options])
    assert told in capsys.readouterr().err


def test_settings_that_the_plain_loop_does_not_know_are_refused(
    record: Path, store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = json.loads(record.read_text())
    changed["configs"]["raptr"]["optimizer"]["name"] = "muon"
    other = tmp_path / "changed.json"
    other.write_text(json.dumps(changed))
    with pytest.raises(SystemExit):
        control.main(["--data", str(store.path), "--record", str(other), "--entry", "raptr"])
    assert "optimizer.name muon" in capsys.readouterr().err
