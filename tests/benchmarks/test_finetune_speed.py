"""The benchmark of joined fine-tunings runs, and counts what it says."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks import finetune_speed


def test_a_trial(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    shape = ["--tiny", "--device", "cpu", "--rate", "1e12", "--bandwidth", "1e10"]
    finetune_speed.main([*shape, "--models", "1", "3", "--steps", "2", "--blocks", "2", "--out", str(out)])
    result = json.loads(out.read_text())
    assert [way["models"] for way in result["ways"]] == [1, 3]
    for way in result["ways"]:
        assert len(way["blocks"]) == 2
        assert way["steps_per_second"] == pytest.approx(1e3 * way["models"] / way["milliseconds"])
        assert way["to_floor"] == pytest.approx(way["milliseconds"] / way["floor_milliseconds"])
    assert result["ways"][1]["floor_milliseconds"] == pytest.approx(3 * result["ways"][0]["floor_milliseconds"])
    assert result["environment"]["torch"] == version("torch")


def test_the_model_is_what_bert_mini_exports() -> None:
    made = finetune_speed.model(tiny=False)
    layers = sum(parameter.numel() for name, parameter in made.named_parameters() if ".layer." in name)
    assert layers == pytest.approx(12 * 12 * 256**2, rel=0.01)
