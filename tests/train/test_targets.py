"""Schedules that meet a target: their cost is that of their plan, and none nearer to it was left out."""

import io
import json
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from raptr.subnetworks.schedule import parse_sizes
from raptr.train.config import Config
from raptr.train.console import plan_table
from raptr.train.plan import plan_run
from raptr.train.targets import meeting, scheduled, schedules, show_targets, targets_table

COUNTS = {"depth": 12, "heads": 12, "mlp": 4}


def config(size: str = "base", **method: Any) -> Config:
    train = {"steps": 3000, "batch": 8, "device": "cpu"}
    return Config.read({"model": {"size": size}, "method": {"name": "raptr", **method}, "train": train})


@pytest.mark.parametrize("target", [0.67, 0.75, 0.9])
def test_schedules_meet_the_target_and_cost_what_is_said(target: float) -> None:
    met, missed = meeting(config(), target)
    assert len(met) + len(missed) == 7  # every set of the three axes
    assert [found.model_flops for found in met] == sorted((found.model_flops for found in met), reverse=True)
    for found in met:
        named = {"depth": "schedule", "heads": "heads", "mlp": "parts"}
        method = {"name": "raptr", **{named[axis]: sizes for axis, sizes in found.sizes.items()}}
        sections = {"model": {"size": "base"}, "train": {"steps": 3000, "batch": 8}}
        planned = plan_run(Config.read({**sections, "method": {**method, "lengths": found.lengths}}))
        assert found.model_flops == planned.relative_model <= target
        assert found.layers_flops == planned.relative_layers
        for axis, sizes in found.sizes.items():
            row = parse_sizes(sizes)
            assert row[0] < row[-1] == COUNTS[axis]
            assert all(before <= after for before, after in pairwise(row))
    assert all(found.model_flops > target for found in missed)


def test_heads_alone_save_too_little_and_the_table_says_so() -> None:
    met, missed = meeting(config(), 0.67)
    assert ("heads",) in [tuple(found.sizes) for found in missed]
    caption = targets_table(met, missed, 0.67).caption
    assert isinstance(caption, str)
    assert "heads (0.797)" in caption


@pytest.mark.parametrize("setting", [{"groups": 2}, {"fixed": [1, 2, -1]}])
def test_schedules_that_another_setting_refuses_are_left_out(setting: dict[str, Any]) -> None:
    met, missed = meeting(config(**setting), 0.67)
    assert {tuple(found.sizes) for found in (*met, *missed)} >= {("depth",), ("mlp",)}
    for found in met:
        assert plan_run(scheduled(config(**setting), found.sizes, found.lengths)).relative_model == found.model_flops


def test_a_model_without_a_smaller_schedule_is_told_what_to_do() -> None:
    model = {"layers": 2, "width": 64, "heads": 2}
    given = {"model": model, "optimizer": {"name": "muon"}, "train": {"steps": 3000, "batch": 8, "device": "cpu"}}
    with pytest.raises(ValueError, match=r"--target-flops is 0\.67, but this model has no smaller.*Use more.*muon"):
        show_targets(Config.read(given), 0.67, timed=False, as_json=False)


@pytest.mark.parametrize("optimizer", [{"name": "muon"}, {"idle": "skip"}])
def test_settings_that_allow_depth_alone_get_schedules_of_depth(optimizer: dict[str, Any]) -> None:
    chosen = Config.read({**config().mapping(), "method": {"name": "raptr"}, "optimizer": optimizer})
    met, missed = meeting(chosen, 0.67)
    assert [tuple(found.sizes) for found in (*met, *missed)] == [("depth",)]


def test_the_papers_sizes_are_among_those_tried() -> None:
    chosen = config()
    shape = chosen.model.build(1000, 128).shape
    assert ({"mlp": "1-2-4"}, "equal") in list(schedules(chosen, shape, ("mlp",)))
    assert ({"heads": "6-9-12"}, "equal") in list(schedules(chosen, shape, ("heads",)))
    assert ({"depth": "6-8-10-12"}, "equal") in list(schedules(chosen, shape, ("depth",)))
    proportional = list(schedules(config(lengths="proportional"), shape, ("depth",)))
    assert {lengths for _, lengths in proportional} == {"proportional"}


def test_a_plan_shows_every_reduced_axis_in_80_columns() -> None:
    sections = {"model": {"size": "base"}, "train": {"steps": 675_000, "batch": 8}}
    method = {"name": "raptr", "schedule": "6-9-12", "heads": "6-9-12", "parts": "768-1536-3072"}
    planned = plan_run(Config.read({**sections, "method": method}))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(plan_table(planned))
    shown = console.export_text()
    assert "…" not in shown
    stages = [line.replace("│", " ").split() for line in shown.splitlines() if line.startswith("│")]
    whole = [f"{number:.3f}" for number in (planned.rows[0].layers_flops, planned.rows[0].model_flops)]
    assert stages[0] == ["1", "0", "–", "224,999", "6", "0.4", "6", "1", *whole]


@pytest.mark.parametrize(
    ("method", "target", "told"),
    [
        ({}, 0.1, r"--target-flops is 0\.1.*depth=.*heads=.*mlp="),
        ({}, 1.5, r"--target-flops is 1\.5.*above 0.*below 1"),
        ({}, 0, r"--target-flops is 0"),
        ({"schedule": "6-12"}, 0.7, r"--target-flops is 0\.7.*method\.schedule"),
        ({"name": "pld"}, 0.7, r"--target-flops is 0\.7.*pld.*raptr"),
    ],
)
def test_refused(method: dict[str, Any], target: float, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        show_targets(config(**method), target, timed=False, as_json=False)


def test_json_has_the_time_where_it_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Measured:
        def __init__(self, config: Config, console: object) -> None:
            self.hours = 1 / plan_run(config).relative_model  # the cheapest is the slowest here

    monkeypatch.setattr("raptr.train.measure.measure", Measured)
    show_targets(config(), 0.7, timed=True, as_json=True)
    rows = json.loads(capsys.readouterr().out)["schedules"]
    assert len(rows) == 5
    assert [row["hours"] for row in rows] == sorted(row["hours"] for row in rows)
    assert [row["hours"] for row in rows] == [1 / row["model_flops"] for row in rows]
