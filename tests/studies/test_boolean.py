"""The two-neuron theorem: gradients, limits, exponents, the saddle, the bound, and a study that goes on."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from raptr.studies import boolean
from raptr.studies.boolean_dynamics import (
    AMPLITUDE,
    BOTH,
    FIRST_ALONE,
    HALF,
    LIMIT1,
    LIMIT2,
    SECOND_ALONE,
    THIRD,
    Array,
    Network,
    Trained,
    bias_after,
    components,
    curvature,
    descend,
    features,
    gradients,
    least_loss,
    leaving,
    limit,
    losses,
    output,
    same,
    steps_to_eta,
    target,
    theorem_run,
    two_stages,
)
from raptr.studies.contract import conduct


def some_network(dims: int, runs: int = 3) -> Network:
    rng = np.random.default_rng(dims)
    return Network(*(rng.normal(size=(runs, width)) for width in (1, dims + 1, dims + 1)))


@pytest.mark.parametrize("reads_bias", [False, True])
@pytest.mark.parametrize("kept", [FIRST_ALONE, SECOND_ALONE, BOTH, (0.0, 0.0)])
@pytest.mark.parametrize("dims", [2, 4])
def test_gradients_are_autograds_of_half_the_loss(dims: int, kept: tuple[float, float], reads_bias: bool) -> None:
    net, phi_NP = some_network(dims), features(dims)
    phi, label = torch.from_numpy(phi_NP), torch.from_numpy(target(phi_NP))
    bias, first, second = (
        torch.from_numpy(part.copy()).requires_grad_() for part in (net.bias_R1, net.first_RP, net.second_RP)
    )
    y = bias.expand(-1, len(label))
    inner = y if reads_bias else torch.zeros_like(y)
    if kept[0]:
        y = y + torch.sin(first @ phi.T)
        inner = y
    if kept[1]:
        y = y + torch.sin(second @ phi.T + inner)
    half = ((y - label) ** 2).mean(dim=1).sum() / 2
    wanted = torch.autograd.grad(half, (bias, first, second), allow_unused=True, materialize_grads=True)
    found = gradients(net, phi_NP, target(phi_NP), same(kept), reads_bias=reads_bias)
    for ours, theirs in zip((found.bias_R1, found.first_RP, found.second_RP), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-14)
    assert losses(net, phi_NP, same(kept), reads_bias=reads_bias).sum() / 2 == pytest.approx(half.item(), rel=1e-13)


def test_gradients_of_one_layer_are_the_papers_formulas() -> None:
    w1, w2, w3, b = 0.7, -0.4, 0.3, 0.9
    net = Network(np.array([[AMPLITUDE]]), np.array([[w1, w2, w3, b]]), np.zeros((1, 4)))
    found = gradients(net, features(3), target(features(3)), same(FIRST_ALONE)).first_RP[0]
    sin, cos, a = math.sin, math.cos, AMPLITUDE
    both = cos(2 * w1) * cos(2 * w2) * cos(2 * w3)
    wanted = [
        -a * cos(b) * cos(w1) * cos(w2) * cos(w3)
        - sin(b) * cos(w1) * cos(w3) * sin(w2)
        + cos(2 * b) * both * math.tan(2 * w1) / 2,
        a * cos(b) * cos(w3) * sin(w1) * sin(w2)
        - sin(b) * cos(w2) * cos(w3) * sin(w1)
        + cos(2 * b) * both * math.tan(2 * w2) / 2,
        a * cos(b) * cos(w2) * sin(w1) * sin(w3)
        + sin(b) * sin(w1) * sin(w2) * sin(w3)
        + cos(2 * b) * both * math.tan(2 * w3) / 2,
        sin(2 * b) * both / 2
        + a * sin(b) * cos(w2) * cos(w3) * sin(w1)
        - cos(b) * cos(w3) * sin(w1) * sin(w2),
    ]  # fmt: skip
    np.testing.assert_allclose(found, wanted, atol=1e-14)


def test_labels_and_components() -> None:
    phi = features(3)
    assert phi.shape == (8, 4)
    assert len({tuple(row) for row in phi}) == 8
    found = components(target(phi)[None] + 0.5 * phi[None, :, 2], phi)
    expected = {"1": AMPLITUDE, "x1": AMPLITUDE, "x2": 0.0, "x1x2": -1.0, "others": 0.5}
    assert {name: float(part[0]) for name, part in found.items()} == pytest.approx(expected, abs=1e-12)


def test_phase_1_draws_one_layer_each_and_phase_2_both() -> None:
    draws = [two_stages(400, 10, seed=1)(step) for step in range(410)]
    assert set(draws[:400]) == {FIRST_ALONE, SECOND_ALONE}
    assert 150 < draws[:400].count(FIRST_ALONE) < 250
    assert set(draws[400:]) == {BOTH}
    assert draws != [two_stages(400, 10, seed=2)(step) for step in range(410)]


def test_the_theorems_network_is_exact_at_its_limits() -> None:
    net = Network.start(1, 2, bias=AMPLITUDE, first=LIMIT1, second=LIMIT2)
    assert losses(net, features(2), same(BOTH))[0] < 1e-30
    line = AMPLITUDE + AMPLITUDE * features(2)[:, 0]
    np.testing.assert_allclose(output(net, features(2), same(FIRST_ALONE))[0], line, atol=1e-15)


def test_limits_are_reached_phase_by_phase() -> None:
    run = theorem_run(0.1, seeds=2)
    assert run["bias_error"] < 1e-15
    assert run["after_phase1"]["w1"][0] < 5e-4
    assert max(run["after_phase1"]["w2"][0], run["after_phase1"]["b"][0]) < 1e-6
    assert run["after_phase2"]["w2"][0] == pytest.approx(0.1, rel=0.01)
    assert run["after_phase2"]["loss_at_10"][0] == pytest.approx(2.4e-3, rel=0.02)
    assert run["after_phase2"]["loss"][0] == pytest.approx(2.5e-5, rel=0.01)
    bias, one, both = run["curves"]["phases"]
    assert bias["1"][-1] == pytest.approx(AMPLITUDE, abs=1e-6)
    assert bias["x1"][-1] == 0
    assert one["x1"][-1] > 0.8
    assert max(map(abs, one["x1x2"])) < 1e-6
    assert both["x1x2"][-1] < -0.95


def test_exponents_of_phase_2() -> None:
    found = boolean.laws(0.1, 1000)["slopes"]
    for name, wanted in (("w2", -0.5), ("w1", -1.5), ("b", -1.5), ("loss", -2.0)):
        assert found[name]["slope"] == pytest.approx(wanted, abs=0.02)
        assert found[name]["low"] < found[name]["slope"] < found[name]["high"]


def test_the_gap_to_the_flow_is_of_order_eta() -> None:
    coarse, fine = (boolean.laws(eta, 12)["w2_from_flow"] for eta in (0.1, 0.05))
    assert coarse / fine == pytest.approx(2, rel=0.03)


def test_steps_to_an_error_of_eta() -> None:
    found = steps_to_eta(0.1)
    assert found["p0"] == math.ceil(math.log(0.1 / AMPLITUDE) / math.log(0.9))
    assert found["w22"] == pytest.approx(0.1**-3, rel=0.01)
    assert steps_to_eta(0.07)["w22"] / found["w22"] == pytest.approx((0.1 / 0.07) ** 3, rel=0.01)
    assert found["output"] == pytest.approx(0.1**-2 / 2, rel=0.3)
    assert "w22" not in steps_to_eta(0.01)


def test_slope_of_a_line_and_its_interval() -> None:
    found = boolean.slope([0, 1, 2, 3], [1, 3, 5, 7])
    assert found == pytest.approx({"slope": 2, "low": 2, "high": 2, "intercept": 1})
    # residuals ∓0.1 at x = 0, 1, 2 around slope 1: standard error √(0.06 / 2), t = 12.706
    bent = boolean.slope([0, 1, 2], [-0.1, 1.2, 1.9])
    assert bent["slope"] == pytest.approx(1)
    assert bent["high"] - bent["slope"] == pytest.approx(12.706 * math.sqrt(0.06 / 2))


def numerical_hessian(theta: Array) -> Array:
    """Central differences of the exact gradients of the first layer alone."""
    h, rows = 1e-5, []
    for axis in range(3):
        pair = []
        for sign in (1, -1):
            moved = theta.copy()
            moved[axis] += sign * h
            net = Network(np.array([[AMPLITUDE]]), moved[None], np.zeros((1, 3)))
            pair.append(gradients(net, features(2), target(features(2)), same(FIRST_ALONE)).first_RP[0])
        rows.append((pair[0] - pair[1]) / (2 * h))
    return np.array(rows)


@pytest.mark.parametrize("theta", [LIMIT1, (0.4, -0.8, 1.3)])
def test_curvature_is_the_hessian(theta: tuple[float, float, float]) -> None:
    phi = features(2)
    z = phi @ np.array(theta)
    found = curvature(z, AMPLITUDE + np.sin(z) - target(phi), phi)
    np.testing.assert_allclose(found, numerical_hessian(np.array(theta)), atol=1e-9)


def test_phase_1s_limit_is_a_saddle_and_phase_2s_optimum_is_flat() -> None:
    found = boolean.saddle((0.1,), seeds=1)
    assert found["eigenvalues"] == pytest.approx([0.25 - math.sqrt(3) / 2, 0.25, 0.25 + math.sqrt(3) / 2])
    assert np.abs(found["lowest_direction"]) == pytest.approx([0, math.sqrt(0.5), math.sqrt(0.5)])
    assert found["at_phase2_limit"] < 1e-30
    # A step multiplies the push by 1 + η·λ, so the time to leave grows by η / ln(1 + ηλ) for each e-fold.
    rate = math.log1p(found["eta"] * -found["eigenvalues"][0]) / found["eta"]
    assert found["slope"][0] == pytest.approx(-1 / rate, rel=0.01)
    near = found["approach"]["nearest"]
    assert near == sorted(near, reverse=True)


def test_a_layer_pushed_off_the_saddle_ends_at_the_best_one_layer_fit() -> None:
    end, _, _ = descend(
        Network.start(1, 2, bias=AMPLITUDE, first=(THIRD, 1e-2, 1e-2)),
        0.1, 1000, same(FIRST_ALONE), Trained(first=True),
    )  # fmt: skip
    angle = math.acos(math.sqrt(AMPLITUDE / 2))
    assert end.first_RP[0] == pytest.approx([HALF, angle, angle])
    assert losses(end, features(2), same(FIRST_ALONE))[0] == pytest.approx(3 / 8)
    times, clock, curves = leaving(np.array([[AMPLITUDE]]), np.array([[*LIMIT1]]), 0.1, 1, 0.1)
    assert times == [None]
    assert clock == pytest.approx([step / 10 for step in range(11)])
    assert max(curves[0]) < 1e-12


def test_phase_2_stalls_after_an_escape_unless_all_is_trained() -> None:
    angle = math.acos(math.sqrt(AMPLITUDE / 2))
    start = Network.start(1, 2, bias=AMPLITUDE, first=(HALF, angle, angle), second=(HALF, angle, angle))
    frozen, _, _ = descend(start, 0.1, 2000, same(BOTH), Trained(second=True))
    free, _, _ = descend(start, 0.1, 2000, same(BOTH), Trained(bias=True, first=True, second=True))
    assert losses(frozen, features(2), same(BOTH))[0] == pytest.approx(0.0563986, abs=1e-6)
    assert losses(free, features(2), same(BOTH))[0] < 1e-9
    np.testing.assert_array_equal(frozen.first_RP, start.first_RP)


@pytest.mark.parametrize("free_bias", [True, False])
def test_one_layer_cannot_go_below_three_eighths(free_bias: bool) -> None:
    added = np.zeros(4) if free_bias else np.full(4, AMPLITUDE)
    found = least_loss(added, np.zeros(4), free_bias=free_bias, tolerance=0.01)
    assert found.bound <= 3 / 8 <= found.loss + 1e-12
    assert found.loss == pytest.approx(3 / 8)
    assert found.bound > 0.36


def test_least_loss_finds_a_fit_where_there_is_one() -> None:
    phi, theta = features(2), np.array([0.3, 1.1, 4.0])
    found = least_loss(target(phi) - np.sin(phi @ theta), np.zeros(4), free_bias=False, tolerance=0.01)
    assert found.bound == 0
    assert found.loss < 1e-4


def test_further_inputs_change_nothing_and_fade() -> None:
    two, four = boolean.further_inputs(2), boolean.further_inputs(4)
    assert four["loss"] == pytest.approx(two["loss"], rel=1e-6)
    assert four["irrelevant"] < 1e-12
    assert max(four["faded"]) < 1e-5


def test_bias_training_is_exponential_whatever_eta_is() -> None:
    for eta in (0.1, 0.01):
        assert AMPLITUDE - bias_after(eta, 50) == pytest.approx(AMPLITUDE * (1 - eta) ** 50)
    assert limit().bias_R1[0, 0] == AMPLITUDE


def test_a_stopped_study_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in (
        "theorem_run",
        "laws",
        "steps_to_eta",
        "further_inputs",
        "saddle",
        "after_escape",
        "bound",
        "variants",
    ):
        monkeypatch.setattr(boolean, name, _noted(name, calls))
    console = Console(quiet=True)

    def again(seeds: int) -> list[str]:
        calls.clear()
        boolean.run(tmp_path, seeds=seeds, small=True, device="cpu", console=console)
        return list(calls)

    everything = again(1)
    assert len(everything) == 2 + 2 + 3 + 2 + 4
    assert again(1) == []
    (tmp_path / "job-saddle.json").unlink()
    (tmp_path / "job-laws-0.1.json").write_text("{", encoding="utf-8")
    assert sorted(again(1)) == ["laws", "saddle"]
    with pytest.raises(ValueError, match="seeds: was 1, now 2"):
        again(2)
    assert calls == []


def _noted(name: str, calls: list[str]) -> object:
    row = {"eta": 0.1, "p0": 1, "w1": 2, "loss": 3, "output": 4, "w22": 5, "w2_from_flow": 0.1}

    def compute(*_: object) -> dict[str, float]:
        calls.append(name)
        return {**row, "eta": 0.1 / len(calls)}

    return compute


def test_the_small_study_writes_numbers_and_a_figure(tmp_path: Path) -> None:
    folder = conduct(boolean.BOOLEAN, tmp_path, seeds=1, small=True, device="cpu", console=Console(quiet=True))
    assert {"result.json", "boolean.png"} <= {path.name for path in folder.iterdir()}
    assert (folder / "boolean.png").stat().st_size > 50_000
    result = json.loads((folder / "result.json").read_text())
    *_, needed = boolean.draw(result).axes
    etas = [row["eta"] for row in result["steps"]]
    low, high = needed.get_xlim()
    assert low > 0.8 / max(etas)  # no panel that is mostly empty
    assert high < 1.2 / min(etas)
    assert [label.get_text() for label in needed.get_xticklabels()] == [f"{eta:g}" for eta in etas]
