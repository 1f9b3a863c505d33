"""One contract for every registered method; a new method is one more row in SETTINGS."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from raptr.methods import METHODS, Method, make_method
from raptr.methods.growing import Growing
from raptr.methods.msg import Masked
from raptr.methods.pld import PLD
from raptr.settings import flat
from raptr.subnetworks import Schedule, Shape, Subnetwork

SHAPE, STEPS = Shape(layers=6, heads=4, parts=4), 4000

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "full": [{}],
    "raptr": [
        {},
        {"schedule": "2-4-6", "lengths": "proportional", "full_start": 100},
        {"schedule": "3-6", "selection": "bernoulli", "fixed": [], "scaling": "linear"},
        {"schedule": "4-6", "groups": 2, "scaling": "sqrt"},
        {"schedule": "6-6-6", "heads": "2-3-4", "parts": "1-2-4"},
        {"heads": "1-2-4", "width_exponent": 0},
        {"parts": "1-4", "lengths": "proportional", "full_start": 100, "width_exponent": 1},
        {"schedule": "3-4-5-6", "heads": "2-3-4-4", "parts": "2-3-3-4", "groups": 1},
        {"schedule": "3-4-6", "heads": "2-3-4", "parts": "1-2-4", "scaling": "sqrt", "scaled": "branches"},
        {"hold": 3, "scaling": "sqrt"},
        {"schedule": "3-4-6", "heads": "2-3-4", "mirrored": True, "selection": "bernoulli"},
        {"schedule": "3-5-6", "parts": "2-3-4", "hold": 2, "mirrored": True, "fixed": []},
        {"subsets": 4, "heads": "2-3-4-4"},
        {"schedule": "3-6", "subsets": 2, "mirrored": True, "hold": 5, "fixed": [], "scaling": "linear"},
    ],
    "pld": [{}, {"average": 0.75}, {"theta": 0.6, "gamma": 10, "scaled": "layer"}],
    "stochastic-depth": [{}, {"keep": 0.7, "profile": "constant"}],
    "layerdrop": [{}, {"keep": 0.5}],
    "layer-dropout": [{}, {"average": 0.8}, {"drop": 0.6, "recovery": 0.25, "profile": "constant"}],
    "stacking": [{}, {"schedule": "2-3-6", "lengths": "proportional", "moments": "reset"}, {"schedule": "6"}],
    "progressive-stacking": [{}, {"schedule": "1-2-5-6", "moments": "zero"}],
    "double-then-part": [
        {},
        {"schedule": "1-2-4-6", "lengths": "proportional", "moments": "zero"},
        {"schedule": "5-6", "moments": "reset"},
    ],
    "g-stack": [{}, {"schedule": "4-6", "growth_at": 0.1, "moments": "reset"}, {"average": 4}, {"schedule": "6"}],
    "midas": [{}, {"schedule": "1-2-5-6", "lengths": "proportional", "moments": "zero"}],
    "one-layer": [{}, {"growth_at": 0.1, "moments": "zero"}, {"lengths": "proportional"}],
    "lemon": [{}, {"schedule": "4-4-6", "init": "zero"}],
    "msg": [
        {},
        {"schedule": "3-6", "mask_steps": 1999},
        {"mask_steps": 0, "moments": "copy"},
        {"heads": "2-3-4"},
        {"parts": "1-2-4", "lengths": "proportional", "mask_steps": 0},
        {"schedule": "3-4-4-6", "heads": "2-2-4-4", "parts": "1-1-2-4", "mask_steps": 10, "moments": "reset"},
        {"schedule": "6"},
    ],
    "msg-interpolation": [
        {},
        {"schedule": "2-6", "average": 5, "mask_steps": 1},
        {"schedule": "2-6-6", "heads": "3-4-4", "parts": "1-1-4"},
    ],
}


def cases(names: Iterable[str]) -> list[Any]:
    """The rows of these methods."""
    return [
        pytest.param(name, settings, id=f"{name}-{number}")
        for name in names
        for number, settings in enumerate(SETTINGS[name])
    ]


GROWING = [name for name in SETTINGS if issubclass(METHODS[name], Growing)]
WHOLE = [name for name in GROWING if name != "double-then-part"]  # every layer that there is runs in every step
CONSTANT = [name for name in SETTINGS if name not in GROWING]
CASES = cases(SETTINGS)


def make(name: str, settings: dict[str, Any], seed: int = 0) -> Method:
    return make_method(name, shape=SHAPE, steps=STEPS, seed=seed, **settings)


def test_every_method_has_a_row() -> None:
    assert set(SETTINGS) == set(METHODS)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_pure_in_the_step(name: str, settings: dict[str, Any]) -> None:
    """Asked in any order, by any process, a step's subnetwork is the same; there is nothing to replay."""
    one, other = make(name, settings), make(name, settings)
    forwards = [one.subnetwork(step) for step in range(0, STEPS, 97)]
    backwards = [other.subnetwork(step) for step in reversed(range(0, STEPS, 97))]
    assert forwards == backwards[::-1]
    assert one.subnetwork(STEPS - 1) == make(name, settings).subnetwork(STEPS - 1)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_recorded_settings_make_the_same_method(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    again = make(name, method.settings())
    assert (flat(again.settings()), again.phases()) == (flat(method.settings()), method.phases())
    assert [again.subnetwork(step) for step in range(0, STEPS, 97)] == [
        method.subnetwork(step) for step in range(0, STEPS, 97)
    ]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_another_seed_draws_other_parts(name: str, settings: dict[str, Any]) -> None:
    one, other = make(name, settings, 0), make(name, settings, 1)
    same = all(one.subnetwork(step) == other.subnetwork(step) for step in range(0, STEPS, 40))
    assert same == (name in ("full", *WHOLE))


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_phases_cover_every_step_once(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    phases = method.phases()
    assert phases[0].start == 0
    assert phases[-1].stop == STEPS
    assert all(a.stop == b.start for a, b in pairwise(phases))
    for number, phase in enumerate(phases):
        assert method.phase_index(phase.start) == method.phase_index(phase.stop - 1) == number


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_each_layer_runs_as_often_as_promised(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    for phase in method.phases():
        steps = range(phase.start, phase.stop)
        drawn, shape = [method.subnetwork(step) for step in steps], method.shape(phase.start)
        for layer, promised in enumerate(phase.keep):
            runs = sum(subnetwork.scales[layer] != 0 for subnetwork in drawn)
            spread = math.sqrt(len(steps) * promised * (1 - promised))
            assert abs(runs - len(steps) * promised) <= 4.5 * spread + 1e-6
        for subnetwork in drawn[::50]:
            for layer in subnetwork.kept:
                assert len(subnetwork.heads[layer] if subnetwork.heads else range(shape.heads)) == phase.heads
                assert len(subnetwork.parts[layer] if subnetwork.parts else range(shape.parts)) == phase.parts


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_full_network_trains_in_the_last_stage(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    fading = method.rising if isinstance(method, Masked) and len(method.phases()) > 1 else 0
    start = method.phases()[-1].start + fading
    full = [method.subnetwork(step).scales == (1.0,) * SHAPE.layers for step in range(start, STEPS)]
    if method.name not in ("pld", "stochastic-depth", "layerdrop"):  # these drop layers to the end
        assert all(full)
        last = method.subnetwork(STEPS - 1)
        assert (last.heads, last.parts, last.head_gates, last.part_gates) == (None,) * 4
        assert method.evaluated(STEPS).scales == (1.0,) * SHAPE.layers
    else:
        assert not all(full)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_evaluation_judges_every_layer(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    for step in (0, 1, STEPS // 2, STEPS):
        judged = method.evaluated(step)
        assert judged.kept == tuple(range(method.shape(max(step - 1, 0)).layers))
        assert judged.heads is None
        assert judged.parts is None


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_model_ends_with_the_full_shape(name: str, settings: dict[str, Any]) -> None:
    assert make(name, settings).shape(STEPS - 1) == SHAPE


@pytest.mark.parametrize(("name", "settings"), cases(GROWING))
def test_the_shape_is_that_of_the_stage(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    for phase in method.phases():
        for step in (phase.start, phase.stop - 1):
            assert method.shape(step) == Shape(len(phase.keep), phase.heads, phase.parts)
            assert method.subnetwork(step).layers == len(phase.keep)
            if name in WHOLE or phase.size == len(phase.keep):
                assert method.evaluated(step + 1) == method.subnetwork(step)  # and not yet what the next step runs
            else:
                assert method.evaluated(step + 1) == Subnetwork(phase.keep)
    sizes = [len(phase.keep) for phase in method.phases()]
    assert sizes == sorted(sizes)
    assert [phase.heads for phase in method.phases()] == sorted(phase.heads for phase in method.phases())
    assert [phase.parts for phase in method.phases()] == sorted(phase.parts for phase in method.phases())
    assert method.evaluated(0) == Subnetwork(method.phases()[0].keep)
    if name in WHOLE:
        assert method.evaluated(0) == method.subnetwork(0) == Subnetwork.full(sizes[0])


@pytest.mark.parametrize(("name", "settings"), cases(GROWING))
def test_each_growth_has_a_plan(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    for before, after in pairwise(method.phases()):
        old, new = method.shape(before.start), method.shape(after.start)
        if old == new:
            continue
        plan = method.growth(old, new)
        assert len(plan.sources) == new.layers
        assert len(plan.new) == new.layers - old.layers
        assert set(plan.sources) == set(range(old.layers))
        for units, had, has in ((plan.heads, old.heads, new.heads), (plan.parts, old.parts, new.parts)):
            assert units == (None if had == has else (*range(had), *[None] * (has - had)))
        assert plan.moments == method.settings()["moments"]
    for wrong in (SHAPE, replace(SHAPE, layers=5), replace(SHAPE, layers=7, heads=5)):
        with pytest.raises(ValueError, match=f"{name} .*grow"):
            method.growth(SHAPE, wrong)


@pytest.mark.parametrize(("name", "settings"), cases(GROWING))
def test_parts_of_a_model_that_is_not_full_yet(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    for phase in method.phases():
        for step in (phase.start + 1, phase.stop):
            judged = method.evaluated(step)
            for size in range(1, judged.size + 1):
                part = method.drawn(size, 0, step)
                assert (part.size, part.layers) == (size, judged.layers)
                trained = judged.scales if name in WHOLE else (1.0,) * judged.layers
                assert all(scale in (0, trained[layer]) for layer, scale in enumerate(part.scales))
            if name in WHOLE or set(judged.scales) == {1.0}:
                assert method.drawn(judged.size, 0, step) == judged


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"schedule": "4-3-6"}, "schedule 4-3-6.*4 to 3"),
        ({"schedule": "3-5"}, "schedule ends with 5.* 6"),
        ({"schedule": "3-9"}, "schedule 3-9.*size 9.* 1 to 6"),
        ({"schedule": "0-6"}, "schedule 0-6.*size 0"),
        ({"schedule": "3+3"}, "schedule is '3\\+3'.*hyphens"),
        ({"moments": "keep"}, "moments is 'keep'.*copy.*zero.*reset"),
        ({"lengths": "short"}, "lengths is 'short'.*equal.*proportional"),
        ({"full_start": 10}, "method .*'full_start'"),
    ],
)
def test_growing_methods_refuse(name: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(name, settings)


@pytest.mark.parametrize("name", GROWING)
def test_growing_methods_take_a_schedule(name: str) -> None:
    schedule = Schedule.parse("3-6", layers=6, steps=10, lengths="proportional", fixed=())
    method = make_method(name, shape=SHAPE, schedule=schedule)
    assert [method.shape(step).layers for step in (0, 2, 3, 9)] == [3, 3, 6, 6]
    with pytest.raises(ValueError, match=r"6 layers and 10 steps.*6 layers and 4000 steps"):
        make(name, {"schedule": schedule})
    with pytest.raises(ValueError, match=r"lengths.*average.*schedule"):
        make_method(name, shape=SHAPE, schedule=schedule, average=5)
    started = Schedule.parse("3-6", layers=6, steps=10, full_start=2)
    with pytest.raises(ValueError, match=f"schedule.*full-model start.*{name}"):
        make_method(name, shape=SHAPE, schedule=started)


@pytest.mark.parametrize(("name", "settings"), cases(CONSTANT))
def test_one_shape_and_no_growth(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    assert {method.shape(step) for step in (0, STEPS // 2, STEPS - 1)} == {SHAPE}
    with pytest.raises(ValueError, match=f"method {name}.*Shape"):
        method.growth(SHAPE, Shape(12))


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_steps_outside_training_are_refused(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    for step in (-1, STEPS):
        with pytest.raises(ValueError, match=f"step is {step}.* 0 to {STEPS - 1} "):
            method.subnetwork(step)
    for step in (-1, STEPS + 1):
        with pytest.raises(ValueError, match=f"step is {step}.* 0 to {STEPS} "):
            method.evaluated(step)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_step_may_be_any_integer_and_nothing_else(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    questions = (method.shape, method.subnetwork, method.evaluated, method.phase_index)
    layers = method.shape(2099).layers
    asked = (*questions, lambda step: method.drawn(3, 1, step), lambda step: method.trained((True,) * layers, step))
    for ask in asked:
        expected = ask(2100)
        for step in (np.int64(2100), np.uint16(2100), torch.tensor(2100), torch.tensor(2100, dtype=torch.int32)):
            assert ask(step) == expected
        for wrong in (2100.0, True, "1", None, np.float64(1), np.True_, torch.tensor(1.0), torch.tensor(True)):
            with pytest.raises(ValueError, match=r"step is .*whole number"):
                ask(wrong)  # type: ignore[arg-type]
        for outside in (-1, STEPS + 1, np.int64(-1), torch.tensor(2**62), 2**70):
            with pytest.raises(ValueError, match=f"step is {int(outside)}.* 0 to "):
                ask(outside)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_layers_chosen_by_hand_are_scaled_as_in_training(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    for step in range(0, STEPS, 61):
        ran = method.subnetwork(step)
        chosen = method.trained(tuple(scale != 0 for scale in ran.scales), step + 1)
        assert (chosen.scales, chosen.head_gates, chosen.part_gates) == (ran.scales, ran.head_gates, ran.part_gates)
        assert chosen.scaled == ran.scaled or set(ran.scales) <= {0, 1}
    with pytest.raises(ValueError, match=r"kept has 7 .* 6"):
        method.trained((True,) * 7, STEPS)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_parts_of_any_size(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    for size in range(1, SHAPE.layers + 1):
        parts = [method.drawn(size, draw, STEPS) for draw in range(4)]
        assert {part.size for part in parts} == {size}
    for wrong in (0, SHAPE.layers + 1, 2.0):
        with pytest.raises(ValueError, match=f"size is {wrong}.* 1 to {SHAPE.layers}"):
            method.drawn(wrong, 0, STEPS)  # type: ignore[arg-type]
    whole = method.drawn(SHAPE.layers, 0, STEPS)
    if isinstance(method, PLD):
        assert whole == Subnetwork(tuple(1 / p for p in method.keep(STEPS - 1)), scaled=method.scaled)
    else:
        assert whole.scales == Subnetwork.full(SHAPE.layers).scales


@pytest.mark.parametrize("name", METHODS)
def test_bad_settings_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*'sheduel'"):
        make(name, {"sheduel": 1})
    for steps in (0, 10.0, True):
        with pytest.raises(ValueError, match=rf"steps is {steps}.* 1 "):
            make_method(name, shape=SHAPE, steps=steps)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps is missing"):
        make_method(name, shape=SHAPE)
    for seed in (-1, 1.0, True):
        with pytest.raises(ValueError, match=rf"seed is {seed}.* 0 "):
            make(name, {}, seed=seed)  # type: ignore[arg-type]


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"method is 'rapter'.*'raptr'.*full, raptr, pld"):
        make("rapter", {})
    with pytest.raises(ValueError, match=r"did you mean 'pld'"):
        make("PLD", {})
