"""The paper's form of execution, linear combinations of all layers, computes what `skip` does."""

from itertools import combinations

import pytest
import torch

from raptr.models.contract import ModelConfig
from raptr.subnetworks import Subnetwork
from raptr.train.config import Config
from raptr.train.execution import make_execution
from tests.train.test_execution import CONFIG, CPU, DECODER, batch, build, gradients, settings

LAYERS = CONFIG.layers


@pytest.mark.parametrize("config", [CONFIG, DECODER], ids=["bert", "decoder"])
@pytest.mark.parametrize("micros", [1, 2])
def test_losses_and_gradients_are_those_of_skip(config: ModelConfig, micros: int) -> None:
    model = build(config=config)
    skip, shared = (make_execution(model, settings(execution=form), CPU) for form in ("skip", "shared"))
    for kept in [*combinations(range(LAYERS), 3), tuple(range(LAYERS)), ()]:
        scales = tuple(0.5 + layer if layer in kept else 0.0 for layer in range(LAYERS))
        subnetwork = Subnetwork(scales)
        loss, expected = gradients(model, skip, subnetwork, micros)
        other, found = gradients(model, shared, subnetwork, micros)
        torch.testing.assert_close(other, loss, rtol=1e-12, atol=0)
        assert found.keys() == expected.keys()  # idle layers have none
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-14, msg=name)


def test_groups_combine_their_own_layers_only() -> None:
    model = build(config=ModelConfig.resized(CONFIG, type(CONFIG.shape)(4, CONFIG.heads, CONFIG.parts)))
    skip = make_execution(model, settings(execution="skip"), CPU)
    shared = make_execution(model, settings(execution="shared"), CPU, groups=2)
    for kept in ((0, 2), (1, 2), (1, 3), (0, 1, 2, 3)):
        subnetwork = Subnetwork(tuple(float(layer in kept) for layer in range(4)))
        loss, expected = gradients(model, skip, subnetwork, 1)
        other, found = gradients(model, shared, subnetwork, 1)
        torch.testing.assert_close(other, loss, rtol=1e-12, atol=0)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-14, msg=name)
    with pytest.raises(AssertionError, match="group"):
        shared.backward(batch(), Subnetwork((1.0, 1.0, 0.0, 0.0)))


def test_it_is_a_setting() -> None:
    chosen = Config.read({"train": {"steps": 10, "execution": "shared"}})
    assert chosen.train.form(CPU) == "shared"
