"""Nothing is corrupted and nothing hangs: a signal to one process, processes that disagree, one that is lost."""

import json
from pathlib import Path
from typing import Any

import pytest

from raptr.data import TokenStore
from raptr.train import checkpoint
from tests.distributed.faults import AT
from tests.distributed.launching import launch


@pytest.fixture(scope="module")
def folder(stores: dict[str, TokenStore], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("faults")
    (place / "bert").symlink_to(stores["bert"].path, target_is_directory=True)
    launch(2, "tests.distributed.faults", place)
    return place


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]


def test_a_signal_to_one_process_stops_all_after_the_same_step(folder: Path, seen: list[dict[str, Any]]) -> None:
    ends = [one["signal"] for one in seen]
    assert ends[0] == ends[1]
    assert ends[0]["stopped"]
    assert AT < ends[0]["step"] <= AT + 2
    assert checkpoint.steps(folder / "signal" / "checkpoints") == [ends[0]["step"]]


def test_processes_that_would_run_different_layers_stop_before_the_step(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["disagreement"]["error"] == "Disagreement"
        assert f"the subnetwork of step {AT}" in one["disagreement"]["message"]


def test_processes_with_other_settings_do_not_begin(folder: Path, seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["settings"]["error"] == "Disagreement"
        assert "the settings" in one["settings"]["message"]
    assert not (folder / "settings").exists()


def test_a_checkpoint_that_one_process_cannot_write_is_nobodys(folder: Path, seen: list[dict[str, Any]]) -> None:
    assert seen[1]["full disk"]["error"] == "OSError"
    assert seen[0]["full disk"]["error"] == "Elsewhere"
    assert "process 1" in seen[0]["full disk"]["message"]
    assert "No space left" in seen[0]["full disk"]["message"]
    assert list((folder / "full" / "checkpoints").iterdir()) == []


def test_a_process_that_hangs_is_noticed(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["hang"]["error"] == "Lost"
    assert "process 0 of 2" in seen[0]["hang"]["message"]
