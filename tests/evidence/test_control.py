"""The control: a plain loop over a stock model comes to what our loop comes to, from the same initial weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evidence import control
from raptr import compare
from raptr.data import TokenStore
from raptr.data.tokenizer import Vocabulary
from raptr.models.bert.config import BertConfig
from raptr.models.bert.export import to_transformers
from raptr.models.bert.model import Bert
from raptr.subnetworks import Subnetwork
from tests.comparison.tiny import asked


@pytest.fixture(scope="module")
def record(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compared")
    entries = {"raptr": {"name": "raptr"}, "scaled": {"name": "raptr", "scaling": "sqrt"}}
    entries["growing"] = {"name": "progressive-stacking"}
    compare(asked(store, seeds=[0], peaks=[0.01], entries=entries), out, console=Console(quiet=True))
    return out / "compare.json"


@pytest.mark.parametrize("entry", ["full (reduced)", "raptr", "scaled", "growing"])
def test_both_paths_end_alike_from_the_same_weights(
    entry: str, record: Path, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ours(size: dict[str, Any], vocabulary: Vocabulary, positions: int) -> Any:
        dimensions = BertConfig(
            **{key: size[key] for key in ("layers", "width", "heads", "head_size", "mlp", "parts")},
            vocabulary=vocabulary.size,
            positions=positions,
        )
        model = to_transformers(Bert(dimensions, seed=0), Subnetwork.full(size["layers"]), vocabulary)
        model.roberta_prelayernorm.embeddings.token_type_embeddings.requires_grad_(False)  # ours has no such parameter
        return model

    monkeypatch.setattr(control, "stock_model", ours)
    out = tmp_path / "new" / "control.json"
    control.main(["--data", str(store.path), "--record", str(record), "--entry", entry, "--out", str(out)])
    (result,) = json.loads(out.read_text())
    assert result["loss"] == pytest.approx(result["record"], abs=2e-4)


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
