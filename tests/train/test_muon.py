"""Muon beside AdamW in one optimizer: against torch's own two, fused matrices, and why `zero` is refused."""

import pytest
import torch
from torch import Tensor, nn

from raptr.models.bert.config import BertConfig
from raptr.models.bert.model import Bert
from raptr.train.muon import orthogonal
from raptr.train.optimizer import OptimizerSettings, make_optimizer

SMALL = BertConfig(layers=2, width=16, heads=2, head_size=8, mlp=32, vocabulary=50, positions=8)
SETTINGS = OptimizerSettings(name="muon", weight_decay=0.1, peak=0.02, momentum=0.9)


def gradients(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def test_layers_matrices_go_by_torchs_muon_and_all_else_by_its_adamw() -> None:
    model, twin = Bert(SMALL), Bert(SMALL)
    ours = make_optimizer(SETTINGS, model)
    named = dict(twin.named_parameters())
    matrices = [name for name in named if name.startswith("blocks.") and named[name].ndim == 2]
    apart = {
        name: [nn.Parameter(piece.detach().clone()) for piece in named[name].chunk(3 if "qkv" in name else 1)]
        for name in matrices
    }
    muon = torch.optim.Muon(
        [piece for pieces in apart.values() for piece in pieces],
        lr=0.02,
        weight_decay=0.1,
        momentum=0.9,
        adjust_lr_fn="match_rms_adamw",
    )
    others = [name for name in named if name not in matrices]
    decayed = [name for name in others if named[name].ndim == 2]  # embeddings and the head's matrix
    assert decayed == ["tokens.weight", "embedding.positions.weight", "head.dense.weight"]
    adamw = torch.optim.AdamW(
        [
            {"params": [named[name] for name in decayed], "weight_decay": 0.1},
            {"params": [named[name] for name in others if name not in decayed], "weight_decay": 0.0},
        ],
        lr=0.02,
        betas=(SETTINGS.beta1, SETTINGS.beta2),
        eps=SETTINGS.epsilon,
    )
    for step in range(6):
        gradients(model, step)
        gradients(twin, step)
        for name, pieces in apart.items():
            whole = named[name].grad
            assert whole is not None
            for piece, gradient in zip(pieces, whole.chunk(len(pieces)), strict=True):
                piece.grad = gradient
        ours.step()
        muon.step()  # type: ignore[no-untyped-call]
        adamw.step()
    for name, parameter in model.named_parameters():
        if name in matrices:
            # One step moves an entry by about 0.2·0.02; the rounding of bfloat16 differs between batched products.
            torch.testing.assert_close(parameter, torch.cat([*apart[name]]), rtol=0, atol=3e-4)
        else:
            assert torch.equal(parameter, named[name]), name
    fused = ours.state[model.get_parameter("blocks.0.qkv.weight")]
    assert {kind: value.shape for kind, value in fused.items()} == {"momentum_buffer": (48, 16)}
    assert len(ours.param_groups) == 4  # all are back after the step


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 32), (2, 32, 8)])
def test_singular_values_come_near_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    batch = torch.randn(shape).bfloat16()
    values = torch.linalg.svdvals(torch.cat(orthogonal([batch[:1], batch[1:]])).float())
    assert values.min() > 0.3
    assert values.max() < 1.3
    joint = torch.linalg.svdvals(batch[0].float())
    assert joint.max() / joint.min() > values[0].max() / values[0].min()


def test_a_matrix_of_zeros_stays() -> None:
    assert not orthogonal([torch.zeros(1, 4, 4, dtype=torch.bfloat16)])[0].any()


def moves(zeros: bool) -> list[float]:
    """How far an idle matrix moves in each step, with gradients of zero or none, after one step with a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ModuleList([nn.Linear(8, 8, bias=False)]))
    parameter = next(model.parameters())
    optimizer = make_optimizer(OptimizerSettings(name="muon", peak=0.01, weight_decay=0.0), model)
    parameter.grad = torch.randn(8, 8)
    optimizer.step()
    seen = []
    for _ in range(30):
        before: Tensor = parameter.detach().clone()
        parameter.grad = torch.zeros(8, 8) if zeros else None
        optimizer.step()
        seen.append((parameter.detach() - before).norm().item())
    return seen


def test_an_idle_matrix_would_move_at_full_speed_under_zero() -> None:
    zeros = moves(zeros=True)
    assert zeros[-1] == pytest.approx(zeros[0], rel=0.05)
    assert zeros[0] > 0
    assert moves(zeros=False) == [0.0] * 30
    with pytest.raises(ValueError, match=r"optimizer\.idle.*zero.*muon.*skip"):
        OptimizerSettings(name="muon", idle="zero")
