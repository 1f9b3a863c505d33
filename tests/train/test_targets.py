"""Schedules that meet a target: their cost is that of their plan, and none nearer to it was left out."""

import io
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from raptr.subnetworks.schedule import parse_sizes
from raptr.train.config import Config
from raptr.train.console import plan_table
from raptr.train.plan import plan_run
from raptr.train.targets import Candidate, meeting, priced, scheduled, schedules, show_targets, targets_table

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


def test_the_nearest_schedule_from_below_is_taken() -> None:
    chosen = config("tiny")
    every = [priced(chosen, *each) for each in schedules(chosen, chosen.dimensions.shape, ("depth",))]
    cheap, exact, dear = sorted({found.model_flops for found in every if found is not None})[3:6]
    for target, expected in ((exact, exact), ((exact + dear) / 2, exact), ((cheap + exact) / 2, cheap)):
        (found,) = (found for found in meeting(chosen, target)[0] if tuple(found.sizes) == ("depth",))
        assert found.model_flops == expected


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
    given["optimizer"] = {"name": "adafactor", "idle": "skip"}
    with pytest.raises(ValueError, match=r"Use more layers, or leave out optimizer\.idle skip"):
        show_targets(Config.read(given), 0.67, timed=False, as_json=False)


@pytest.mark.parametrize("optimizer", [{"name": "muon"}, {"name": "adafactor", "idle": "skip"}])
def test_settings_that_allow_depth_alone_get_schedules_of_depth(optimizer: dict[str, Any]) -> None:
    chosen = Config.read({**config().mapping(), "method": {"name": "raptr"}, "optimizer": optimizer})
    met, missed = meeting(chosen, 0.67)
    assert [tuple(found.sizes) for found in (*met, *missed)] == [("depth",)]


@pytest.mark.parametrize("optimizer", [{"idle": "skip"}, {"name": "adafactor"}])
def test_other_optimizers_and_policies_allow_all_axes(optimizer: dict[str, Any]) -> None:
    chosen = Config.read({**config().mapping(), "method": {"name": "raptr"}, "optimizer": optimizer})
    met, missed = meeting(chosen, 0.67)
    assert {("heads",), ("mlp",)} <= {tuple(found.sizes) for found in (*met, *missed)}


def test_the_papers_sizes_are_among_those_tried() -> None:
    chosen = config()
    shape = chosen.model.build(1000, 128).shape
    parts = list(schedules(chosen, shape, ("mlp",)))
    assert all(({"mlp": row}, "equal") in parts for row in ("1-2-4", "3-3-4", "3-4-4", "3-3-4-4"))
    assert ({"heads": "6-9-12"}, "equal") in list(schedules(chosen, shape, ("heads",)))
    assert ({"depth": "6-8-10-12"}, "equal") in list(schedules(chosen, shape, ("depth",)))
    both = list(schedules(chosen, shape, ("depth", "mlp")))
    assert ({"depth": "2-7-12", "mlp": "1-3-4"}, "equal") in both  # the fewest of each
    assert len({str(each) for each in both}) == len(both)
    assert all(first != last for row, _ in both for first, *_, last in map(parse_sizes, row.values()))
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
        ({}, 0, r"--target-flops is 0;.*above 0"),
        ({}, 1, r"--target-flops is 1;.*below 1"),
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
    hours = (3.0, 1.0, 2.0, 1.0, 5.0)  # of the schedules from the nearest to the target on
    times = iter(hours)

    class Measured:
        def __init__(self, config: Config, console: object) -> None:
            self.hours = next(times)

    monkeypatch.setattr("raptr.train.measure.measure", Measured)
    show_targets(config(), 0.7, timed=True, as_json=True)
    rows = json.loads(capsys.readouterr().out)["schedules"]
    nearest = [found.sizes for found in meeting(config(), 0.7)[0]]
    expected = sorted(zip(hours, nearest, strict=True), key=lambda pair: pair[0])
    assert [(row["hours"], row["sizes"]) for row in rows] == expected


def test_the_table_has_the_costs_and_the_time_where_it_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    show_targets(config("tiny"), 0.9, timed=False, as_json=False)
    assert "depth=" in capsys.readouterr().out
    found = Candidate({"depth": "6-9-12", "mlp": "1-2-4"}, "equal", 0.5, 0.625)
    for hours, words in ((None, ["0.500", "0.625"]), (2.5, ["0.500", "0.625", "2.5 hours"])):
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(targets_table([replace(found, hours=hours)], [], 0.67))
        shown = console.export_text()
        assert ("time" in shown, "fastest first" in shown) == (hours is not None,) * 2
        (line,) = (line for line in shown.splitlines() if "depth=6-9-12" in line)
        cells = [cell.strip() for cell in line.strip("│┃ ").split("│")]
        assert cells == ["depth=6-9-12 mlp=1-2-4", "equal", *words]
