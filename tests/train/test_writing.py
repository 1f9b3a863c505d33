"""Checkpoints written beside training: the same ones, with the failures of the ones written at once."""

import errno
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from raptr.data import TokenStore
from raptr.train import checkpoint
from raptr.train.loop import Trainer
from tests.train.legs import differing, leg, records
from tests.train.test_growth import STEPS, config

BESIDE = {"train": {"async_checkpoints": True, "checkpoint_every": 2, "keep": 20}}


def test_what_is_written_beside_training_is_the_state_of_its_step(store: TokenStore, tmp_path: Path) -> None:
    method = {"name": "stacking"}
    _, weights = leg(config(store, method), tmp_path / "at once", store)
    leg(config(store, method, BESIDE), tmp_path / "beside", store)
    assert checkpoint.steps(tmp_path / "beside" / "checkpoints") == list(range(2, STEPS + 1, 2))
    for step in (6, 10):  # going on from any of them ends in the same
        run = tmp_path / f"from {step}"
        (run / "checkpoints").mkdir(parents=True)
        for name in ("config.yaml", "environment.json", f"checkpoints/step-{step}"):
            (run / name).symlink_to(tmp_path / "beside" / name)
        _, resumed = leg(config(store, method), run, store)
        assert differing(weights, resumed) == []
    assert records(tmp_path / "beside") == records(tmp_path / "at once")


def test_training_goes_on_while_a_checkpoint_is_written(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, save, optimize = Event(), checkpoint.save, Trainer.optimize

    def saving(folder: Path, step: int, *given: Any, **named: Any) -> Path:
        assert step != 2 or trained.wait(60)
        return save(folder, step, *given, **named)

    def training(trainer: Trainer, *given: Any) -> Any:
        result = optimize(trainer, *given)
        if trainer.step == 3:  # while the checkpoint before it waits
            trained.set()
        return result

    monkeypatch.setattr(checkpoint, "save", saving)
    monkeypatch.setattr(Trainer, "optimize", training)
    leg(config(store, {"name": "raptr"}, BESIDE), tmp_path / "run", store)
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == list(range(2, STEPS + 1, 2))


@pytest.mark.parametrize("failing", [2, STEPS])
def test_a_write_that_fails_ends_the_run(
    failing: int, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = checkpoint.save

    def saving(folder: Path, step: int, *given: Any, **named: Any) -> Path:
        if step == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(folder, step, *given, **named)

    monkeypatch.setattr(checkpoint, "save", saving)
    with pytest.raises(OSError, match="No space left"):
        leg(config(store, {"name": "raptr"}, BESIDE), tmp_path / "run", store)
    assert failing not in checkpoint.steps(tmp_path / "run" / "checkpoints")
