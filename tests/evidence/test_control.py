"""The control: a plain loop over a stock model comes to what our loop comes to, from the same initial weights."""

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
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
from raptr.train.config import Config
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


def exported(size: dict[str, Any], vocabulary: Vocabulary, positions: int) -> Any:
    """The control's own stock model, with our initial weights."""
    kind: type[BertConfig] | type[DecoderConfig] = DecoderConfig if size["family"] == "decoder" else BertConfig
    given = {field.name: size[field.name] for field in fields(kind) if field.name in size}
    config, whole = kind(**given, vocabulary=vocabulary.size, positions=positions), Subnetwork.full(size["layers"])
    model = STOCK(size, vocabulary, positions)
    if isinstance(config, DecoderConfig):
        ours: Any = to_llama(Decoder(config, seed=0), whole, vocabulary)
    else:
        ours = to_bert(Bert(config, seed=0), whole, vocabulary)
    model.load_state_dict(ours.state_dict())
    return model


STOCK = control.stock_model


@pytest.mark.parametrize("entry", ["full (reduced)", *ENTRIES])
@pytest.mark.parametrize("family", ["bert", "decoder"])
def test_both_paths_end_alike_from_the_same_weights(
    family: str,
    entry: str,
    records: dict[str, Path],
    stores: dict[str, TokenStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "stock_model", exported)
    monkeypatch.setattr(control, "draw", lambda *_: None)
    out, data = tmp_path / "new" / "control.json", str(stores[family].path)
    control.main(["--data", data, "--record", str(records[family]), "--entry", entry, "--out", str(out)])
    (result,) = json.loads(out.read_text())
    assert result["loss"] == pytest.approx(result["record"], abs=2e-4)


@pytest.mark.parametrize("family", ["bert", "decoder"])
def test_initial_weights_have_the_standard_deviations_of_the_record(family: str, stores: dict[str, TokenStore]) -> None:
    vocabulary = stores[family].vocabulary
    size = Config.read(
        {"model": {"family": family, "size": "tiny", "layers": 3, "init": "fan-in"}, "train": {"steps": 9}}
    )
    dimensions = {**size.mapping()["model"], "family": family}
    torch.manual_seed(0)
    drawn, expected = STOCK(dimensions, vocabulary, 64), exported(dimensions, vocabulary, 64)
    before = [parameter.clone() for parameter in drawn.parameters()]
    control.draw(drawn, "bert", 3)
    assert all(torch.equal(old, new) for old, new in zip(before, drawn.parameters(), strict=True))
    control.draw(drawn, "fan-in", 3)
    for (name, mine), theirs in zip(drawn.named_parameters(), expected.parameters(), strict=True):
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.1), name


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


def changed(record: Path, path: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """The path of a record in which the configuration of RaPTr is another one."""
    content = json.loads(record.read_text())
    change(content["configs"]["raptr"])
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    "setting",
    ["optimizer.name=muon", "optimizer.clip=0", "model.norm_scaling=true", "model.init=paper", "optimizer.floor=0.1"],
)
def test_settings_that_the_plain_loop_does_not_know_are_refused(
    setting: str, record: Path, store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section, key, value = re.split("[.=]", setting, maxsplit=2)

    def change(config: dict[str, Any]) -> None:
        config[section][key] = yaml.safe_load(value)

    other = changed(record, tmp_path / "changed.json", change)
    with pytest.raises(SystemExit):
        control.main(["--data", str(store.path), "--record", other, "--entry", "raptr"])
    assert f"{section}.{key}" in capsys.readouterr().err


def test_older_records_have_the_defaults_of_newer_settings(record: Path, store: TokenStore, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        del config["model"]["init"], config["model"]["family"], config["objective"], config["optimizer"]["name"]

    out = tmp_path / "control.json"
    for path in (str(record), changed(record, tmp_path / "older.json", change)):
        control.main(["--data", str(store.path), "--record", path, "--entry", "raptr", "--out", str(out)])
    one, two = json.loads(out.read_text())
    assert one["loss"] == two["loss"]


def test_the_records_of_the_documented_commands_can_be_repeated() -> None:
    for name, entries in {
        "evidence/axes-75-6x256": ("depth, idle layers skipped", "full (reduced)"),
        "long": ("raptr, none", "full (reduced)"),
        "evidence/same-steps-12x256": ("full", "progressive stacking, 20-20-60%"),
    }.items():
        configs = json.loads((control.ROOT / f"docs/results/{name}.json").read_text())["configs"]
        assert [control.beyond(Config.read(configs[entry]).mapping()) for entry in entries] == [None, None]
