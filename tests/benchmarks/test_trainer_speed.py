"""The benchmark of the Trainer runs, its stages are the schedule's, and its FLOPs are those of the closed form."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import trainer_speed
from raptr.models.bert.config import BertConfig
from raptr.subnetworks import Subnetwork
from raptr.train.flops import flops


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_trial_times_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **rest: compiler(fn, **{**rest, "backend": "eager"}))
    out = tmp_path / "speed.json"
    trainer_speed.main(
        ["--tiny", "--case", "llama", "--steps", "4", "--warm", "1", "--rounds", "1", "--compile", "--out", str(out)]
    )
    result: dict[str, Any] = json.loads(out.read_text())
    case = result["cases"][0]
    stages = {"no callback": [12], "full": [12], "raptr": [6, 8, 10, 12], "progressive-stacking": [3, 6, 12]}
    ways = {way: [f"{size} layers" for size in sizes] for way, sizes in stages.items()}
    ways |= {f"{way}, compiled": labels for way, labels in ways.items() if way != "no callback"}
    assert list(case["milliseconds"]) == [f"{way}, {label}" for way, labels in ways.items() for label in labels]
    assert {times["steps"] for times in case["milliseconds"].values()} <= {2, 3}
    assert len(case["speed-up"]) == 6
    assert result["environment"]["accelerate"]
    assert trainer_speed.table(case)


def test_what_was_measured_before_an_error_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([[1.0] * 4, [2.0] * 4])  # the third way finds none
    monkeypatch.setattr(trainer_speed, "train", lambda *_: next(runs))
    out = tmp_path / "speed.json"
    with pytest.raises(StopIteration):
        trainer_speed.main(["--tiny", "--case", "bert", "--steps", "4", "--warm", "1", "--out", str(out)])
    case = json.loads(out.read_text())["cases"][0]
    medians = {label: times["median"] for label, times in case["milliseconds"].items()}
    assert medians == {"no callback, 12 layers": 1.0, "full, 12 layers": 2.0}


def test_flops_are_those_of_the_closed_form() -> None:
    case = trainer_speed.TINY_CASES["bert"]
    config = BertConfig(layers=12, width=32, heads=2, head_size=16, mlp=64, vocabulary=100, positions=16)
    expected = flops(config, Subnetwork.full(12), sequences=case.sequences, length=case.length, targets=case.length)
    found = trainer_speed.counted(case.make(), case)
    assert found[12] == expected.total
    assert found[12] - found[6] == expected.layers / 2


def test_a_speed_up_weighs_the_stages_by_their_lengths() -> None:
    medians = {"no callback, 12 layers": 12.0}
    medians |= {f"raptr, {size} layers": float(size) for size in (6, 8, 10, 12)}
    medians |= {f"progressive-stacking, {size} layers": float(size) for size in (3, 6, 12)}
    found = trainer_speed.speedups({size: size + 1.0 for size in (3, 6, 8, 10, 12)}, medians)
    assert found == {
        "counted, raptr": pytest.approx(1.3),
        "realised, raptr against no callback": pytest.approx(4 / 3),
        "counted, progressive-stacking": pytest.approx(1.3),
        "realised, progressive-stacking against no callback": pytest.approx(4 / 3),
    }
