"""Schedules by axis, as they are written on the command line and in files."""

from typing import Any

import pytest

from raptr.methods import make_method
from raptr.methods.axes import by_axis, in_units
from raptr.subnetworks import Shape
from raptr.train.config import Config
from raptr.train.resolve import resolve

GROUPED = {"family": "decoder", "size": "tiny", "heads": 8, "kv_heads": 4, "head_size": 16}


def config(model: dict[str, Any], **method: Any) -> Config:
    sections = {"model": model, "method": {"name": "raptr", **method}, "optimizer": {"warmup": 1}}
    return Config.read({**sections, "train": {"steps": 120}, "data": {"length": 16}})


def test_schedules_by_axis() -> None:
    assert by_axis(["6-8-10-12"]) == by_axis(["depth=6-8-10-12"]) == {"schedule": "6-8-10-12"}
    both = {"schedule": "6-8-10-12", "heads": None, "parts": "2-3-4-4"}
    assert by_axis(["depth=6-8-10-12", "mlp=2-3-4-4"]) == by_axis(["mlp=2-3-4-4", "6-8-10-12"]) == both
    assert by_axis(["heads=6-9-12"]) == {"schedule": None, "heads": "6-9-12", "parts": None}


@pytest.mark.parametrize(
    ("schedules", "told"),
    [
        (["parts=1-2-4"], "--schedule is 'parts=1-2-4'.*depth, heads, mlp"),
        (["head=6-9-12"], "--schedule is 'head=6-9-12'.*'heads'"),
        (["6-12", "depth=3-12"], "--schedule .*depth.*'3-12'"),
        (["=6-12"], "--schedule is '=6-12'"),
    ],
)
def test_refused(schedules: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        by_axis(schedules)


def test_sizes_by_dimension() -> None:
    assert in_units("parts", "768-1536-3072", 4, 768) == "1-2-4"
    assert in_units("parts", "1-2-4", 4, 768) == "1-2-4"
    assert in_units("parts", None, 4, 768) is None
    assert in_units("parts", "1-3", 4, 768) == "1-3"  # what the method then refuses
    with pytest.raises(ValueError, match=r"mlp \(parts\) is '700-3072'.* 768"):
        in_units("parts", "700-3072", 4, 768)
    with pytest.raises(ValueError, match=r"mlp \(parts\) is '1\+2'"):
        in_units("parts", "1+2", 4, 768)


def test_the_dimensions_of_the_model_decide_what_sizes_mean() -> None:
    by_dimension = config({"size": "base"}, parts="768-1536-3072", heads="6-9-12")
    by_number = config({"size": "base"}, parts="1-2-4", heads="6-9-12")
    assert by_dimension.mapping() == by_number.mapping()
    assert by_dimension.mapping()["method"]["schedule"] == "12-12-12"


def test_heads_of_a_grouped_decoder_are_whole_groups() -> None:
    queries, groups = config(GROUPED, heads="4-6-8"), config(GROUPED, heads="2-3-4")
    assert queries.mapping() == groups.mapping()
    with pytest.raises(ValueError, match=r"heads is '3-8'.* 2"):
        config(GROUPED, heads="3-8")


def test_an_axis_alone_leaves_the_depth_whole() -> None:
    method = make_method("raptr", shape=Shape(12, heads=12, parts=4), steps=300, parts="1-2-4")
    assert [method.subnetwork(step).counts for step in (0, 99, 100, 200)] == [
        {"size": 12, "parts": 1},
        {"size": 12, "parts": 1},
        {"size": 12, "parts": 2},
        {"size": 12},
    ]
    plain = make_method("raptr", shape=Shape(12, heads=12, parts=4), steps=300)
    assert plain.settings()["schedule"] == "6-8-10-12"  # with no axis named: the recommended depths


def test_options_replace_the_recipes_schedule_on_every_axis() -> None:
    given = {"method.schedule": ["mlp=768-1536-3072"]}
    assert resolve("bert-base", None, given, []).mapping()["method"]["schedule"] == "12-12-12"
    given = {"method.schedule": ["4-8-12"]}
    assert resolve("bert-base", None, given, []).mapping()["method"]["schedule"] == "4-8-12"
    stacked = resolve("demo", None, {"method.name": "stacking", "method.schedule": ["2-6"]}, [])
    assert stacked.method["schedule"] == "2-6"


@pytest.mark.parametrize(
    ("method", "policy"),
    [
        ({}, "skip"),
        ({"schedule": "6-9-12"}, "skip"),
        ({"parts": "1-2-4"}, "zero"),
        ({"schedule": "6-9-12", "heads": "6-9-12"}, "zero"),
        ({"name": "msg", "heads": "6-9-12", "parts": "1-2-4"}, "skip"),  # it grows: all that there is runs
        ({"name": "full"}, "skip"),
    ],
)
def test_idle_parameters_get_what_the_method_needs_unless_a_policy_is_given(
    method: dict[str, Any], policy: str
) -> None:
    saved = config({"size": "base"}, **method).mapping()
    assert saved["optimizer"]["idle"] == policy
    assert Config.read(saved).mapping() == saved
    saved["optimizer"]["idle"] = "zero"
    assert Config.read(saved).mapping() == saved


def test_all_axes_have_the_same_stages() -> None:
    with pytest.raises(ValueError, match=r"mlp \(parts\) is '1-4'.* 3 stages"):
        config({"size": "base"}, schedule="6-9-12", parts="1-4")
    for step in range(0, 120, 7):
        method = config({"size": "base"}, schedule="6-9-12", heads="6-9-12", parts="1-2-4").make_method()
        phase = method.phases()[method.phase_index(step)]
        counts = {"size": 12, "heads": 12, "parts": 4, **method.subnetwork(step).counts}
        assert counts == {"size": phase.size, "heads": phase.heads, "parts": phase.parts}
