"""What is particular to the methods that grow: literal stages, sources and gates."""

from typing import Any

import pytest

from raptr.methods import Method, make_method
from raptr.subnetworks import Shape, Subnetwork


def make(name: str, layers: int = 12, steps: int = 1000, **settings: Any) -> Method:
    return make_method(name, shape=Shape(layers, heads=12, parts=4), steps=steps, **settings)


def sizes(method: Method) -> str:
    return "-".join(str(method.shape(phase.start).layers) for phase in method.phases())


@pytest.mark.parametrize("name", ["stacking", "midas", "lemon", "msg", "msg-interpolation"])
def test_growing_methods_begin_with_half_of_the_layers(name: str) -> None:
    assert sizes(make(name)) == "6-8-10-12"
    assert sizes(make(name, layers=6)) == "3-4-5-6"
    assert sizes(make(name, schedule="6-9-12")) == "6-9-12"


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(12, "3-6-12"), (24, "6-12-24"), (6, "3-6"), (7, "2-4-7"), (10, "5-10"), (2, "1-2"), (1, "1")],
)
def test_progressive_stacking_doubles(layers: int, expected: str) -> None:
    made = make("progressive-stacking", layers=layers)
    assert sizes(made) == expected
    mean = sum(phase.size * (phase.stop - phase.start) for phase in made.phases()) / made.steps
    assert mean == pytest.approx(0.75 * layers if layers > 1 else 1, abs=0.02 * layers)
    again = make("progressive-stacking", layers=layers, **made.settings())
    assert (again.settings(), again.phases()) == (made.settings(), made.phases())


@pytest.mark.parametrize(
    ("layers", "schedule", "expected"),  # the layers that run, and those that there are
    [
        (12, None, ["3/3", "6/6", "9/12", "12/12"]),
        (24, None, ["6/6", "12/12", "18/24", "24/24"]),
        (12, "6-8-10-12", ["6/6", "8/12", "10/12", "12/12"]),
        (12, "2-4-7-12", ["2/2", "4/6", "7/12", "12/12"]),
        (7, None, ["2/2", "4/4", "6/7", "7/7"]),
        (2, None, ["1/1", "2/2"]),
        (1, None, ["1/1"]),
    ],
)
def test_double_then_part_has_the_smallest_model_that_holds_a_stage(
    layers: int, schedule: str | None, expected: list[str]
) -> None:
    method = make("double-then-part", layers=layers, schedule=schedule)
    assert [f"{phase.size:.0f}/{len(phase.keep)}" for phase in method.phases()] == expected


def test_double_then_part_runs_other_parts_of_the_doubled_model_in_each_step() -> None:
    method = make("double-then-part")
    assert [(phase.start, phase.stop) for phase in method.phases()] == [(0, 167), (167, 333), (333, 500), (500, 1000)]
    drawn = [method.subnetwork(step) for step in range(333, 500)]
    assert all(part.size == 9 and {0.0, 1.0} == set(part.scales) and {0, 11} <= set(part.kept) for part in drawn)
    assert len(set(drawn)) > 60  # of 120
    assert method.evaluated(400).scales == (1.0, *[0.7] * 10, 1.0)
    assert method.evaluated(500).scales == (1.0, *[0.7] * 10, 1.0)
    assert method.evaluated(501) == Subnetwork.full(12)
    assert method.growth(Shape(6, 12, 4), Shape(12, 12, 4)).sources == (*range(6), *range(6))


def test_stages_of_a_given_schedule_are_equal() -> None:
    ends = [phase.stop for phase in make("progressive-stacking", schedule="3-6-12").phases()]
    assert ends == [333, 667, 1000]


@pytest.mark.parametrize(
    ("name", "layers", "expected", "step"),
    [
        ("g-stack", 12, "3-12", 333),
        ("g-stack", 24, "6-24", 333),
        ("g-stack", 6, "2-6", 375),
        ("g-stack", 7, "2-7", 350),
        ("g-stack", 5, "2-5", 417),
        ("g-stack", 2, "1-2", 500),
        ("g-stack", 1, "1", None),
        ("one-layer", 12, "1-12", 273),
        ("one-layer", 24, "1-24", 261),
        ("one-layer", 6, "1-6", 300),
        ("one-layer", 2, "1-2", 500),
        ("one-layer", 1, "1", None),
    ],
)
def test_one_growth_to_three_quarters_of_the_layers_on_average(
    name: str, layers: int, expected: str, step: int | None
) -> None:
    method = make(name, layers=layers)
    assert sizes(method) == expected
    assert [phase.start for phase in method.phases()[1:]] == ([] if step is None else [step])


ONCE = ["g-stack", "one-layer"]


@pytest.mark.parametrize("name", ONCE)
def test_the_one_growth_is_where_the_setting_says(name: str) -> None:
    method = make(name, growth_at=0.1, schedule="3-12")
    assert [method.shape(step).layers for step in (0, 99, 100, 999)] == [3, 3, 12, 12]
    starts = {share: make(name, growth_at=share).phases()[1].start for share in (0.001, 0.25, 0.999)}
    assert starts == {0.001: 1, 0.25: 250, 0.999: 999}
    assert make(name, schedule="3-12", average=7.5).phases()[1].start == 500
    assert make(name, schedule="3-12", lengths="proportional").phases()[1].start == 333
    assert make(name, schedule="10-12").phases()[1].start == 500  # three quarters are out of reach
    assert make(name, schedule="12-12").phases()[1].start == 500  # there is nothing to save
    assert make(name, schedule="3-12", steps=2).phases()[1].start == 1


@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize(
    "settings", [{}, {"growth_at": 0.1}, {"average": 11}, {"lengths": "equal"}, {"schedule": "12"}]
)
def test_recorded_settings_make_the_same_growth(name: str, settings: dict[str, Any]) -> None:
    for steps in (7, 1000, 1001):
        method = make(name, steps=steps, **settings)
        recorded = method.settings()
        assert settings.items() <= recorded.items()
        assert make(name, steps=steps, **recorded).phases() == method.phases()
        if not settings:  # a later version may have another default
            assert recorded["growth_at"] * steps == pytest.approx(method.phases()[1].start)


@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"schedule": "3-6-12"}, "schedule 3-6-12.*once"),
        ({"growth_at": 0}, "growth_at is 0.*above 0"),
        ({"growth_at": 1.0}, "growth_at is 1.*below 1"),
        ({"growth_at": -0.5}, "growth_at is -0.5.*above 0"),
        ({"growth_at": 0.0004}, "growth_at is 0.0004.*1000 steps"),
        ({"growth_at": 0.9996}, "growth_at is 0.9996.*1000 steps"),
        ({"growth_at": float("nan")}, "growth_at is nan.*above 0"),
        ({"growth_at": "soon"}, "growth_at is 'soon'.*number"),
        ({"growth_at": 0.5, "average": 9}, "growth_at is 0.5.*average"),
        ({"growth_at": 0.5, "lengths": "equal"}, "growth_at is 0.5.*lengths"),
        ({"growth_at": 0.5, "schedule": "12"}, "growth_at is 0.5.*schedule 12"),
    ],
)
def test_one_growth_refuses(name: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(name, **settings)


def test_g_stack_from_one_layer_is_one_layer_expansion() -> None:
    one, other = make("one-layer"), make("g-stack", schedule="1-12")
    assert one.phases() == other.phases()
    assert one.growth(Shape(1), Shape(12)) == other.growth(Shape(1), Shape(12))


def test_stages_have_the_lengths_of_any_schedule() -> None:
    method = make("stacking", schedule="6-9-12", steps=600, lengths="proportional")
    assert [(phase.start, phase.stop) for phase in method.phases()] == [(0, 100), (100, 300), (300, 600)]
    layers = {0: 6, 99: 6, 100: 9, 299: 9, 300: 12, 599: 12}
    assert {step: method.shape(step).layers for step in layers} == layers


@pytest.mark.parametrize(
    ("name", "old", "new", "sources"),
    [
        ("stacking", 6, 9, (0, 1, 2, 3, 4, 5, 3, 4, 5)),
        ("stacking", 2, 5, (0, 1, 0, 1, 1)),  # more than there is to copy: as progressive stacking
        ("progressive-stacking", 3, 6, (0, 1, 2, 0, 1, 2)),
        ("progressive-stacking", 3, 8, (0, 1, 2, 0, 1, 2, 1, 2)),
        ("g-stack", 3, 12, (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2)),
        ("g-stack", 3, 8, (0, 1, 2, 0, 1, 2, 0, 1)),  # no whole factor: the last copy is cut short
        ("midas", 6, 8, (0, 1, 2, 3, 2, 3, 4, 5)),
        ("midas", 8, 10, (0, 1, 2, 3, 2, 3, 4, 5, 6, 7)),
        ("midas", 10, 12, (0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9)),
        ("midas", 2, 5, (0, 1, 0, 1, 1)),
        ("one-layer", 1, 5, (0, 0, 0, 0, 0)),
        ("one-layer", 2, 5, (0, 1, 0, 1, 0)),  # another start: as g-stack
        ("lemon", 6, 9, (0, 1, 2, 3, 3, 4, 4, 5, 5)),
        ("lemon", 2, 5, (0, 0, 1, 1, 1)),
        ("msg", 6, 9, (0, 1, 2, 3, 4, 5, 3, 4, 5)),
        ("msg-interpolation", 6, 9, (0, 1, 2, 3, 3, 4, 4, 5, 5)),
    ],
)
def test_where_new_layers_come_from(name: str, old: int, new: int, sources: tuple[int, ...]) -> None:
    plan = make(name).growth(Shape(old, 12, 4), Shape(new, 12, 4))
    assert plan.sources == sources
    assert not plan.identity


def test_lemon_can_start_new_layers_as_identities() -> None:
    assert make("lemon", init="zero").growth(Shape(6), Shape(8)).identity
    with pytest.raises(ValueError, match=r"init is 'ones'.*copy.*zero"):
        make("lemon", init="ones")


def test_msg_fades_new_layers_in() -> None:
    method = make("msg", schedule="6-9-12", steps=300, mask_steps=4)
    gates = {step: method.subnetwork(step).scales for step in (99, 100, 101, 102, 103, 104, 199, 200, 202)}
    assert gates[99] == (1.0,) * 6
    assert [set(gates[step][:6]) for step in (100, 101, 104)] == [{1.0}] * 3
    assert [gates[step][6:] for step in (100, 101, 102, 103, 104)] == [(c,) * 3 for c in (0, 0.25, 0.5, 0.75, 1)]
    assert gates[199] == (1.0,) * 9
    assert gates[200] == (1.0,) * 9 + (0.0,) * 3
    assert gates[202] == (1.0,) * 9 + (0.5,) * 3
    assert method.evaluated(100) == Subnetwork.full(6)  # the growth comes after
    assert method.evaluated(101).scales == gates[100]
    beside = make("msg-interpolation", schedule="6-9-12", steps=300, mask_steps=4)
    assert beside.subnetwork(102).scales == (1, 1, 1, 1, 0.5, 1, 0.5, 1, 0.5)
    assert {method.subnetwork(step).scaled for step in (99, 101)} == {"layer"}


def test_msg_fades_new_heads_and_parts_in() -> None:
    method = make("msg", heads="6-9-12", parts="1-1-4", steps=300, mask_steps=4)
    shapes = {step: method.shape(step) for step in (0, 99, 100, 199, 200, 299)}
    assert list(shapes.values()) == [
        Shape(12, *counts) for counts in ((6, 1), (6, 1), (9, 1), (9, 1), (12, 4), (12, 4))
    ]
    for step in (0, 99, 104, 199, 204, 299):
        assert method.subnetwork(step) == Subnetwork.full(12)
    for passed, gate in enumerate((0.0, 0.25, 0.5, 0.75)):
        heads = Subnetwork((1.0,) * 12, head_gates=(1.0,) * 6 + (gate,) * 3)
        assert method.subnetwork(100 + passed) == method.evaluated(101 + passed) == heads
        both = Subnetwork((1.0,) * 12, head_gates=(1.0,) * 9 + (gate,) * 3, part_gates=(1.0,) + (gate,) * 3)
        assert method.subnetwork(200 + passed) == both
    assert method.evaluated(100) == Subnetwork.full(12)  # the growth comes after
    assert method.growth(shapes[99], shapes[100]).heads == (0, 1, 2, 3, 4, 5, None, None, None)
    assert method.growth(shapes[99], shapes[100]).parts is None
    assert [phase.size for phase in method.phases()] == [12, 12, 12]  # a unit under a gate of 0 runs


def test_msg_fades_layers_heads_and_parts_in_together() -> None:
    method = make("msg-interpolation", schedule="11-12", heads="6-12", parts="2-4", steps=300, mask_steps=4)
    assert method.subnetwork(149) == Subnetwork.full(11)
    faded = Subnetwork((1.0,) * 11 + (0.5,), head_gates=(1.0,) * 6 + (0.5,) * 6, part_gates=(1.0, 1.0, 0.5, 0.5))
    assert method.subnetwork(152) == faded
    assert method.drawn(12, 0, 153) == faded
    assert method.growth(Shape(11, 6, 2), Shape(12, 12, 4)).sources == (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10)
    assert method.phases()[1].size == pytest.approx(12 - 1 / 150)


@pytest.mark.parametrize("name", ["msg", "msg-interpolation"])
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"heads": "6-9"}, "heads is '6-9'.*12"),
        ({"heads": "9-6-12"}, "heads is '9-6-12'.*12"),
        ({"parts": "0-4"}, r"mlp \(parts\) is '0-4'.*4"),
        ({"parts": "1-2-8"}, r"mlp \(parts\) is '1-2-8'.*4"),
        ({"schedule": "6-12", "heads": "6-9-12"}, "heads is '6-9-12'.*2 stages.*6-12"),
        ({"parts": "1-4", "heads": "6-9-12"}, r"mlp \(parts\) is '1-4'.*3 stages"),
        ({"heads": "six"}, "heads is 'six'.*hyphens"),
        ({"schedule": "12-12", "parts": "1;4"}, r"mlp \(parts\) is '1;4'.*hyphens"),
        ({"heads": 12}, "heads is 12.*text"),
        ({"heads": "6-12", "mask_steps": 500}, "mask_steps is 500.* 0 to 499"),
    ],
)
def test_msg_refuses_heads_and_parts(name: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(name, **settings)


def test_msg_never_shrinks_or_grows_past_the_model() -> None:
    method = make("msg", heads="6-12")
    assert method.growth(Shape(12, 6, 4), Shape(12, 12, 4)).new == ()
    for new in (Shape(12, 6, 4), Shape(12, 5, 4), Shape(12, 13, 4), Shape(12, 12, 3), Shape(12, 12, 5)):
        with pytest.raises(ValueError, match=r"msg .*grow"):
            method.growth(Shape(12, 6, 4), new)


def test_msg_promises_what_its_gates_cost() -> None:
    method = make("msg", schedule="6-12", steps=300)
    assert method.settings()["mask_steps"] == 15
    assert method.phases()[1].size == pytest.approx(12 - 6 / 150)  # the new layers do not run in the first step
    at_once = make("msg", schedule="6-12", steps=300, mask_steps=0)
    assert at_once.phases()[1].size == 12
    assert at_once.subnetwork(150) == Subnetwork.full(12)


@pytest.mark.parametrize(("steps", "expected"), [(2, 0), (4, 1), (18, 1), (20, 1), (40, 2)])
def test_msg_fades_over_a_tenth_of_a_stage(steps: int, expected: int) -> None:
    assert make("msg", schedule="6-12", steps=steps).settings()["mask_steps"] == expected


def test_msg_fades_over_a_tenth_of_the_shortest_stage_that_grows() -> None:
    method = make("msg", schedule="6-9-12", steps=600, lengths="proportional")  # of 100, 200 and 300 steps
    assert method.settings()["mask_steps"] == 20


def test_msg_refuses_gates_that_never_open() -> None:
    assert make("msg", schedule="6-9-12", steps=300, mask_steps=99).subnetwork(199).scales[8] == 1
    for wrong in (100, -1):
        with pytest.raises(ValueError, match=f"mask_steps is {wrong}.* 0 to 99"):
            make("msg", schedule="6-9-12", steps=300, mask_steps=wrong)
    assert make("msg", schedule="12", mask_steps=7).settings()["mask_steps"] == 7  # nothing grows
