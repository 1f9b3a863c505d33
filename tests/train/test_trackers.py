"""Trackers: which numbers they get, that they change nothing of a run, and what happens where one is missing."""

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raptr.data import TokenStore
from raptr.train.config import Config
from raptr.train.loop import pretrain
from raptr.train.run import RunFolder
from raptr.train.trackers.registry import TRACKERS
from tests.train.legs import QUIET, differing, leg


def config(store: TokenStore, tracker: str, **train: Any) -> Config:
    settings = {"steps": 6, "batch": 4, "eval_samples": 4, "eval_every": 3, "log_every": 1, "checkpoint_every": 2}
    return Config.read(
        {
            "model": {"size": "tiny", "layers": 2, "width": 16, "heads": 4, "head_size": 4, "mlp": 16},
            "method": {"name": "full"},
            "data": {"source": str(store.path), "length": 24},
            "train": {**settings, "device": "cpu", "tracker": tracker, **train},
        }
    )


class Refused(Exception):
    """The stub's counterpart of wandb.Error."""


class StubWandB:
    """What the tracker uses of the package wandb; remembers every call."""

    Error = Refused

    def __init__(self) -> None:
        self.starts: list[dict[str, Any]] = []
        self.logged: list[Mapping[str, float]] = []
        self.metrics: list[tuple[str, str]] = []
        self.finished = 0

    def init(self, **settings: Any) -> "StubWandB":
        if settings["mode"] == "online":
            raise Refused("No API key configured.")
        self.starts.append(settings)
        return self

    def Settings(self, **settings: Any) -> SimpleNamespace:
        return SimpleNamespace(**settings)

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, numbers: Mapping[str, float]) -> None:
        self.logged.append(numbers)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StubWandB:
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    stub = StubWandB()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    find_spec = importlib.util.find_spec
    there = importlib.util.find_spec("json")
    monkeypatch.setattr(
        "raptr.train.trackers.registry.find_spec", lambda name: there if name == "wandb" else find_spec(name)
    )
    return stub


def numbers(run: Path) -> list[dict[str, float]]:
    """What metrics.jsonl says, as a tracker should get it."""
    seen = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kind, step = record.pop("kind"), record.pop("step")
        plain = {f"{kind}/{key}": value for key, value in record.items() if isinstance(value, int | float)}
        seen.append({"step": step, **plain})
    return seen


def test_wandb_gets_the_numbers_offline_and_a_resumed_run_keeps_its_id(
    store: TokenStore, tmp_path: Path, wandb: StubWandB
) -> None:
    run = tmp_path / "mine"
    pretrain(config(store, "wandb"), run, until=3, console=QUIET)
    pretrain(config(store, "wandb"), run, console=QUIET)
    assert wandb.logged == numbers(run)
    assert {"train/loss", "train/lr", "train/grad_norm"} <= wandb.logged[1].keys()
    first, second = wandb.starts
    assert first["id"] == second["id"] == (run / "wandb" / "id").read_text()
    assert (first["mode"], first["resume"], first["project"], first["name"]) == ("offline", "allow", "raptr", "mine")
    assert first["dir"] == str(run)
    assert first["config"]["train"]["steps"] == 6
    assert wandb.metrics == [("*", "step")] * 2
    assert wandb.finished == 2
    assert not (run / "tensorboard").exists()


def test_fresh_starts_another_wandb_run(store: TokenStore, tmp_path: Path, wandb: StubWandB) -> None:
    pretrain(config(store, "wandb"), tmp_path / "run", until=3, console=QUIET)
    pretrain(config(store, "wandb"), tmp_path / "run", until=3, fresh=True, console=QUIET)
    assert wandb.starts[0]["id"] != wandb.starts[1]["id"]


def test_the_environment_chooses_wandbs_mode_and_project(
    store: TokenStore, tmp_path: Path, wandb: StubWandB, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_PROJECT", "thesis")
    pretrain(config(store, "wandb"), tmp_path / "run", until=1, console=QUIET)
    assert (wandb.starts[0]["mode"], wandb.starts[0]["project"]) == ("disabled", "thesis")
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ValueError, match=r"train\.tracker is wandb.*No API key"):
        pretrain(config(store, "wandb"), tmp_path / "run", console=QUIET)


def test_a_tracker_changes_nothing_of_the_run_and_may_change_between_starts(
    store: TokenStore, tmp_path: Path, wandb: StubWandB
) -> None:
    _, weights = leg(config(store, "tensorboard"), tmp_path / "whole", store)
    for until, tracker in ((2, "none"), (4, "wandb"), (6, "tensorboard")):
        _, changed = leg(config(store, tracker), tmp_path / "legs", store, until)
    assert differing(weights, changed) == []
    assert [entry["step"] for entry in wandb.logged] == [3, 3, 4]  # trained and evaluated in step 3
    assert (tmp_path / "legs" / "tensorboard").is_dir()
    assert RunFolder(tmp_path / "legs").read().train.tracker == "tensorboard"


def test_none_writes_nothing_but_the_metrics(store: TokenStore, tmp_path: Path) -> None:
    pretrain(config(store, "none"), tmp_path / "run", console=QUIET)
    assert not any((tmp_path / "run" / kind.folder).exists() for kind in TRACKERS.values())
    assert len(numbers(tmp_path / "run")) == 9


def test_a_missing_package_is_named_with_its_extra_before_anything_is_removed(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(config(store, "none"), tmp_path / "run", until=2, console=QUIET)
    monkeypatch.setattr("raptr.train.trackers.registry.find_spec", lambda name: None)
    for fresh in (False, True):
        with pytest.raises(ValueError, match=r"train\.tracker is wandb.*pip install '\.\[wandb\]'"):
            pretrain(config(store, "wandb"), tmp_path / "run", fresh=fresh, console=QUIET)
    assert len(numbers(tmp_path / "run")) == 3
    assert pretrain(config(store, "none"), tmp_path / "run", console=QUIET).step == 6


def test_a_finished_run_needs_no_tracker(store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretrain(config(store, "none"), tmp_path / "run", console=QUIET)
    monkeypatch.setattr("raptr.train.trackers.registry.find_spec", lambda name: None)
    assert pretrain(config(store, "wandb"), tmp_path / "run", console=QUIET).step == 6


def test_an_unknown_tracker_is_refused(store: TokenStore) -> None:
    with pytest.raises(ValueError, match=r"train\.tracker is 'wandbb'.*'wandb'.*tensorboard"):
        config(store, "wandbb")


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the package wandb")
def test_the_real_wandb_keeps_its_files_in_the_run(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    for until in (3, 6):
        pretrain(config(store, "wandb"), run, until=until, console=QUIET)
    identity = (run / "wandb" / "id").read_text()
    kept = [path for path in (run / "wandb").iterdir() if path.name.startswith("offline-run-")]
    assert kept
    assert all(path.name.endswith(identity) for path in kept)
    assert all(list(path.glob("*.wandb")) for path in kept)
