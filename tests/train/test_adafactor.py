"""Adafactor against a reference written out parameter by parameter, and what idleness does to it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from raptr.models.bert.config import BertConfig
from raptr.models.bert.model import Bert
from raptr.train import adafactor
from raptr.train.adafactor import Adafactor, compiled_update
from raptr.train.idle import Policy, idle
from raptr.train.optimizer import OptimizerSettings, make_optimizer


def rms(values: Tensor) -> float:
    return math.sqrt(float((values**2).mean()))


def reference(weight: Tensor, gradients: list[Tensor], lr: float, *, factored: bool) -> Tensor:
    """The weight after so many steps, as the paper writes it: sums of rows and columns, one element at a time."""
    weight, v = weight.clone(), torch.zeros_like(weight)
    rows, columns = [0.0] * weight.shape[0], [0.0] * weight.shape[-1]
    for t, g in enumerate(gradients, 1):
        beta, squares = 1 - t**-0.8, g**2 + 1e-30
        if factored:
            rows = [beta * old + (1 - beta) * squares[i].sum().item() for i, old in enumerate(rows)]
            columns = [beta * old + (1 - beta) * squares[:, j].sum().item() for j, old in enumerate(columns)]
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    v[i, j] = row * column / sum(rows)
        else:
            v = beta * v + (1 - beta) * squares
        u = g / v.sqrt()
        u = u / max(1.0, rms(u))
        weight = weight - lr * max(1e-3, rms(weight)) * u
    return weight


def sequence(shape: tuple[int, ...], steps: int, scale: float) -> list[Tensor]:
    torch.manual_seed(len(shape))
    return [torch.randn(shape, dtype=torch.float64) * scale * (1 + step % 7) for step in range(steps)]


def train(optimizer: Adafactor, parameter: nn.Parameter, gradients: list[Tensor]) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e4])
@pytest.mark.parametrize(
    ("shape", "factored", "kinds"),
    [
        ((4, 6), True, {"row": (1, 4), "column": (1, 6)}),
        ((6, 4), True, {"row": (1, 6), "column": (1, 4)}),
        ((3, 6), False, {"square": (1, 3, 6)}),
        ((6, 3), False, {"square": (1, 6, 3)}),
        ((5,), False, {"square": (1, 5)}),
    ],
)
def test_fifty_steps_are_those_of_the_reference(
    shape: tuple[int, ...], factored: bool, kinds: dict[str, tuple[int, ...]], scale: float
) -> None:
    torch.manual_seed(7)
    parameter, gradients = nn.Parameter(torch.randn(shape, dtype=torch.float64)), sequence(shape, 50, scale)
    expected = reference(parameter.detach(), gradients, 0.03, factored=factored)
    optimizer = Adafactor([{"params": [parameter]}], lr=0.03, factored=4)
    train(optimizer, parameter, gradients)
    state = optimizer.state[parameter]
    assert {kind: tuple(value.shape) for kind, value in state.items() if kind != "step"} == kinds
    assert state["step"] == 50
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 8, 6), (1, 7), (2, 3, 2)])
def test_the_compiled_update_is_the_same_and_compiled_once(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = CompileCounter()
    monkeypatch.setattr(adafactor, "compiled_update", lambda: compiled_update(counter))
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(shape[0] * shape[1], *shape[2:]))
        groups = [{"params": [parameter], "maps": shape[0]}]
        optimizer = Adafactor(groups, lr=0.1, factored=4, compiled=compiled)
        for step in range(12):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            train(optimizer, parameter, [torch.randn_like(parameter)])
        results.append([parameter.detach(), *optimizer.state[parameter].values()])
    torch.testing.assert_close(results[1], results[0])
    assert counter.frame_count == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, from its compiler
@pytest.mark.parametrize("shape", [(3 * 192, 160), (300,), (5, 300)])
def test_a_gpu_makes_the_steps_of_a_cpu(shape: tuple[int, ...]) -> None:
    gradients, results = [gradient.float() for gradient in sequence(shape, 5, 1e-3)], []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(shape).to(device))
        maps = 3 if shape[0] % 3 == 0 else 1
        optimizer = Adafactor([{"params": [parameter], "maps": maps}], lr=0.1, compiled=device == "cuda")
        train(optimizer, parameter, [gradient.to(device) for gradient in gradients])
        results.append([tensor.cpu() for tensor in (parameter.detach(), *optimizer.state[parameter].values())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


def test_averages_are_told_apart_by_name() -> None:
    """A checkpoint names them in an order of its own."""
    results = []
    for order in (sorted, lambda names: sorted(names, reverse=True)):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(6, 6))
        optimizer = Adafactor([{"params": [parameter]}], lr=0.1, factored=4)
        train(optimizer, parameter, [torch.randn(6, 6)])
        state = optimizer.state[parameter]
        optimizer.state[parameter] = {name: state[name] for name in order(state)}
        train(optimizer, parameter, [torch.randn(6, 6)])
        results.append(parameter.detach())
    assert torch.equal(*results)


def test_the_first_steps_of_a_single_number() -> None:
    """Step 1 divides by the gradient itself, so it moves by lr·|p|; then β₂ = 1 - 2^-0.8 = 0.42565."""
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = Adafactor([{"params": [parameter]}], lr=0.1)
    train(optimizer, parameter, [torch.tensor([5.0])])
    assert parameter.item() == pytest.approx(1.8)
    train(optimizer, parameter, [torch.tensor([1.0])])
    assert optimizer.state[parameter]["square"].item() == pytest.approx(0.42565 * 25 + 0.57435, rel=1e-4)
    assert parameter.item() == pytest.approx(1.8 - 0.1 * 1.8 / math.sqrt(11.2156), rel=1e-4)


def test_a_weight_of_zero_moves() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    train(Adafactor([{"params": [parameter]}], lr=0.01), parameter, [torch.tensor([1.0, -2.0, 4.0])])
    assert parameter.tolist() == pytest.approx([-1e-5, 1e-5, -1e-5])


@pytest.mark.parametrize("shape", [(12, 5), (12, 2), (12,)])
def test_a_fused_parameter_is_that_many_of_its_own(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    start = torch.randn(shape) * torch.logspace(0, 3, 3).repeat_interleave(4).view(-1, *[1] * (len(shape) - 1))
    gradients = [torch.randn(shape) * (1 + step) for step in range(20)]
    fused = nn.Parameter(start.clone())
    whole = Adafactor([{"params": [fused], "maps": 3}], lr=0.1, factored=3)
    train(whole, fused, gradients)
    for part in range(3):
        alone = nn.Parameter(start.chunk(3)[part].clone())
        train(Adafactor([{"params": [alone]}], lr=0.1, factored=3), alone, [g.chunk(3)[part] for g in gradients])
        torch.testing.assert_close(fused.chunk(3)[part], alone)


def test_a_model_has_fused_groups_and_factors_from_128_on() -> None:
    config = BertConfig(layers=1, width=128, heads=2, head_size=64, mlp=64, vocabulary=200, positions=16, parts=1)
    model = Bert(config)
    optimizer = make_optimizer(OptimizerSettings(name="adafactor"), model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kinds = {name: set(optimizer.state[parameter]) - {"step"} for name, parameter in model.named_parameters()}
    assert {name for name, kept in kinds.items() if kept == {"row", "column"}} == {
        "tokens.weight",
        "blocks.0.qkv.weight",
        "blocks.0.attention_out.weight",
        "head.dense.weight",
    }
    assert all(kept in ({"row", "column"}, {"square"}) for kept in kinds.values())
    assert optimizer.state[model.get_parameter("blocks.0.qkv.weight")]["row"].shape == (3, 128)
    assert optimizer.state[model.get_parameter("blocks.0.qkv.bias")]["square"].shape == (3, 128)


@pytest.mark.parametrize("shape", [(6, 6), (6,)])
def test_a_weight_that_has_only_been_idle_stays(shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    train(Adafactor([{"params": [parameter]}], lr=0.1, factored=4), parameter, [torch.zeros(shape)] * 2)
    assert torch.equal(parameter, torch.ones(shape))


@pytest.mark.parametrize("policy", ["zero", "skip"])
def test_an_idle_weight_stays_and_only_zero_touches_its_state(policy: Policy) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(6, 6))
    optimizer = Adafactor([{"params": [parameter]}], lr=0.1, factored=4)
    train(optimizer, parameter, [torch.randn(6, 6) for _ in range(3)])
    weight, state = parameter.detach().clone(), {k: v.clone() for k, v in optimizer.state[parameter].items()}
    optimizer.zero_grad()
    idle(optimizer, policy)
    optimizer.step()
    now: dict[str, Any] = optimizer.state[parameter]
    assert torch.equal(parameter, weight)
    if policy == "skip":
        assert all(torch.equal(now[kind], state[kind]) for kind in state)
    else:
        assert now["step"] == state["step"] + 1
        for kind in ("row", "column"):  # β of step 4
            torch.testing.assert_close(now[kind], state[kind] * (1 - 4**-0.8))
