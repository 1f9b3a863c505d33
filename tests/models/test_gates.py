"""Heads and MLP parts under gates: what a gate multiplies, and that a gate of 0 leaves nothing of them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from raptr.data.batch import Batch
from raptr.models.bert.config import SIZES as BERTS
from raptr.models.contract import ModelConfig
from raptr.models.decoder.config import SIZES as DECODERS
from raptr.models.model import Model
from raptr.subnetworks import Subnetwork

SMALL = {"layers": 2, "width": 24, "heads": 6, "head_size": 4, "mlp": 16, "vocabulary": 40, "positions": 12}
BERT, DECODER = replace(BERTS["tiny"], **SMALL), replace(DECODERS["tiny"], **SMALL)  # type: ignore[arg-type]
GROUPED = replace(DECODER, kv_heads=3)
every_family = pytest.mark.parametrize("config", [BERT, DECODER, GROUPED], ids=["bert", "decoder", "grouped"])


def build(config: ModelConfig) -> Model:
    """A model in float64 whose weights are large enough to matter, biases too."""
    model = config.build(seed=0).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.sin(torch.arange(1.0, 1 + parameter.numel(), dtype=torch.float64) * (number + 2))
            parameter.add_(noise.view_as(parameter) / 4)
    return model


def loss_and_gradients(model: Model, subnetwork: Subnetwork) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = torch.arange(24).view(2, 12) % 40
    model.zero_grad(set_to_none=True)
    loss = model(Batch(tokens, torch.tensor([[1, 7], [2, 9]]), tokens[:, :2]), model.inputs(subnetwork))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@every_family
def test_a_gate_of_0_is_a_model_without_the_unit(config: ModelConfig) -> None:
    model, heads = build(config), config.shape.heads
    kept = Subnetwork((1.0, 1.0), heads=((0, 1),) * 2, parts=((0, 2),) * 2)
    gated = Subnetwork((1.0, 1.0), head_gates=(1.0, 1.0, *[0.0] * (heads - 2)), part_gates=(1.0, 0.0, 1.0, 0.0))
    loss, expected = loss_and_gradients(model, kept)
    found, gradients = loss_and_gradients(model, gated)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)  # none for what the gate closes
    whole, _ = loss_and_gradients(model, Subnetwork.full(2))
    assert abs(whole - loss) > 1e-3


@every_family
def test_gates_multiply_queries_keys_and_values_and_what_enters_the_activation(config: ModelConfig) -> None:
    model, heads = build(config), config.shape.heads
    head_gates, part_gates = (1.0, 0.25, *[1.0] * (heads - 2)), (1.0, 1.0, 0.5, 0.125)
    found, _ = loss_and_gradients(model, Subnetwork((1.0, 1.0), head_gates=head_gates, part_gates=part_gates))
    queries = config.heads // heads
    with torch.no_grad():
        for block in model.blocks:
            for tensor in block.get_submodule("qkv").parameters():
                of_head = tensor.view(queries + 2, heads, config.head_size, -1)
                of_head[:, 1] *= 0.25
            for tensor in block.get_submodule("mlp_in").parameters():
                of_part = tensor.view(-1, 4, config.mlp // 4, *tensor.shape[1:])  # a decoder's gate, then its input
                of_part[:, 2] *= 0.5
                of_part[:, 3] *= 0.125
    expected, _ = loss_and_gradients(model, Subnetwork.full(2))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
