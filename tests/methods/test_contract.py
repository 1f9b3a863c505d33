"""One contract for every registered method; a new method is one more row in SETTINGS."""

import math
from itertools import pairwise
from typing import Any

import pytest

from raptr.methods import METHODS, Method, make_method
from raptr.subnetworks import Shape, Subnetwork

SHAPE, STEPS = Shape(layers=6, heads=4, parts=4), 4000

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "full": [{}],
    "raptr": [
        {},
        {"schedule": "2-4-6", "lengths": "proportional", "full_start": 100},
        {"schedule": "3-6", "selection": "bernoulli", "fixed": [], "scaling": "linear"},
        {"schedule": "4-6", "groups": 2, "scaling": "none"},
        {"schedule": "6-6-6", "heads": "2-3-4", "parts": "1-2-4"},
        {"schedule": "3-4-6", "heads": "2-3-4", "parts": "1-2-4", "scaled": "branches"},
    ],
    "pld": [{}, {"average": 0.75}, {"theta": 0.6, "gamma": 10, "scaled": "layer"}],
    "stochastic-depth": [{}, {"keep": 0.7, "profile": "constant"}],
    "layerdrop": [{}, {"keep": 0.5}],
    "layer-dropout": [{}, {"average": 0.8}, {"drop": 0.6, "recovery": 0.25, "profile": "constant"}],
}

CASES = [
    pytest.param(name, settings, id=f"{name}-{number}")
    for name, rows in SETTINGS.items()
    for number, settings in enumerate(rows)
]


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
def test_another_seed_draws_other_parts(name: str, settings: dict[str, Any]) -> None:
    one, other = make(name, settings, 0), make(name, settings, 1)
    same = all(one.subnetwork(step) == other.subnetwork(step) for step in range(0, STEPS, 40))
    assert same == (name == "full")


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
        drawn = [method.subnetwork(step) for step in steps]
        for layer, promised in enumerate(phase.keep):
            runs = sum(subnetwork.scales[layer] != 0 for subnetwork in drawn)
            spread = math.sqrt(len(steps) * promised * (1 - promised))
            assert abs(runs - len(steps) * promised) <= 4.5 * spread + 1e-6
        for subnetwork in drawn[::50]:
            for layer in subnetwork.kept:
                assert len(subnetwork.heads[layer] if subnetwork.heads else range(SHAPE.heads)) == phase.heads
                assert len(subnetwork.parts[layer] if subnetwork.parts else range(SHAPE.parts)) == phase.parts


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_full_network_trains_in_the_last_stage(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    start = method.phases()[-1].start
    full = [method.subnetwork(step).scales == (1.0,) * SHAPE.layers for step in range(start, STEPS)]
    if method.ends_full:
        assert all(full)
        assert method.subnetwork(STEPS - 1).heads is None
        assert method.evaluated(STEPS).scales == (1.0,) * SHAPE.layers
    else:
        assert not all(full)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_evaluation_judges_every_layer(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    for step in (0, 1, STEPS // 2, STEPS):
        judged = method.evaluated(step)
        assert judged.kept == tuple(range(SHAPE.layers))
        assert judged.heads is None
        assert judged.parts is None


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_one_shape_and_no_growth(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    assert {method.shape(step) for step in (0, STEPS // 2, STEPS - 1)} == {SHAPE}
    with pytest.raises(ValueError, match="has one shape"):
        method.growth(SHAPE, Shape(12))


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_steps_outside_training_are_refused(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    for step in (-1, STEPS):
        with pytest.raises(ValueError, match=f"step is {step}; 0 to {STEPS - 1} are allowed"):
            method.subnetwork(step)
    for step in (-1, STEPS + 1):
        with pytest.raises(ValueError, match=f"step is {step}; 0 to {STEPS} are allowed"):
            method.evaluated(step)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_parts_of_any_size(name: str, settings: dict[str, Any]) -> None:
    method = make(name, settings)
    for size in range(1, SHAPE.layers + 1):
        parts = [method.part(size, draw) for draw in range(4)]
        assert {part.size for part in parts} == {size}
    assert method.part(SHAPE.layers, 0).scales == Subnetwork.full(SHAPE.layers).scales


@pytest.mark.parametrize("name", METHODS)
def test_bad_settings_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"method {name} has no setting 'sheduel'"):
        make(name, {"sheduel": 1})
    with pytest.raises(ValueError, match="steps is 0; a whole number from 1 on"):
        make_method(name, shape=SHAPE, steps=0)
    with pytest.raises(ValueError, match="steps is missing"):
        make_method(name, shape=SHAPE)
    with pytest.raises(ValueError, match="seed is -1; a whole number from 0 on"):
        make(name, {}, seed=-1)


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="method is 'rapter'; did you mean 'raptr'\\? allowed: full, raptr, pld"):
        make("rapter", {})
