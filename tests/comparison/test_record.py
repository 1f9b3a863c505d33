"""Comparisons that go on from their record, without the run folders, and records that refuse to mix."""

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from raptr import compare
from raptr.cli import main
from raptr.comparison import Asked, compare_all
from raptr.comparison.record import load_record, read_finished_runs
from raptr.data import TokenStore
from raptr.data.prepare import Document, prepare
from raptr.train.run import environment
from tests.comparison.tiny import Killed, asked, at_step, kill, numbers

QUIET = Console(quiet=True)
STEPS = (8, 6, 8, 8)  # of the runs of a seed: full, reduced, raptr at two rates


def spec(store: TokenStore, **keys: Any) -> dict[str, Any]:
    return asked(store, **{"seeds": [0], **keys})


@pytest.fixture(scope="module")
def whole(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a comparison that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    record = folder / "records" / "tiny.json"
    assert compare(spec(store), folder / "out", record=record, console=QUIET).finished == len(STEPS)
    assert not (folder / "out" / "compare.json").exists()  # there is one record
    assert (folder / "out" / "compare.md").exists()
    return record


def test_a_record_has_what_stands_beside_a_loss(whole: Path, store: TokenStore) -> None:
    found = numbers(whole)
    assert found["data"]["fingerprint"] == store.fingerprint
    unique = sum(found["data"]["tokens"].values())
    for run, steps in zip(found["runs"], STEPS, strict=True):
        assert (run["layers"], run["width"], run["seed"], run["steps"]) == (6, 16, 0, steps)
        assert run["tokens"] == steps * 4 * 24
        assert run["tokens_per_weight"] == pytest.approx(run["tokens"] / (6 * (4 * 16 * 16 + 2 * 16 * 16)))
        assert (run["unique_tokens"], run["epochs"]) == (unique, pytest.approx(run["tokens"] / unique))
        assert run["curve"][-1][2] == run["loss"]
        assert {"torch", "commit", "gpu", "processor"} <= set(found["environments"][run["environment"]])


@pytest.mark.parametrize(("step", "finished"), [(4, 0), (8, 1), (17, 2), (29, 3)])
@pytest.mark.parametrize("killed", [True, False])
def test_it_goes_on_from_the_record_alone(
    killed: bool,
    step: int,
    finished: int,
    store: TokenStore,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, record = tmp_path / "out", tmp_path / "tiny.json"
    with monkeypatch.context() as patch:
        if killed:
            at_step(step + 1, kill, patch)
            with pytest.raises(Killed):
                compare(spec(store), out, record=record, console=QUIET)
        else:
            at_step(step, lambda: signal.raise_signal(signal.SIGTERM), patch)
            assert compare(spec(store), out, record=record, console=QUIET).finished == finished
    kept = numbers(record)["runs"] if record.exists() else []
    assert kept == numbers(whole)["runs"][:finished]
    shutil.rmtree(out)
    seen = at_step(-1, kill, monkeypatch)
    assert not compare(spec(store), out, record=record, console=QUIET).stopped
    assert len(seen) == sum(STEPS[finished:])  # nothing that was finished is run again
    assert numbers(record) == numbers(whole)


def test_more_entries_seeds_and_rates_keep_what_is_there_and_fewer_drop_nothing(
    store: TokenStore, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Path(shutil.copy(whole, tmp_path / "tiny.json"))
    seen = at_step(-1, kill, monkeypatch)
    entries = {"full": {"name": "full"}, "all": {"name": "raptr", "schedule": "6-6"}}
    done = compare(spec(store, seeds=[0, 1], entries=entries, peaks=[0.01]), tmp_path / "out", record=record)
    assert (done.finished, done.runs) == (4, 4)  # full of seed 1, all of both; none is cheaper, so none is reduced
    assert len(seen) == 3 * 8
    before, after = numbers(whole), numbers(record)
    assert len(after["runs"]) == 3 + len(STEPS)
    assert all(run in after["runs"] for run in before["runs"])
    assert {row["label"] for row in after["best"]} == {"full", "full (reduced)", "raptr", "all"}


def test_a_run_of_another_record_is_taken_under_its_label_here(
    store: TokenStore, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = at_step(-1, kill, monkeypatch)
    entries = {"mine": {"name": "raptr", "peaks": [0.02]}, "new": {"name": "raptr", "scaling": "sqrt"}}
    asks = Asked(
        spec(store, entries=entries), tmp_path / "out", tmp_path / "tiny.json", (whole, tmp_path / "none.json")
    )
    assert compare_all([asks], console=QUIET)[0].finished == 4
    assert len(seen) == 8  # the new one alone
    taken = {run["label"]: run["loss"] for run in numbers(tmp_path / "tiny.json")["runs"]}
    known = {(run["label"], run["peak"]): run["loss"] for run in numbers(whole)["runs"]}
    assert (taken["full"], taken["mine"]) == (known["full", 0.01], known["raptr", 0.02])


def refusal(given: dict[str, Any], record: Path, tmp_path: Path) -> str:
    before = record.read_bytes()
    with pytest.raises(ValueError) as refused:
        compare(given, tmp_path / "out", record=record, console=QUIET)
    assert record.read_bytes() == before
    return str(refused.value)


def test_a_record_refuses_runs_that_do_not_compare(
    store: TokenStore, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = at_step(-1, kill, monkeypatch)
    record = Path(shutil.copy(whole, tmp_path / "tiny.json"))
    for section, key, value in (("optimizer", "clip", 0.5), ("train", "eval_samples", 4), ("train", "batch", 8)):
        changed = spec(store)
        changed["settings"][section][key] = value
        said = refusal(changed, record, tmp_path)
        assert f"{section}.{key}: was" in said
        assert f"now {value}" in said
    assert "full (reduced): train.steps: was 6, now 4" in refusal(spec(store, flops=0.5), record, tmp_path)
    documents = [Document(f"{i}.txt", f"a different text, number {i * i}. " * 12) for i in range(80)]
    other = prepare(tmp_path / "other", lambda: documents, 600)
    assert f"fingerprint: was {store.fingerprint}, now {other.fingerprint}" in refusal(spec(other), record, tmp_path)
    made = json.loads(record.read_text())
    for config in made["configs"].values():
        config["train"] |= {"device": "cuda", "precision": "bfloat16"}
    record.write_text(json.dumps(made))
    elsewhere = spec(store, seeds=[0, 1])
    elsewhere["settings"]["train"]["device"] = "auto"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "train.precision: was 'bfloat16', now 'float32'" in refusal(elsewhere, record, tmp_path)
    record.write_text('{"runs": 3}')
    assert "tiny.json" in refusal(spec(store), record, tmp_path)
    assert seen == []


def test_a_records_runs_have_their_own_rate_and_seed(whole: Path) -> None:
    record = load_record(whole)
    assert record is not None
    found = [(run.config["optimizer"]["peak"], run.config["train"]["seed"]) for run in read_finished_runs(record)]
    assert found == [(0.01, 0), (0.01, 0), (0.01, 0), (0.02, 0)]


def test_the_command_takes_a_record(
    store: TokenStore,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = Path(shutil.copy(whole, tmp_path / "tiny.json"))
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(spec(store)))
    seen = at_step(-1, kill, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["raptr", "compare", "small.yaml", "--record", "tiny.json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert seen == []
    assert "tiny.json" in capsys.readouterr().err
    assert numbers(record) == numbers(whole)


def test_a_copy_without_history_takes_its_commit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPTR_COMMIT", "0123abc")
    assert environment()["commit"] != "0123abc"  # this checkout knows its own
    monkeypatch.setattr("raptr.train.run._commit", lambda _: None)
    assert environment()["commit"] == "0123abc"
    monkeypatch.delenv("RAPTR_COMMIT")
    assert environment()["commit"] is None
