from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.torch_version import TorchVersion

from raptr.train.adafactor import Adafactor
from raptr.train.adamw import AdamW, move
from raptr.train.muon import Muon
from raptr.train.optimizer import (
    OptimizerSettings,
    clip,
    decay_groups,
    load_state,
    make_optimizer,
    state_tensors,
)


def rates(steps: int, **settings: Any) -> list[float]:
    chosen = OptimizerSettings(peak=1.0, **settings)
    return [chosen.learning_rate(step, steps) for step in range(steps)]


def test_warm_up_constant_and_linear_decay_to_zero() -> None:
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert rates(13, warmup=4, decay=5 / 13) == pytest.approx(expected)


def test_cosine_decay_to_a_floor() -> None:
    assert rates(6, decay=2 / 3, decay_shape="cosine", floor=0.1) == pytest.approx(
        [1, 1, 1, 0.1 + 0.9 * 0.8535534, 0.55, 0.1 + 0.9 * 0.1464466]
    )


def test_cosine_over_the_whole_run_after_its_warm_up() -> None:
    expected = [0.5, 1, 1, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25]
    assert rates(5, warmup=2, decay=3 / 5, decay_shape="cosine", floor=0.1) == pytest.approx(expected)


def test_inverse_square_root_from_the_step_at_which_the_decay_begins() -> None:
    """Warm-up's end, the step at which the decay begins, and the last two; then T5's own numbers."""
    seen = rates(100, warmup=4, decay=0.96, decay_shape="inverse-sqrt")
    assert seen[:6] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.894427])
    assert seen[-2:] == pytest.approx([0.202031, 0.201008], abs=1e-6)
    held = rates(16, decay=0.75, decay_shape="inverse-sqrt")  # constant for k = 4 steps, then √(4 / step)
    assert held[:6] == pytest.approx([1, 1, 1, 1, 1, 0.894427])
    assert held[-2:] == pytest.approx([0.534522, 0.516398], abs=1e-6)
    t5 = OptimizerSettings(peak=0.01, decay=0.98, decay_shape="inverse-sqrt")  # 1/√max(step, 10,000)
    assert [t5.learning_rate(step, 500_000) for step in (0, 10_000, 40_000, 250_000)] == [0.01, 0.01, 0.005, 0.002]
    assert t5.learning_rate(499_999, 500_000) == pytest.approx(499_999**-0.5)
    assert rates(3, decay=0, decay_shape="inverse-sqrt") == [1, 1, 1]


def test_an_inverse_square_root_from_step_0_on_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.decay is 1 .*inverse-sqrt.*10"):
        OptimizerSettings(decay=1.0, decay_shape="inverse-sqrt").check_steps(10)
    OptimizerSettings(decay=0.9, decay_shape="inverse-sqrt").check_steps(10)


def test_the_decay_is_the_last_quarter_unless_said_otherwise() -> None:
    assert OptimizerSettings().decay_steps(800) == 200
    assert OptimizerSettings().decay_steps(10) == 3
    assert OptimizerSettings(decay=0.07).decay_steps(100) == 7  # 0.07 * 100 is a little more than 7 in floating point
    assert OptimizerSettings(decay=0.1).decay_steps(31) == 4
    assert OptimizerSettings(decay=1.0).decay_steps(31) == 31
    assert rates(8) == [1, 1, 1, 1, 1, 1, 1, 0.5]
    assert rates(3, decay=0) == [1, 1, 1]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"peak": 0.0}, r"optimizer\.peak.*0\.0"),
        ({"peak": float("inf")}, r"optimizer\.peak.*inf"),
        ({"peak": 1e38}, r"optimizer\.peak.*1e\+38.*3\.4e\+37"),
        ({"peak": float("nan")}, r"optimizer\.peak.*nan"),
        ({"beta2": 1.0}, r"optimizer\.beta2.*1\.0"),
        ({"beta1": -0.1}, r"optimizer\.beta1.*-0\.1"),
        ({"epsilon": 0.0}, r"optimizer\.epsilon.*0\.0"),
        ({"epsilon": float("inf")}, r"optimizer\.epsilon.*inf"),
        ({"weight_decay": float("inf")}, r"optimizer\.weight_decay.*inf"),
        ({"clip": -1.0}, r"optimizer\.clip.*-1\.0"),
        ({"floor": 2.0}, r"optimizer\.floor.*2\.0"),
        ({"warmup": -1}, r"optimizer\.warmup.*-1"),
        ({"decay": -1.0}, r"optimizer\.decay.*-1\.0"),
        ({"decay": 500.0}, r"optimizer\.decay.*500\.0"),
        ({"momentum": 1.0, "name": "muon"}, r"optimizer\.momentum.*1\.0"),
        ({"floor": 0.1, "decay_shape": "inverse-sqrt"}, r"optimizer\.floor.*0\.1.*inverse-sqrt"),
        ({"momentum": 0.9}, r"optimizer\.momentum.*0\.9.*adamw"),
        ({"name": "adafactor", "weight_decay": 0.0}, r"optimizer\.weight_decay.*0\.0.*adafactor"),
        ({"name": "adafactor", "beta2": 0.99}, r"optimizer\.beta2.*0\.99.*adafactor"),
        ({"name": "muon", "idle": "zero"}, r"optimizer\.idle.*zero.*muon"),
    ],
)
def test_refusals(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        OptimizerSettings(**settings)


def test_the_ends_of_the_allowed_ranges_are_allowed() -> None:
    OptimizerSettings(warmup=5, decay=0.5).check_steps(10)
    lowest: dict[str, Any] = {"beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0, "clip": 0.0}
    OptimizerSettings(decay=1.0, floor=1.0, idle="zero", **lowest).check_steps(1)


def test_warm_up_and_decay_must_fit() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.warmup.*6.*\.decay.*0\.5.*train\.steps.*10.*to 5 or less"):
        OptimizerSettings(warmup=6, decay=0.5).check_steps(10)


def test_matrices_and_embeddings_decay_whatever_their_dimension() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2), nn.LayerNorm((2, 2)))
    embedding, matrix, bias, gain, shift = model.parameters()
    optimizer = make_optimizer(OptimizerSettings(weight_decay=0.5), model)
    assert type(optimizer) is AdamW
    decayed, plain = optimizer.param_groups
    assert list(map(id, decayed["params"])) == [id(embedding), id(matrix)]
    assert list(map(id, plain["params"])) == [id(bias), id(gain), id(shift)]
    assert gain.ndim == 2
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)
    compiled = make_optimizer(OptimizerSettings(), model, compiled=True)
    assert isinstance(compiled, AdamW)
    assert (optimizer._move is move, compiled._move is move) == (True, False)


CLASSES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (optim.AdamW, {}),
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.NAdam, {}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (optim.Adafactor, {}),
    (optim.Rprop, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (optim.SGD, {}),
    (Adafactor, {"factored": 2}),
    (Adafactor, {}),
    (Muon, {}),
]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def step(self, number: int, optimizer: Optimizer) -> None:
        """A step in which one layer runs; the last one for the first time in step 3."""
        out = self.blocks[number % 4](torch.arange(6.0).view(2, 3) - number)
        torch.autograd.backward(out.square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("kind", "settings"), CLASSES)
@pytest.mark.parametrize("stop", [0, 2, 5])
def test_state_by_name_goes_on_bit_for_bit_for_any_class(kind: Any, settings: dict[str, Any], stop: int) -> None:
    torch.manual_seed(0)
    whole = Layers()
    weights = {name: value.clone() for name, value in whole.state_dict().items()}

    def optimizer(model: nn.Module) -> Optimizer:
        if kind is Muon:
            return make_optimizer(OptimizerSettings(name="muon", peak=0.01), model)
        made: Optimizer = kind(decay_groups(model, 0.0), lr=0.01, **settings)
        return made

    unbroken = optimizer(whole)
    if kind is optim.Adagrad and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("the state that this Adagrad has from the start cannot be left out")
    for number in range(8):
        whole.step(number, unbroken)

    stored: dict[str, Tensor] = {}
    for first, last in ((0, stop), (stop, 8)):
        part = Layers()
        part.load_state_dict(weights)
        steps = optimizer(part)
        load_state(steps, part, stored)
        for number in range(first, last):
            part.step(number, steps)
        weights = {name: value.clone() for name, value in part.state_dict().items()}
        stored = {name: value.clone() for name, value in state_tensors(steps, part).items()}
    expected = state_tensors(unbroken, whole)
    assert stored.keys() == expected.keys()
    assert [name for name in stored if not torch.equal(stored[name], expected[name])] == []
    assert [name for name, value in whole.state_dict().items() if not torch.equal(value, weights[name])] == []


def test_a_parameter_that_took_no_step_has_no_state() -> None:
    model = Layers()
    optimizer = make_optimizer(OptimizerSettings(), model)
    assert state_tensors(optimizer, model) == {}
    model.step(0, optimizer)
    assert {name.partition(".")[2] for name in state_tensors(optimizer, model)} == {"blocks.0.weight", "blocks.0.bias"}
    assert len(optimizer.state) == 2  # looking made none


def test_state_of_an_unknown_parameter_is_refused() -> None:
    model = Layers()
    with pytest.raises(ValueError, match=r"exp_avg\.blocks\.9\.weight"):
        load_state(make_optimizer(OptimizerSettings(), model), model, {"exp_avg.blocks.9.weight": torch.zeros(3, 3)})


def test_clipping() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip([parameter], 0).item() == 5
    assert parameter.grad.tolist() == [3, 4]
    assert clip([parameter], 1).item() == 5
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8])
