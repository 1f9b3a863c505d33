"""Initial weights: what each kind of parameter starts with, and that nothing is guessed."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from raptr.models.bert.config import SIZES
from raptr.models.bert.model import Bert
from raptr.models.decoder.config import SIZES as DECODERS
from raptr.models.init import initialise
from raptr.models.roles import roles


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.zeros(2))


def test_roles_follow_module_and_name_not_dimension() -> None:
    norms = {"c": nn.LayerNorm((2, 2)), "d": nn.RMSNorm(2)}
    model = nn.ModuleDict({"a": nn.Embedding(3, 1), "b": nn.Linear(1, 2), **norms})
    assert roles(model) == {
        "a.weight": "embedding",
        "b.weight": "matrix",
        "b.bias": "bias",
        "c.weight": "gain",
        "c.bias": "bias",
        "d.weight": "gain",
    }
    assert list(roles(model)) == [name for name, _ in model.named_parameters()]


def test_a_shared_parameter_has_the_role_of_its_first_name() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
    model["head"].weight = model["tokens"].weight
    assert roles(model) == {"tokens.weight": "embedding", "head.bias": "bias"}


def test_norm_gains_are_one_in_every_kind_of_norm() -> None:
    model = nn.Sequential(nn.LayerNorm((2, 2)), nn.RMSNorm(3))
    initialise(model, 0)
    assert [set(parameter.flatten().tolist()) for parameter in model.parameters()] == [{1}, {0}, {1}]


def test_a_parameter_without_a_rule_is_named() -> None:
    with pytest.raises(ValueError, match=r"blocks\.scale.*Odd"):
        initialise(nn.ModuleDict({"blocks": Odd()}), 0)


def parameters(**settings: object) -> dict[str, torch.Tensor]:
    model = Bert(replace(SIZES["tiny"], mlp=1024, **settings))  # type: ignore[arg-type]
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("tokens.weight", 128**-0.5),
        ("embedding.positions.weight", 128**-0.5),
        ("head.dense.weight", 128**-0.5),
        ("blocks.3.qkv.weight", 128**-0.5),
        ("blocks.3.mlp_in.weight", 128**-0.5),
        ("blocks.3.attention_out.weight", (128 * 2 * 6) ** -0.5),
        ("blocks.3.mlp_out.weight", (1024 * 2 * 6) ** -0.5),
    ],
)
def test_deviations_of_fan_in(name: str, deviation: float) -> None:
    weight = parameters(init="fan-in")[name]
    assert weight.std().item() == pytest.approx(deviation, rel=0.02)
    assert abs(weight.mean().item()) < 4 * deviation / math.sqrt(weight.numel())
    assert parameters()[name].std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("tokens.weight", 0.02),
        ("embedding.positions.weight", 0.02),
        ("head.dense.weight", 128**-0.5),
        ("blocks.3.qkv.weight", 128**-0.5),
        ("blocks.3.attention_out.weight", 128**-0.5),
        ("blocks.3.mlp_in.weight", (2 / 1024) ** 0.5),
        ("blocks.3.mlp_out.weight", 128**-0.5),
    ],
)
def test_deviations_of_the_paper(name: str, deviation: float) -> None:
    weight = parameters(init="paper")[name]
    assert weight.std().item() == pytest.approx(deviation, rel=0.02)
    assert torch.allclose(weight, parameters()[name] * (deviation / 0.02))  # the same normal numbers


def test_the_papers_deviations_of_a_decoder() -> None:
    """Its gate and its input are one matrix of two maps, of 688 hidden units each; keys and values are fewer."""
    config = replace(DECODERS["mini"], kv_heads=2, tied=False, vocabulary=500, init="paper")
    made = dict(config.build(0).named_parameters())
    widths = {"qkv": 256, "attention_out": 256, "mlp_in": 688 / 2, "mlp_out": 256}
    for name, inverse in {
        **{f"blocks.0.{key}.weight": one for key, one in widths.items()},
        "output.weight": 256,
    }.items():
        assert made[name].std().item() == pytest.approx(inverse**-0.5, rel=0.02), name


@pytest.mark.parametrize("init", ["fan-in", "paper"])
def test_biases_start_at_zero_and_gains_at_one(init: str) -> None:
    made = parameters(init=init)
    for name, role in roles(Bert(SIZES["tiny"])).items():
        if role in ("bias", "gain"):
            assert set(made[name].tolist()) == {1 if role == "gain" else 0}, name


def test_golden_elements() -> None:
    made = {init: parameters(init=init) for init in ("bert", "fan-in")}
    golden = {
        ("bert", "tokens.weight"): [0.002638808684423566, -0.0025888446252793074, -0.0021270562428981066],
        ("bert", "blocks.5.mlp_out.weight"): [-0.03652554377913475, -0.014414013363420963, 0.023150304332375526],
        ("fan-in", "tokens.weight"): [0.011661997064948082, -0.01144118420779705, -0.009400349110364914],
        ("fan-in", "blocks.5.mlp_out.weight"): [-0.016475025564432144, -0.006501511204987764, 0.010442058555781841],
    }
    for (init, name), expected in golden.items():
        assert made[init][name].flatten()[[0, 1, -1]].tolist() == expected, (init, name)


def test_depth_counts_the_layers_of_the_model_as_built() -> None:
    shallow, deep = parameters(init="fan-in", layers=2), parameters(init="fan-in", layers=8)
    for name in shallow:
        ratio = 2.0 if set(name.split(".")) & set(Bert.OUTPUTS) else 1.0
        assert torch.equal(shallow[name], ratio * deep[name]), name  # a power of two, so exact


def test_a_bad_init_is_named() -> None:
    with pytest.raises(ValueError, match=r"model\.init.*'xavier'.*bert.*fan-in.*paper"):
        replace(SIZES["tiny"], init="xavier")  # type: ignore[arg-type]
