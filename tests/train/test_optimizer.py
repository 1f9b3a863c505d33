from typing import Any

import pytest
import torch
from torch import nn

from raptr.train.optimizer import OptimizerSettings, clip, make_optimizer


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


def test_the_decay_is_the_last_quarter_unless_said_otherwise() -> None:
    assert OptimizerSettings().decay_steps(800) == 200
    assert OptimizerSettings().decay_steps(10) == 3
    assert OptimizerSettings(decay=0.1).decay_steps(30) == 3  # 0.1 * 30 is a little more than 3 in floating point
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
        ({"clip": -1.0}, r"optimizer\.clip.*-1\.0"),
        ({"floor": 2.0}, r"optimizer\.floor.*2\.0"),
        ({"warmup": -1}, r"optimizer\.warmup.*-1"),
        ({"decay": -1.0}, r"optimizer\.decay.*-1\.0"),
        ({"decay": 500.0}, r"optimizer\.decay.*500\.0"),
    ],
)
def test_refusals(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        OptimizerSettings(**settings)


def test_warm_up_and_decay_must_fit() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.warmup.*6.*optimizer\.decay.*0\.5.*train\.steps.*10"):
        OptimizerSettings(warmup=6, decay=0.5).check_steps(10)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    decayed, plain = make_optimizer(OptimizerSettings(weight_decay=0.5), model).param_groups
    assert [p.ndim for p in decayed["params"]] == [2]
    assert [p.ndim for p in plain["params"]] == [1, 1, 1]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)


def test_clipping() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip([parameter], 0).item() == 5
    assert parameter.grad.tolist() == [3, 4]
    assert clip([parameter], 1).item() == 5
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8])
