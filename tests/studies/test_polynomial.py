"""The polynomial study: joint training equals plain training, errors are what they claim, parts resume."""

import json
import math
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from raptr.hashing import bits
from raptr.methods import Method
from raptr.studies import polynomial
from raptr.studies.contract import conduct
from raptr.studies.polynomial import METHODS, POLYNOMIAL, SMALL, Job, Setting, method_of, train
from raptr.studies.polynomial_target import INPUTS, Evaluation, Points, Target
from raptr.studies.residual_mlp import Networks
from raptr.studies.residual_mlp_step import MOMENTS, FusedStep, PlainStep
from raptr.studies.residual_mlp_training import AHEAD, Training
from raptr.train.idle import idle

QUIET = Console(quiet=True)
TOY = replace(
    SMALL,
    inputs=6,
    variables=5,
    degrees=3,
    terms=4,
    layers=4,
    schedule="1-2-3-4",
    steps=20,
    batch=16,
    warmup=3,
    rates=(1e-3, 1e-2),
    samples=256,
    evaluations=4,
)


class Block(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, inputs)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.relu(self.first(x)))
        return result


class Plain(nn.Module):
    """One network as anyone would write it, which skips layers for real."""

    def __init__(self, setting: Setting, networks: Networks, run: int) -> None:
        super().__init__()
        size = setting.size
        self.blocks = nn.ModuleList(Block(size.inputs, size.hidden) for _ in range(size.layers))
        self.readout = nn.Linear(size.inputs, 1)
        self.double()
        with torch.no_grad():
            for layer, block in enumerate(self.blocks):
                assert isinstance(block, Block)
                for linear, number in ((block.first, 1), (block.second, 2)):
                    linear.weight.copy_(networks.weights[f"layers.{layer}.w{number}"][run].T)
                    linear.bias.copy_(networks.weights[f"layers.{layer}.b{number}"][run])
            self.readout.weight[0].copy_(networks.weights["readout.w"][run])
            self.readout.bias.copy_(networks.weights["readout.b"][run])

    def forward(self, x: Tensor, scales: tuple[float, ...]) -> Tensor:
        for block, scale in zip(self.blocks, scales, strict=True):
            if scale:
                x = x + scale * block(x)
        result: Tensor = self.readout(x).squeeze(1)
        return result


def plainly(setting: Setting, part: Job) -> list[float]:
    """The evaluation losses of one run, trained alone with nn.Module, autograd and torch.optim.Adam."""
    target = Target(setting.variables, setting.degrees, setting.terms, part.seed)
    table, size = torch.from_numpy(target.table()), {"inputs": setting.inputs, "variables": setting.variables}
    networks = Networks(setting.size, [part.seed], device="cpu", dtype=torch.float64)
    model, method = Plain(setting, networks, 0), method_of(part.method, setting, part.seed)
    optimizer = torch.optim.Adam(model.parameters())
    points = Points([part.seed], "data", samples=setting.batch, **size, device="cpu")
    fixed = Points([0], "evaluation", samples=setting.samples, **size, device="cpu")
    signs, numbers = fixed.at(torch.tensor([0]))
    rates, losses = polynomial.rates(setting, [part])[:, 0].tolist(), []
    for step in range(setting.steps + 1):
        if step in polynomial.evaluated_steps(setting):
            with torch.no_grad():
                output = model(signs[0].double(), method.evaluated(step).scales)
                losses.append((output - table[numbers[0]]).square().mean().item())
        if step == setting.steps:
            break
        x, number = points.at(torch.tensor([step]))
        loss = (model(x[0].double(), method.subnetwork(step).scales) - table[number[0]]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        idle(optimizer, "zero")
        optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.step()
    return losses


def test_joint_training_equals_plain_training_with_skipped_layers() -> None:
    parts = [Job(name, 10.0 ** (seed / 6 - 3), seed) for seed, name in enumerate(METHODS)]
    together = train(TOY, parts, device="cpu", console=QUIET, dtype=torch.float64)
    for part in parts:
        assert together[part.key]["loss"] == pytest.approx(plainly(TOY, part), rel=1e-10), part
        skipped = sum(TOY.layers - method_of(part.method, TOY, part.seed).subnetwork(s).size for s in range(TOY.steps))
        assert (skipped == 0) == (part.method == "full")


def test_the_step_for_a_gpu_is_the_plain_step() -> None:
    seeds, steps = [4, 5, 4], 6
    rates = torch.linspace(1e-3, 2e-2, steps, dtype=torch.float64)[:, None] * torch.tensor([1.0, 2.0, 3.0])
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    given = [(drawn(3, 16, 6), drawn(3, 16), drawn(3, 4).relu()) for _ in range(steps)]
    one, other = (Networks(TOY.size, seeds, device="cpu", dtype=torch.float64) for _ in range(2))
    plain, fused = PlainStep(one, rates), FusedStep(other, rates)
    for step, batch in enumerate(given):
        if step == 3:  # goes on from a state
            moments = fused.moments()
            fused = FusedStep(other, rates)
            fused.load(moments, step)
        plain(torch.tensor([step]), *batch)
        fused(torch.tensor([step]), *batch)
        assert torch.allclose(one.flat_RP, other.flat_RP, rtol=1e-10, atol=1e-13)
        for name in MOMENTS:
            assert torch.allclose(plain.moments()[name], fused.moments()[name], rtol=1e-10, atol=1e-16)
    assert all((factors == 0).any() for _, _, factors in given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: replays a captured step")
def test_captured_steps_equal_plain_ones() -> None:
    setting = replace(TOY, steps=60)
    parts = [Job(name, 10.0 ** (seed / 6 - 3), seed) for seed, name in enumerate(METHODS)]
    captured = train(setting, parts, device="cuda", console=QUIET)
    for part in parts:
        assert captured[part.key]["loss"] == pytest.approx(plainly(setting, part), rel=1e-2), part  # TF32


def test_a_run_does_not_depend_on_its_company() -> None:
    parts = [Job(name, 5e-3, seed) for name in ("raptr", "pld") for seed in (7, 3)]
    together = train(TOY, parts, device="cpu", console=QUIET, dtype=torch.float64)
    for part in parts:
        alone = train(TOY, [part], device="cpu", console=QUIET, dtype=torch.float64)[part.key]
        assert together[part.key]["loss"] == pytest.approx(alone["loss"], rel=1e-10)
        assert np.allclose(together[part.key]["error"], alone["error"], rtol=1e-10, atol=0)
    assert len({str(course["loss"]) for course in together.values()}) == 4


def test_scales_of_later_stretches_reach_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Job("raptr", 5e-3, 1)
    whole = train(TOY, [part], device="cpu", console=QUIET, dtype=torch.float64)
    monkeypatch.setattr("raptr.studies.residual_mlp_training.AHEAD", 3)
    assert TOY.steps < AHEAD
    assert train(TOY, [part], device="cpu", console=QUIET, dtype=torch.float64) == whole


def test_inputs_are_those_of_the_hash() -> None:
    points = Points([5, 2**40], "data", samples=3, inputs=70, variables=20, device="cpu")
    signs, numbers = points.at(torch.tensor([11]))
    assert signs.shape == (2, 3, 70)
    for row, seed in enumerate((5, 2**40)):
        for sample in range(3):
            words = [bits(seed, "data", INPUTS, 11, 2 * sample + word) for word in range(2)]
            expected = [1 - 2 * (words[i // 64] >> i % 64 & 1) for i in range(70)]
            assert signs[row, sample].tolist() == expected
            assert numbers[row, sample].item() == words[0] % 2**20


def test_inputs_of_two_steps_differ() -> None:
    points = Points([0], "data", samples=64, inputs=100, variables=20, device="cpu")
    first, second = (points.at(torch.tensor([step]))[0].double() for step in (0, 1))
    assert abs((first * second).mean().item()) < 0.06  # 6,400 coins: 5 deviations are 0.0625
    assert abs(first.mean().item()) < 0.06


def test_subsets_are_distinct_and_of_their_degree() -> None:
    target = Target(variables=20, degrees=10, terms=20, seed=0)
    for degree, row in enumerate(target.subsets, start=1):
        assert len(set(row.tolist())) == 20
        assert {int(mask).bit_count() for mask in row} == {degree}
        assert max(row) < 2**20
    assert sorted(target.subsets[0].tolist()) == [1 << i for i in range(20)]
    assert not np.array_equal(target.subsets[4], Target(20, 10, 20, seed=1).subsets[4])
    assert target.coefficients.std() == pytest.approx(1, abs=0.2)


def test_subsets_are_drawn_uniformly() -> None:
    counts = dict.fromkeys((1 << a | 1 << b for a, b in combinations(range(5), 2)), 0)
    for seed in range(500):
        for mask in Target(variables=5, degrees=2, terms=3, seed=seed).subsets[1]:
            counts[int(mask)] += 1
    assert all(abs(count - 150) < 5 * math.sqrt(150 * 0.7) for count in counts.values())


def test_too_few_subsets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"terms is 6.*degree 1\b.*5 variables"):
        Target(variables=5, degrees=2, terms=6, seed=0)


def test_the_table_is_the_sum_of_the_terms() -> None:
    target = Target(variables=6, degrees=4, terms=5, seed=3)
    table = target.table()
    for number, signs in enumerate(product((1, -1), repeat=6)):
        x = signs[::-1]  # bit 0 is the first variable and the fastest to change
        value = sum(
            c * math.prod(x[i] for i in range(6) if int(mask) >> i & 1)
            for c, mask in zip(target.coefficients.ravel(), target.subsets.ravel(), strict=True)
        )
        assert table[number] == pytest.approx(value, abs=1e-12)


def evaluation(target: Target, samples: int) -> Evaluation:
    return Evaluation(
        [target], torch.from_numpy(target.table())[None], torch.tensor([0]), samples=samples, inputs=target.variables
    )


def terms(target: Target, x: Tensor, coefficients: Tensor) -> Tensor:
    """Σ c Π x_i from the definition, (batch,)."""
    masks = target.subsets.ravel().tolist()
    columns = [x[:, [i for i in range(target.variables) if mask >> i & 1]].prod(1) for mask in masks]
    return torch.stack(columns, 1) @ coefficients.ravel()


def test_a_perfect_function_has_no_error_and_a_missing_degree_all_of_its_own() -> None:
    target, samples = Target(variables=12, degrees=5, terms=10, seed=2), 1 << 14
    evaluate, c = evaluation(target, samples), torch.from_numpy(target.coefficients)
    loss, error = evaluate(lambda x: terms(target, x[0], c)[None])
    assert loss.item() < 1e-20
    assert error.max().item() < 1e-20
    without = c.clone()
    without[3] = 0
    loss, error = evaluate(lambda x: terms(target, x[0], without)[None])
    assert loss.item() == pytest.approx(c[3].square().sum().item(), rel=0.1)
    assert error[0, 3].item() == pytest.approx(1, abs=0.05)
    others = error[0, [0, 1, 2, 4]] / (loss * evaluate.noise[0, [0, 1, 2, 4]])
    assert 0.2 < others.mean().item() < 2  # sampling noise, as large as it claims


def test_errors_are_exact_where_every_point_is_seen_once() -> None:
    target = Target(variables=6, degrees=3, terms=6, seed=1)
    evaluate, c = evaluation(target, 64), torch.from_numpy(target.coefficients)
    cube = torch.tensor(list(product((1.0, -1.0), repeat=6)), dtype=torch.float64).flip(1)
    evaluate._inputs, evaluate._numbers = cube, torch.arange(64)
    other = c * torch.tensor([[1.0], [0.5], [-1.0]])
    loss, error = evaluate(lambda x: (terms(target, x[0], other) + 3 * x[0].prod(1))[None])
    assert error[0].tolist() == pytest.approx([0, 0.25, 4], abs=1e-12)
    assert loss.item() == pytest.approx(9 + ((c - other) ** 2).sum().item())


def test_relative_flops() -> None:
    setting, promised = Setting(), {}
    for name in METHODS:
        promised[name] = polynomial.described(method_of(name, setting, 0))
    assert promised["full"]["relative_flops"] == 1
    for name in ("raptr", "raptr-none", "pld-matched", "layer-dropout"):
        assert promised[name]["relative_flops"] == pytest.approx(0.8, abs=1e-4)
    assert promised["pld"]["relative_flops"] == pytest.approx(0.812, abs=5e-4)
    assert promised["raptr"]["transitions"] == [setting.steps // 10, 3 * setting.steps // 10, 6 * setting.steps // 10]


def test_evaluation_judges_what_the_method_says(monkeypatch: pytest.MonkeyPatch) -> None:
    part, seen = Job("raptr-none", 1e-3, 0), []

    def forward(self: Networks, x: Tensor, scales: Tensor) -> Tensor:
        seen.append(tuple(scales[0].tolist()))
        return x.new_zeros(x.shape[:2])

    monkeypatch.setattr(Networks, "forward", forward)
    train(TOY, [part], device="cpu", console=QUIET, dtype=torch.float64)
    method: Method = method_of("raptr-none", TOY, 0)
    assert seen == [method.evaluated(step).scales for step in (0, 5, 10, 15, 20)]
    assert seen[0] == (0.25,) * 4
    assert seen[-1] == (1.0,) * 4


def test_the_study_from_end_to_end_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polynomial, "SMALL", TOY)
    trained: list[str] = []
    real = polynomial.train

    def counted(setting: Setting, runs: Any, **rest: Any) -> dict[str, Any]:
        trained.extend(run.key for run in runs)
        return real(setting, runs, **rest)

    monkeypatch.setattr(polynomial, "train", counted)

    def go() -> dict[str, Any]:
        trained.clear()
        folder = conduct(POLYNOMIAL, tmp_path, seeds=2, small=True, device="cpu", console=QUIET)
        assert (folder / "polynomial.png").stat().st_size > 10_000
        text = (folder / "result.json").read_text(encoding="utf-8")
        result: dict[str, Any] = json.loads(text)
        return result

    result = go()
    assert len(trained) == len(METHODS) * (2 + 2)
    for name, numbers in result["methods"].items():
        assert numbers["search"][f"{numbers['rate']:g}"] == min(numbers["search"].values()), name
        assert len(numbers["runs"]) == 2
        mean = sum(run["loss"][-1] for run in numbers["runs"]) / 2
        assert numbers["loss"][0] == pytest.approx(mean)
        assert len(numbers["error"]) == len(numbers["floor"]) == 3
    folder = tmp_path / "polynomial-small"
    assert go() == result
    assert trained == []
    lost = Job("pld", result["methods"]["pld"]["rate"], 1).key
    (folder / f"job-{lost}.json").unlink()
    again = go()
    assert trained == [lost]
    for mine, theirs in zip(again["methods"]["pld"]["runs"], result["methods"]["pld"]["runs"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)  # float32, in other company


def test_a_diverged_run_is_null_and_never_chosen(tmp_path: Path) -> None:
    setting = replace(TOY, rates=(1e-3, 1e30))
    result = polynomial.study(setting, tmp_path, seeds=1, device="cpu", console=QUIET)
    for numbers in result["methods"].values():
        assert numbers["search"]["1e+30"] is None
        assert numbers["rate"] == 1e-3


def test_training_stops_where_it_is_told() -> None:
    networks = Networks(TOY.size, [0], device="cpu", dtype=torch.float64)
    points = Points([0], "data", samples=4, inputs=6, variables=5, device="cpu")
    training = Training(
        networks,
        lambda step: (points.at(step)[0].double(), torch.zeros(1, 4, dtype=torch.float64)),
        lambda start, stop: torch.ones(stop - start, 1, 4, dtype=torch.float64),
        torch.full((6, 1), 1e-3, dtype=torch.float64),
    )
    before = networks.flat_RP.clone()
    training.advance(0)
    assert torch.equal(networks.flat_RP, before)
    training.advance(6)
    assert not torch.equal(networks.flat_RP, before)
    with pytest.raises(AssertionError):
        training.advance(7)
