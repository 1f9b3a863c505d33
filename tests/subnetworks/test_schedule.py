from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raptr.subnetworks import Schedule, Stage


def parse(text: str, layers: int = 12, steps: int = 1000, **settings: Any) -> Schedule:
    return Schedule.parse(text, layers=layers, steps=steps, **settings)


@pytest.mark.parametrize(
    ("text", "layers", "steps", "settings", "boundaries", "average"),
    [
        ("12-16-20-24", 24, 400_000, {"lengths": "proportional"}, (40_000, 120_000, 240_000), 20),
        (
            "12-16-20-24",
            24,
            400_000,
            {"lengths": "proportional", "full_start": 30_000},
            (30_000, 70_000, 150_000, 270_000),
            20,
        ),
        ("6-12-18-24", 24, 400_000, {"average": 20}, (17_778, 75_556, 173_333), 20),
        ("6-8-10-12", 12, 675_000, {}, (168_750, 337_500, 506_250), 9),
        ("6-8-10-12", 12, 675_000, {"lengths": "equal"}, (168_750, 337_500, 506_250), 9),
        ("3-6-9-12", 12, 100_000, {"average": 9}, (10_000, 30_000, 60_000), 9),
        ("12-16-20-24", 24, 400_000, {}, (100_000, 200_000, 300_000), 18),
        # from Proportional's 9.33: a thirty-sixth of the steps goes back to each of the first two stages
        ("4-8-12", 12, 360_000, {"average": 9}, (70_000, 200_000), 9),
        # asked to start from Equal's 8 instead, steps go the other way
        ("4-8-12", 12, 360_000, {"average": 9, "lengths": "equal"}, (90_000, 180_000), 9),
        # from Equal's 8: a sixtieth of the steps moves from each of the first two stages
        ("4-8-12", 12, 360_000, {"average": 8.2}, (114_000, 228_000), 8.2),
        ("8-12-16-20", 20, 100_000, {"lengths": "proportional"}, (10_000, 30_000, 60_000), 16),
        ("12", 12, 5, {}, (), 12),
        ("12-12", 12, 10, {"average": 12}, (5,), 12),
    ],
)
def test_boundaries_and_average(
    text: str, layers: int, steps: int, settings: dict[str, Any], boundaries: tuple[int, ...], average: float
) -> None:
    schedule = parse(text, layers, steps, **settings)
    assert schedule.boundaries == boundaries
    assert schedule.average == pytest.approx(average, abs=1e-5)
    assert schedule.steps == steps
    assert schedule.text == text


def test_stage_of_the_steps_around_every_boundary() -> None:
    schedule = parse("6-8-10-12", steps=1000, full_start=100)
    assert schedule.boundaries == (100, 350, 600, 850)
    sizes = {0: 12, 99: 12, 100: 6, 101: 6, 349: 6, 350: 8, 599: 8, 600: 10, 849: 10, 850: 12, 999: 12}
    assert {step: schedule.stage(step).size for step in sizes} == sizes
    assert [schedule.index(step) for step in (99, 100, 350, 999)] == [0, 1, 2, 4]
    for outside in (-1, 1000):
        with pytest.raises(ValueError, match=rf"step is {outside};.* 0 to 999"):
            schedule.stage(outside)
    assert schedule.index(np.int64(850)) == schedule.index(np.array(850)) == 4
    for wrong in (1.0, True, "1"):
        with pytest.raises(ValueError, match=f"step is {wrong!r}.*whole number"):
            schedule.stage(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        (12, [6, 8, 10, 12]),
        (24, [12, 16, 20, 24]),
        (7, [4, 5, 6, 7]),
        (6, [3, 4, 5, 6]),
        (3, [2, 2, 3, 3]),
        (2, [2, 2, 2, 2]),
        (1, [1, 1, 1, 1]),
    ],
)
def test_recommended(layers: int, sizes: list[int]) -> None:
    schedule = Schedule.recommended(layers, 400)
    assert [stage.size for stage in schedule.stages] == sizes
    assert schedule.boundaries == (100, 200, 300)


def test_fixed_sets_count_from_one_and_from_the_end() -> None:
    assert [stage.fixed for stage in parse("6-12").stages] == [(1, 12), (1, 12)]
    assert parse("6-12", fixed=(2, -2, 2)).stages[0].fixed == (2, 11)
    assert parse("6-12", fixed=(8, 1)).stages[0].fixed == (1, 8)
    assert parse("6-12", fixed=()).stages[0].fixed == ()
    grown = parse("6-9-12", fixed=((1,), (1, -1), (1, 2, -1)))
    assert [stage.fixed for stage in grown.stages] == [(1,), (1, 12), (1, 2, 12)]


def test_keep_probability() -> None:
    stages = parse("6-8-10-12").stages
    assert [float(stage.probability(12)) for stage in stages] == [0.4, 0.6, 0.8, 1]
    assert Stage(0, 1, 2, (1, 2)).probability(2) == 1  # no layer is free


@pytest.mark.parametrize(
    ("text", "settings", "sentence"),
    [
        ("12-8", {}, "schedule 12-8.* 12 to 8"),
        ("12-8", {"full_start": 10}, "schedule 12-8.* 12 to 8"),
        ("6-13", {}, "size 13 .* 1 to 12"),
        ("0-12", {"fixed": ()}, "size 0 .* 1 to 12"),
        ("1-12", {}, r"size 1 .*\{1, 12\}.* 2 "),
        ("six", {}, "schedule is 'six'.*hyphens"),
        (6, {}, "schedule is 6;.*hyphens"),
        ("", {}, "schedule is ''.*hyphens"),
        ("6--12", {}, "schedule is '6--12'.*hyphens"),
        ("6-12-", {}, "schedule is '6-12-'.*hyphens"),
        ("6-12", {"steps": 1}, "stage of size 12 .*empty"),
        ("6-12", {"steps": 0}, "steps is 0.* 1 "),
        ("6-12", {"steps": 1000.0}, "steps is 1000.0;.*whole"),
        ("6-12", {"layers": 0}, "layers is 0.* 1 "),
        ("6-12", {"average": 13}, "average is 13.* 1 to 12"),
        ("6-12", {"average": 0.5}, "average is 0.5.* 1 to 12"),
        ("6-12", {"average": 12}, "average 12 .*1000 steps.*empty"),
        ("6-12", {"average": 6}, "average 6 .*1000 steps.*empty"),
        ("12-12", {"average": 9}, "average is 9.* 12 "),
        ("6-12", {"average": float("nan")}, "average is nan.* 1 to 12"),
        ("6-12", {"average": "9"}, "average is '9'.* 1 to 12"),
        ("6-12", {"lengths": "linear"}, "lengths is 'linear'.*equal.*proportional"),
        (
            "6-12",
            {"full_start": 500},
            "full_start is 500.* 500 .*1003",
        ),
        ("4-8-12", {"full_start": 400}, "full_start is 400.* has 333 of 1000"),
        ("6-8-12", {"steps": 1, "full_start": 1}, "stage of size 6 .*empty"),
        ("6-12", {"full_start": -1}, "full_start is -1.* 0 "),
        ("6-12", {"fixed": 3}, "fixed is 3;.*list"),
        ("6-12", {"fixed": (13,)}, "fixed has layer 13.* 1 to 12.*-1 to -12"),
        ("6-12", {"fixed": (0,)}, "fixed has layer 0.* 1 to 12"),
        ("6-12", {"fixed": (True,)}, "fixed has layer True.* 1 to 12"),
        ("6-12", {"fixed": (1, (1, 12))}, "fixed is .* 2 stages"),
        ("6-12", {"fixed": ((1,), (1,), (1,))}, "fixed is .* 2 stages"),
        ("6-12", {"fixed": ((1, 2), (1,))}, r"fixed set \{1, 2\}.* \{1\}"),
        ("6-6-12", {"fixed": ((1,), (1, 2), (1, 2))}, "0.455 to 0.4"),
    ],
)
def test_impossible_schedules_are_refused(text: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse(text, **settings)


@given(st.data())
def test_any_accepted_schedule_covers_every_step_once(data: st.DataObject) -> None:
    layers = data.draw(st.integers(2, 40))
    sizes = sorted(data.draw(st.lists(st.integers(2, layers), min_size=1, max_size=6)))
    steps = data.draw(st.integers(100, 10**7))
    lengths = data.draw(st.sampled_from(["equal", "proportional"]))
    schedule = parse("-".join(map(str, sizes)), layers, steps, lengths=lengths)
    assert schedule.stages[0].start == 0
    assert schedule.stages[-1].stop == steps
    assert all(a.stop == b.start for a, b in zip(schedule.stages, schedule.stages[1:], strict=False))
    shares = [1] * len(sizes) if lengths == "equal" else range(1, len(sizes) + 1)
    for stage, share in zip(schedule.stages, shares, strict=True):
        assert abs(stage.stop - stage.start - steps * share / sum(shares)) <= 1
