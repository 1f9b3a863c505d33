"""What is particular to each method: literal numbers from the papers."""

import math
from typing import Any

import pytest

from raptr.methods import Method, make_method
from raptr.methods.layer_dropout import LayerDropout
from raptr.methods.pld import PLD
from raptr.subnetworks import Schedule, Shape, Subnetwork


def make(name: str, layers: int = 12, steps: int = 1000, **settings: Any) -> Method:
    return make_method(name, shape=Shape(layers, heads=12, parts=4), steps=steps, **settings)


def pld(**settings: Any) -> PLD:
    method = make("pld", steps=100_000, **settings)
    assert isinstance(method, PLD)
    return method


def dropout(**settings: Any) -> LayerDropout:
    method = make("layer-dropout", **settings)
    assert isinstance(method, LayerDropout)
    return method


def test_the_parts_that_evaluations_judge_are_always_the_same() -> None:
    assert [make("full").drawn(6, draw, 1000).kept for draw in (0, 1)] == [(0, 2, 3, 4, 10, 11), (0, 1, 3, 4, 5, 11)]


@pytest.mark.parametrize("name", ["full", "pld", "stochastic-depth", "layerdrop"])
def test_a_run_of_one_step(name: str) -> None:
    method = make(name, steps=1)
    assert (method.phases()[0].stop, method.subnetwork(0).layers) == (1, 12)


def test_raptr_with_every_layer_kept_is_full() -> None:
    raptr, full = make("raptr", schedule="12-12"), make("full")
    for step in range(0, 1000, 50):
        assert raptr.subnetwork(step) == full.subnetwork(step) == Subnetwork.full(12)


def test_raptr_sizes_by_stage() -> None:
    method = make("raptr")
    sizes = {0: 6, 249: 6, 250: 8, 499: 8, 500: 10, 749: 10, 750: 12, 999: 12}
    assert {step: method.subnetwork(step).size for step in sizes} == sizes


def test_raptr_scales() -> None:
    root, linear = (make("raptr", scaling=scaling).subnetwork(0) for scaling in ("sqrt", "linear"))
    plain = make("raptr").subnetwork(0)
    assert root.kept == plain.kept == linear.kept == (0, 2, 3, 4, 10, 11)
    assert [root.scales[i] for i in root.kept] == [2**0.5, 1, 1, 6**0.5, 1, 1]
    assert [plain.scales[i] for i in root.kept] == [1] * 6
    assert [linear.scales[i] for i in root.kept] == [1, 2.5, 2.5, 2.5, 2.5, 1]


def test_raptr_keeps_a_draw_and_takes_its_opposite() -> None:
    plain, held, mirrored = (make("raptr", fixed=[], **given) for given in ({}, {"hold": 3}, {"mirrored": True}))
    assert [held.subnetwork(step) for step in range(6)] == [plain.subnetwork(step // 3) for step in range(6)]
    assert mirrored.subnetwork(4) == plain.subnetwork(4)
    assert {*mirrored.subnetwork(4).kept} | {*mirrored.subnetwork(5).kept} == set(range(12))  # 6 and the other 6
    both = make("raptr", fixed=[], hold=2, mirrored=True)
    assert both.subnetwork(4) == both.subnetwork(5) == plain.subnetwork(2)
    assert both.subnetwork(6) == both.subnetwork(7) == mirrored.subnetwork(3)
    # the second stage begins at step 250, within a draw, and within a pair
    assert {*held.subnetwork(249).kept} < {*held.subnetwork(250).kept}
    assert {*both.subnetwork(249).kept} | {*both.subnetwork(250).kept} == set(range(12))
    with pytest.raises(ValueError, match=r"hold is 0; a whole number"):
        make("raptr", hold=0)


def test_raptr_takes_a_few_subsets_in_turn() -> None:
    plain, few = make("raptr"), make("raptr", subsets=3, hold=2)
    assert [few.subnetwork(step) for step in range(12)] == [plain.subnetwork(step // 2 % 3) for step in range(12)]
    assert {*few.subnetwork(249).kept} < {*few.subnetwork(254).kept}  # the same subset, of 6 and of 8 layers
    drawn = [plain.subnetwork(step).scales for step in range(3)]
    assert few.evaluated(100).scales == tuple(sum(runs) / 3 for runs in zip(*drawn, strict=True))
    assert few.evaluated(1000).scales == (1.0,) * 12
    alternating = make("raptr", subsets=2, mirrored=True, fixed=[])
    kept = [{*alternating.subnetwork(step).kept} for step in range(4)]
    assert kept[0] == kept[2] == set(range(12)) - kept[1]
    for given, message in (({"subsets": 0}, "0; a number from 1"), ({"subsets": 3, "mirrored": True}, "3; an even")):
        with pytest.raises(ValueError, match=f"subsets is {message}"):
            make("raptr", **given)


def test_raptr_without_scaling_is_judged_under_keep_probabilities() -> None:
    method = make("raptr")
    assert method.evaluated(0).scales == (1.0, *[0.4] * 10, 1.0)
    assert method.evaluated(250).scales == (1.0, *[0.4] * 10, 1.0)  # 250 steps done: stage 1 was trained
    assert method.evaluated(251).scales == (1.0, *[0.6] * 10, 1.0)
    assert method.evaluated(1000).scales == (1.0,) * 12
    for scaling in ("sqrt", "linear"):
        assert make("raptr", scaling=scaling).evaluated(1) == Subnetwork.full(12)


def test_raptr_takes_a_schedule() -> None:
    schedule = Schedule.parse("4-12", layers=12, steps=500, fixed=(1,))
    method = make_method("raptr", shape=Shape(12), schedule=schedule)
    assert method.steps == 500
    assert method.subnetwork(0).size == 4
    with pytest.raises(ValueError, match=r"12 layers and 500 steps.*6 layers and 500 steps"):
        make_method("raptr", shape=Shape(6), schedule=schedule)
    with pytest.raises(ValueError, match=r"average.*schedule"):
        make_method("raptr", shape=Shape(12), schedule=schedule, average=9)


def test_raptr_on_heads_and_parts() -> None:
    method = make("raptr", schedule="12-12-12", heads="6-9-12", parts="1-2-4", width_exponent=0.5)
    first, last = method.subnetwork(0), method.subnetwork(999)
    assert first.heads is not None
    assert first.parts is not None
    assert {len(heads) for heads in first.heads} == {6}
    assert {len(parts) for parts in first.parts} == {1}
    assert (first.head_scale, first.part_scale) == (2**0.5, 2.0)
    assert last == Subnetwork.full(12)
    unscaled = make("raptr", schedule="12-12", heads="6-12")
    assert unscaled.subnetwork(0).head_scale == 1
    assert unscaled.settings()["width_exponent"] == 0
    assert make("raptr", width_exponent=1).settings() == make("raptr").settings()  # all heads and parts run
    started = make("raptr", schedule="6-12", heads="6-12", full_start=100)
    assert started.subnetwork(0) == Subnetwork.full(12)
    assert started.subnetwork(100).heads is not None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"schedule": "6-8-10"},
            "schedule ends with 10.* 12",
        ),
        ({"scaling": "cubic"}, "scaling is 'cubic'.*sqrt.*linear.*none"),
        ({"selection": "some"}, "selection is 'some'.*exact.*bernoulli"),
        ({"scaled": "all"}, "scaled is 'all'.*layer.*branches"),
        ({"groups": 5}, "groups is 5.*divisor"),
        ({"groups": 2, "selection": "bernoulli"}, "groups is 2.*bernoulli.* 1 "),
        ({"schedule": "6-8-10-12", "heads": "6-12"}, "heads is '6-12'.* 4 stages"),
        ({"parts": "4-3-2-1"}, r"mlp \(parts\) is '4-3-2-1'.* 4 stages"),
        ({"heads": "3-6-9-11"}, "heads is '3-6-9-11'.* 12"),
        ({"width_exponent": 0.3}, "width_exponent is 0.3.* 0, 0.5, 1"),
    ],
)
def test_raptr_refuses(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make("raptr", **settings)


def test_pld_follows_algorithm_2() -> None:
    method = pld(theta=0.5)
    decay = math.exp(-100 / 100_000)
    assert method.keep(0) == tuple(1 - i / 12 * 0.5 * (1 - decay) for i in range(12))
    assert method.keep(99_999) == pytest.approx([1 - i / 12 * 0.5 for i in range(12)], abs=1e-12)
    for step in range(0, 100_000, 9973):
        drawn, keep = method.subnetwork(step), method.keep(step)
        assert drawn.scaled == "branches"
        assert all(drawn.scales[i] == 1 / keep[i] for i in drawn.kept)
        assert 0 in drawn.kept  # the first layer's probability is 1


def test_pld_averages() -> None:
    assert pld().phases()[0].size / 12 == pytest.approx(0.773, abs=5e-4)
    assert pld(average=0.75).final_theta == pytest.approx(0.449, abs=5e-4)
    deep = make_method("pld", shape=Shape(20), steps=100_000, theta=0.6)
    assert deep.phases()[0].size / 20 == pytest.approx(0.812, abs=5e-4)
    matched = make_method("pld", shape=Shape(20), steps=100_000, average=0.8)
    assert isinstance(matched, PLD)
    assert matched.final_theta == pytest.approx(0.575, abs=5e-4)
    mean = [sum(column) / 1000 for column in zip(*(matched.keep(100 * i + 50) for i in range(1000)), strict=True)]
    assert sum(mean) / 20 == pytest.approx(0.8, abs=1e-4)


@pytest.mark.parametrize("name", ["pld", "layer-dropout"])
def test_averages_from_the_least_possible_to_1_are_allowed(name: str) -> None:
    for layers in (1, 12):  # a single layer always runs, so 1 is the least too
        assert make(name, layers=layers, average=1).phases()[0].keep == (1.0,) * layers
    for wrong in (1.1, float("nan"), -0.1):
        with pytest.raises(ValueError, match=f"average is {wrong}.* 0 to 1"):
            make(name, average=wrong)


def test_pld_refuses() -> None:
    with pytest.raises(ValueError, match=r"theta and average"):
        pld(theta=0.5, average=0.75)
    with pytest.raises(ValueError, match=r"average is 0\.3.* 12 layers.*0\.546 to 1"):
        pld(average=0.3)
    with pytest.raises(ValueError, match=r"theta is 1\.5.* 0 to 1"):
        pld(theta=1.5)
    for wrong in (0.0, math.inf):
        with pytest.raises(ValueError, match=f"gamma is {wrong}.* above 0"):
            pld(gamma=wrong)


def test_parts_of_dropping_methods_are_divided_by_their_keep_probabilities() -> None:
    method, kept = pld(average=0.75), (True, False) * 6
    for step in (1, 500, 100_000):
        expected = tuple(1 / p if runs else 0 for runs, p in zip(kept, method.keep(step - 1), strict=True))
        assert method.trained(kept, step) == Subnetwork(expected, scaled="branches")
        part = method.drawn(4, 0, step)
        assert [part.scales[i] for i in part.kept] == [1 / method.keep(step - 1)[i] for i in part.kept]
    falling = dropout(drop=0.4, recovery=0.2, profile="constant")
    assert {scale for scale in falling.drawn(4, 0, 401).scales if scale} == {1.25}
    assert {scale for scale in falling.drawn(4, 0, 1000).scales if scale} == {1.0}
    assert falling.drawn(4, 0, 401).scaled == "branches"
    always = dropout(drop=1.0)  # the last layer does not run in step 0, but is in every part
    assert always.drawn(2, 0, 0).scales == (1.0, *[0.0] * 10, 1.0)


@pytest.mark.parametrize(("name", "settings"), [("pld", {"gamma": 0.5}), ("layer-dropout", {})])
def test_phases_promise_the_mean_of_the_steps_probabilities(name: str, settings: dict[str, Any]) -> None:
    method = make(name, steps=10, **settings)
    assert isinstance(method, PLD | LayerDropout)
    for phase in method.phases():
        by_step = [method.keep(step) for step in range(phase.start, phase.stop)]
        assert phase.keep == pytest.approx([sum(column) / len(by_step) for column in zip(*by_step, strict=True)])


def test_stochastic_depth() -> None:
    method = make("stochastic-depth", layers=4, keep=0.6)
    assert method.evaluated(10) == Subnetwork((0.9, 0.8, 0.7, 0.6), scaled="branches")
    assert set(method.subnetwork(3).scales) <= {0.0, 1.0}
    constant = make("stochastic-depth", layers=4, keep=0.6, profile="constant")
    assert constant.evaluated(10).scales == (0.6,) * 4


def test_layerdrop_is_judged_plain() -> None:
    method = make("layerdrop", keep=0.5)
    assert method.evaluated(1) == Subnetwork.full(12)
    for name in ("layerdrop", "stochastic-depth"):
        with pytest.raises(ValueError, match=r"keep is -0\.1.* 0 to 1"):
            make(name, keep=-0.1)


def test_layer_dropout_falls_and_recovers() -> None:
    method = dropout(drop=0.4, recovery=0.2, profile="constant")
    assert method.keep(0) == (0.6,) * 12
    assert method.keep(400) == (0.8,) * 12
    assert method.keep(800) == method.keep(999) == (1.0,) * 12
    drawn = method.subnetwork(400)
    assert drawn.scaled == "branches"
    assert {drawn.scales[i] for i in drawn.kept} == {1.25}
    assert [(phase.start, phase.stop) for phase in method.phases()] == [(0, 800), (800, 1000)]
    deeper = dropout(drop=0.4)
    assert deeper.keep(0)[:2] == (1.0, 1 - 0.4 / 11)
    assert deeper.keep(0)[-1] == 0.6
    assert dropout(layers=1, drop=0.4).keep(0) == (1.0,)
    assert dropout(layers=2).keep(0) == (1.0, 0.5)
    assert dropout(recovery=1).phases() == make("full").phases()
    assert dropout(recovery=1).keep(0) == (1.0,) * 12


def test_layer_dropout_average() -> None:
    for profile in ("linear", "constant"):
        method = dropout(average=0.8, profile=profile)
        assert sum(sum(method.keep(step)) for step in range(1000)) / 12_000 == pytest.approx(0.8)
    with pytest.raises(ValueError, match=r"drop and average"):
        dropout(average=0.8, drop=0.3)
    with pytest.raises(ValueError, match=r"average is 0\.2.*0\.775 to 1"):
        dropout(average=0.2)
    with pytest.raises(ValueError, match=r"average is 'x'.*number"):
        dropout(average="x")
    with pytest.raises(ValueError, match=r"recovery is 0\.0.* 1000 steps"):
        dropout(recovery=0)
    with pytest.raises(ValueError, match=r"recovery is 1\.1.* 0 to 1"):
        dropout(recovery=1.1)
    with pytest.raises(ValueError, match=r"average is 0\.9999.*1\.000 to 1"):
        dropout(average=0.9999, recovery=1)
