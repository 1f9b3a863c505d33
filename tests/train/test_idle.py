"""Idle parameters: what each policy does to them, under any optimizer."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer

from raptr.train.idle import idle
from tests.operations import Operations


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)


def pair() -> Pair:
    torch.manual_seed(0)
    return Pair()


def step(model: Pair, optimizer: Optimizer, number: int, policy: Any, set_to_none: bool = True) -> None:
    """One step in which the second layer is idle at odd steps."""
    optimizer.zero_grad(set_to_none=set_to_none)
    x = torch.arange(8.0).reshape(2, 4) + number
    out: Tensor = model.first(x)
    if number % 2 == 0:
        out = model.second(out)
    torch.autograd.backward(out.square().mean())
    idle(optimizer, policy)
    optimizer.step()


def snapshot(optimizer: Optimizer, parameter: Tensor) -> tuple[Tensor, ...]:
    state = optimizer.state[parameter]
    return tuple(value.detach().clone() for value in (parameter, *(state[key] for key in sorted(state))))


@pytest.mark.parametrize(("kind", "settings", "kept"), [(AdamW, {}, 4), (NAdam, {}, 5), (SGD, {"momentum": 0.9}, 2)])
def test_skip_leaves_weight_and_optimizer_state_alone(kind: Any, settings: dict[str, Any], kept: int) -> None:
    model = pair()
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.1, **settings)
    step(model, optimizer, 0, "skip")
    before = snapshot(optimizer, model.second.weight)
    active = snapshot(optimizer, model.first.weight)
    step(model, optimizer, 1, "skip")
    assert model.second.weight.grad is None
    assert len(before) == kept
    assert all(map(torch.equal, before, snapshot(optimizer, model.second.weight)))
    assert not any(map(torch.equal, active, snapshot(optimizer, model.first.weight)))


def test_skip_refuses_gradients_that_were_kept_as_zeros() -> None:
    model = pair()
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    step(model, optimizer, 0, "skip", set_to_none=False)
    step(model, optimizer, 2, "skip", set_to_none=False)  # every layer ran, so nothing is in doubt
    before = snapshot(optimizer, model.second.weight)
    with pytest.raises(ValueError, match=r"skip.* 2 gradients.*set_to_none=True"):
        step(model, optimizer, 1, "skip", set_to_none=False)
    assert all(map(torch.equal, before, snapshot(optimizer, model.second.weight)))
    step(model, optimizer, 3, "zero", set_to_none=False)


def test_skip_takes_zeros_that_a_backward_pass_made() -> None:
    model = pair()
    optimizer = AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.second.weight.zero_()  # the first layer's gradient is then exactly zero
    step(model, optimizer, 0, "skip")
    assert model.first.weight.grad is not None
    assert not model.first.weight.grad.any()
    idle(optimizer, "skip")  # twice in a step
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    step(model, optimizer, 2, "skip")


def test_skip_takes_gradients_added_up_over_backward_passes() -> None:
    model = pair()
    optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for scale in (1.0, 2.0):
            torch.autograd.backward(model.first(torch.full((2, 4), scale)).square().mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        idle(optimizer, "skip")
        optimizer.step()
    assert model.second.weight not in optimizer.state


def test_skip_takes_a_kept_gradient_that_is_zero_in_places() -> None:
    model = pair()
    optimizer = AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, 2, "skip", set_to_none=False)
    optimizer.zero_grad(set_to_none=False)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = 1.0  # as the rows of an embedding whose tokens were seen
    idle(optimizer, "skip")


def test_a_parameter_shared_with_a_layer_that_ran_is_not_idle() -> None:
    model = pair()
    model.second.weight = model.first.weight
    optimizer = AdamW(model.parameters(), lr=0.1)
    for number in (1, 3, 5):
        before = model.second.weight.detach().clone()
        step(model, optimizer, number, "skip", set_to_none=number == 1)
        assert not torch.equal(model.second.weight, before)
        assert model.second.bias not in optimizer.state


def test_zero_equals_a_literal_zero_gradient() -> None:
    model = pair()
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    step(model, optimizer, 0, "zero")
    twin = copy.deepcopy(model)
    other = AdamW(twin.parameters(), lr=0.1, weight_decay=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = snapshot(optimizer, model.second.weight)
    step(model, optimizer, 1, "zero")
    for layer, grads in ((twin.first, model.first), (twin.second, None)):
        layer.weight.grad = torch.zeros(4, 4) if grads is None else grads.weight.grad
        layer.bias.grad = torch.zeros(4) if grads is None else grads.bias.grad
    other.step()
    after = snapshot(optimizer, model.second.weight)
    assert all(map(torch.equal, after, snapshot(other, twin.second.weight)))
    assert not any(map(torch.equal, before, after))


def test_zero_leaves_frozen_parameters_without_a_gradient() -> None:
    model = pair()
    model.second.weight.requires_grad_(False)
    idle(AdamW(model.parameters()), "zero")
    assert model.second.weight.grad is None
    assert model.second.bias.grad is not None
    assert not model.second.bias.grad.any()


def test_zero_fills_all_gradients_at_once() -> None:
    model = pair()
    with Operations() as operations:
        idle(AdamW(model.parameters()), "zero")
    assert operations.called == ["aten.empty_like.default"] * 4 + ["aten._foreach_zero_.default"]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == 4
    assert len({gradient.data_ptr() for gradient in gradients}) == 4  # each is its parameter's own
    assert not any(gradient.any() for gradient in gradients)


def test_zero_keeps_gradients_that_exist() -> None:
    model = pair()
    model.first.bias.grad = torch.ones(4)
    idle(AdamW(model.parameters()), "zero")
    assert torch.equal(model.first.bias.grad, torch.ones(4))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy is 'decay'.*'zero'.*'skip'"):
        idle(AdamW(pair().parameters()), "decay")  # type: ignore[arg-type]
