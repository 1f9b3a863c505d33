"""Speed from records: stage by stage, and the speed-up realised beside the one the FLOPs promise."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from raptr.report.runs import Run
from raptr.report.speed import OWN_STAGE, SpeedUp, Stage, speed_ups, stages

MakeRun = Callable[..., Run]


def test_a_stage_has_the_cost_of_its_steps(make_run: MakeRun) -> None:
    found = stages(make_run(sizes=(6, 12)))
    assert [(stage.number, stage.running, stage.steps, stage.intervals) for stage in found] == [
        (1, "6 layers", 200, 19),
        (2, "12 layers", 200, 19),
    ]
    assert [stage.seconds_per_step for stage in found] == pytest.approx([0.07, 0.13])
    assert [stage.tokens_per_second for stage in found] == pytest.approx([1000 / 0.07, 1000 / 0.13])
    assert [stage.flops_per_step for stage in found] == pytest.approx([7e12, 13e12])


def test_a_stage_names_the_axes_that_are_reduced(make_run: MakeRun) -> None:
    run = make_run(sizes=(6, 12))
    narrow = tuple(replace(r, heads=9.0, parts=1.0) if r.stage == 1 else r for r in run.train)
    assert [stage.running for stage in stages(replace(run, train=narrow))] == [
        "6 layers, 9 heads, 1 MLP part",
        "12 layers",
    ]


def test_compiling_at_the_start_of_a_stage_does_not_count(make_run: MakeRun) -> None:
    for plain, compiled in zip(
        stages(make_run(sizes=(6, 12))), stages(make_run(sizes=(6, 12), compiling=60.0)), strict=True
    ):
        assert compiled.seconds_per_step == pytest.approx(plain.seconds_per_step)


def test_a_hiccup_in_a_stage_does_not_count(make_run: MakeRun) -> None:
    run = make_run()
    late = tuple(replace(record, seconds=record.seconds + 100 * (record.step > 200)) for record in run.train)
    assert stages(replace(run, train=late))[0].seconds_per_step == pytest.approx(0.13)


def test_time_that_runs_backwards_after_a_resume_is_left_out(make_run: MakeRun) -> None:
    run = make_run()
    stale = tuple(replace(record, seconds=record.seconds - 100 * (record.step > 200)) for record in run.train)
    (stage,) = stages(replace(run, train=stale))
    assert stage.intervals == 38
    assert stage.seconds_per_step == pytest.approx(0.13)


def test_without_two_records_a_stage_has_no_speed(make_run: MakeRun) -> None:
    assert stages(make_run(upto=10)) == [Stage(1, "12 layers", 10, 0, None, None, None)]
    assert stages(make_run(upto=5)) == []


def test_a_clock_too_coarse_for_the_steps_gives_no_speed(make_run: MakeRun) -> None:
    run = make_run()
    (stage,) = stages(replace(run, train=tuple(replace(record, seconds=0.0) for record in run.train)))
    assert (stage.seconds_per_step, stage.tokens_per_second) == (None, None)
    assert stage.flops_per_step == pytest.approx(13e12)


def test_a_staged_run_is_compared_with_its_full_stage(make_run: MakeRun) -> None:
    # By FLOPs a mean step costs 10 of 13 units; the clock has an overhead of 3 units, not 1: 12 of 15.
    (found,) = speed_ups([make_run(sizes=(6, 12), overhead=3.0, compiling=9.0)])
    assert (found.run, found.reference, found.note) == (0, OWN_STAGE, "")
    assert found.theoretical == pytest.approx(13 / 10)
    assert found.realised == pytest.approx(15 / 12)
    assert found.share == pytest.approx((15 / 12) / (13 / 10))


def test_stages_weigh_by_their_steps(make_run: MakeRun) -> None:
    run = make_run(sizes=(6, 12))
    short = replace(run, train=run.train[:30])  # 200 steps of the first stage, 100 of the second
    (found,) = speed_ups([short])
    assert found.theoretical == pytest.approx(13 / ((200 * 7 + 100 * 13) / 300))
    assert found.realised == pytest.approx(13 / ((200 * 7 + 100 * 13) / 300))


def test_a_full_run_of_the_same_kind_is_a_second_reference(make_run: MakeRun) -> None:
    own, other = speed_ups([make_run("full", overhead=2.0), make_run("part", sizes=(6, 12))])
    assert (own.run, own.reference) == (1, OWN_STAGE)
    assert (other.run, other.reference) == (1, "full")
    assert other.theoretical == pytest.approx(13 / 10)
    assert other.realised == pytest.approx(14 / 10)


@pytest.mark.parametrize(
    "different",
    [
        {"config": {"model": {"size": "base"}}},
        {"config": {"data": {"length": 512}}},
        {"config": {"objective": {"name": "causal"}}},
        {"config": {"train": {"steps": 400, "batch": 16}}},
        {"config": {"train": {"steps": 400, "batch": 8, "precision": "float32"}}},
        {"environment": {"gpu": "another"}},
        {"environment": {"processor": "another"}},
    ],
    ids=str,
)
def test_a_full_run_of_another_kind_is_no_reference(make_run: MakeRun, different: dict[str, Any]) -> None:
    found = speed_ups([make_run("full", **different), make_run("part", sizes=(6, 12))])
    assert [entry.reference for entry in found] == [OWN_STAGE]


def test_a_run_from_before_objectives_were_recorded_is_a_reference(make_run: MakeRun) -> None:
    recorded = make_run("part", sizes=(6, 12), config={"objective": {"name": "mlm"}})
    assert [entry.reference for entry in speed_ups([make_run("full"), recorded])] == [OWN_STAGE, "full"]


def test_a_method_without_stages_is_compared_with_full_training_alone(make_run: MakeRun) -> None:
    dropped = make_run("dropped", sizes=(9,), method="layerdrop")
    (found,) = speed_ups([dropped, make_run("full")])
    assert found.reference == "full"
    assert found.theoretical == pytest.approx(13 / 10)
    (alone,) = speed_ups([dropped])
    assert replace(alone, note="") == SpeedUp(0, OWN_STAGE)
    assert "one stage" in alone.note
    assert alone.share is None


def test_full_training_alone_has_no_speed_up(make_run: MakeRun) -> None:
    assert speed_ups([make_run("a"), make_run("b")]) == []


def test_what_cannot_be_told_is_left_open_with_a_reason(make_run: MakeRun) -> None:
    (early,) = speed_ups([make_run(sizes=(6, 8, 10, 12), upto=150)])
    assert replace(early, note="") == SpeedUp(0, OWN_STAGE)
    assert "full stage" in early.note
    (few,) = speed_ups([make_run(sizes=(6, 12), every=100, upto=300)])
    assert (few.theoretical, few.realised) == (None, None)
    assert re.search("too few.*records.*300 of 400", few.note)
    (untrained,) = speed_ups([make_run(sizes=(6, 12), upto=5)])
    assert untrained.note == early.note
    _, against = speed_ups([make_run(sizes=(6, 12)), make_run("full", upto=0)])[:2]
    assert re.search("too few.*records", against.note)
    assert " of 400" not in against.note
