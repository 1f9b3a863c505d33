"""Initial weights: what each kind of parameter starts with, and that nothing is guessed."""

import pytest
import torch
from torch import nn

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
    assert [parameter.unique().tolist() for parameter in model.parameters()] == [[1], [0], [1]]


def test_a_parameter_without_a_rule_is_named() -> None:
    with pytest.raises(ValueError, match=r"blocks\.scale.*Odd"):
        initialise(nn.ModuleDict({"blocks": Odd()}), 0)
