"""Measuring how long a run will take: the arithmetic against a clock of our own, and real steps once."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from raptr.methods import METHODS
from raptr.subnetworks import Subnetwork
from raptr.train import measure as measuring
from raptr.train.config import Config
from raptr.train.console import measurement_table
from raptr.train.flops import expected_flops
from raptr.train.loop import Trainer
from raptr.train.measure import measure

UPDATE, PACE, SETUP = 0.25, 1e-6, 1000.0  # seconds of an update, of a FLOP, and of compiling for a new stage


def config(method: dict[str, Any], family: str = "bert", **train: Any) -> Config:
    return Config.read(
        {
            "model": {"family": family, "size": "tiny", "width": 16, "heads": 4, "head_size": 4, "mlp": 16},
            "method": method,
            "data": {"length": 16, "vocabulary": 600},
            "train": {"steps": 1600, "batch": 16, "device": "cpu", **train},
        }
    )


class Clock:
    """Time that passes in training steps, and by next to nothing whenever it is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.batches, self.stages = 0.0, set[int](), set[int]()
        gradients, update = Trainer.gradients, Trainer.update

        def timed_gradients(trainer: Trainer, subnetwork: Subnetwork) -> Tensor:
            stage = trainer.method.phase_index(trainer.step)
            self.now += PACE * trainer.cost(subnetwork).total + (0 if stage in self.stages else SETUP)
            self.stages.add(stage)
            self.batches.add(trainer.config.train.batch)
            return gradients(trainer, subnetwork)

        def timed_update(trainer: Trainer, loss: Tensor, subnetwork: Subnetwork) -> Tensor:
            self.now += UPDATE
            return update(trainer, loss, subnetwork)

        monkeypatch.setattr(Trainer, "gradients", timed_gradients)
        monkeypatch.setattr(Trainer, "update", timed_update)
        monkeypatch.setattr(measuring, "time", self)

    def perf_counter(self) -> float:
        self.now += 1e-9
        return self.now


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("family", "longest", "batch"), [("bert", 1.0, 16), ("bert", 0.0, 4), ("decoder", 0.0, 4)])
def test_every_method_takes_as_long_as_its_steps(
    name: str, family: str, longest: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, chosen = Clock(monkeypatch), config({"name": name}, family)
    monkeypatch.setattr(measuring, "LONGEST", longest)
    measured = measure(chosen)
    assert clock.batches == {batch}
    assert (measured.timed_batch, measured.batch) == (batch, 16)
    dimensions = chosen.model.build(600, 16)
    phases = chosen.make_method().phases()
    assert [stage.steps for stage in measured.stages] == [phase.stop - phase.start for phase in phases]
    for stage, phase in zip(measured.stages, phases, strict=True):
        cost = expected_flops(dimensions, phase, sequences=16, length=16, targets=chosen.objective.targets(16)).total
        assert stage.step_seconds == pytest.approx(PACE * cost + UPDATE)
        assert stage.hours == pytest.approx(stage.steps * stage.step_seconds / 3600)
    assert measured.hours == pytest.approx(sum(stage.hours for stage in measured.stages))


def test_micro_batches_are_timed_as_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    whole = measure(config({"name": "raptr"}, accumulate=4))
    monkeypatch.setattr(measuring, "LONGEST", 0.0)
    scaled = measure(config({"name": "raptr"}, accumulate=4))
    assert (whole.timed_batch, scaled.timed_batch) == (16, 4)
    assert whole.hours == pytest.approx(scaled.hours)


def test_isolated_documents_can_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random text has ends of documents too, which segments are made of."""
    Clock(monkeypatch)
    chosen = config({"name": "full"})
    isolated = replace(chosen, data=replace(chosen.data, isolate_documents=True))
    assert measure(isolated).hours == pytest.approx(measure(chosen).hours)


def test_real_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ENOUGH", 0.05)
    measured = measure(config({"name": "stacking"}))
    assert 0 < measured.hours < 10
    assert 2**20 < measured.peak_memory < 2**40
    assert measured.gpu_found == torch.cuda.is_available()
    assert json.loads(json.dumps(asdict(measured)))["hours"] == measured.hours
    caption = str(measurement_table(measured).caption)
    assert ("No GPU was found" in caption) == (not torch.cuda.is_available())
    assert "GiB" in caption
