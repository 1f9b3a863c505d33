"""`residual_multiplier` and `norm_scaling` equal the plain model with these numbers in its weights."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from raptr.data import TokenStore
from raptr.data.batch import Batch
from raptr.models.bert.config import BertConfig
from raptr.models.contract import ModelConfig
from raptr.models.decoder.config import DecoderConfig
from raptr.models.model import Model
from raptr.subnetworks import Subnetwork
from raptr.train.config import Config, TrainSettings, merged
from raptr.train.execution import make_execution
from tests.walks import scores

MULTIPLIER = 0.3
ROW: dict[str, Any] = {"layers": 3, "width": 24, "head_size": 6, "mlp": 32, "vocabulary": 50, "positions": 16}
CONFIGS: dict[str, ModelConfig] = {
    "bert": BertConfig(**ROW, heads=4),
    "decoder": DecoderConfig(**ROW, heads=8, kv_heads=4, tied=False),
}
HEADS, PARTS = ((0, 2), (), (1, 2, 3)), ((3,), (), (0, 1))
SUBNETWORKS = {
    "full": Subnetwork.full(3),
    "scaled layers": Subnetwork((0.5, 0.0, 2.0)),
    "scaled branches": Subnetwork((0.5, 1.0, 0.0), scaled="branches"),
    "heads and parts": Subnetwork((1.0, 0.0, 1.5), heads=HEADS, parts=PARTS, head_scale=1.4, part_scale=2.0),
}
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def batch() -> Batch:
    tokens, labels = torch.randint(0, 50, (2, 4, 16), generator=torch.Generator().manual_seed(1))
    return Batch(tokens, None, labels)


def build(config: ModelConfig) -> Model:
    model = config.build(seed=3).double()
    with torch.no_grad():  # biases and gains at their start would hide mistakes
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.2)
    return model


def factor(name: str) -> float:
    """What a plain model's tensor of this name is multiplied by to compute the same."""
    words = name.split(".")
    if words[0] != "blocks":
        return 1.0
    if words[2] in ("attention_norm", "mlp_norm"):
        return 1 / math.sqrt(int(words[1]) + 1)
    return MULTIPLIER if words[2] in ("attention_out", "mlp_out") else 1.0


@pytest.mark.parametrize("form", ["skip", "gather"])
@pytest.mark.parametrize("subnetwork", SUBNETWORKS.values(), ids=SUBNETWORKS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_loss_and_gradients_are_those_of_the_folded_model(
    config: ModelConfig, subnetwork: Subnetwork, form: str
) -> None:
    model = build(replace(config, residual_multiplier=MULTIPLIER, norm_scaling=True))
    plain = build(config)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.mul_(factor(name))
    loss, gradients = run(model, subnetwork, form)
    expected_loss, expected = run(plain, subnetwork, "skip")
    assert_close(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(gradients[name], gradient * factor(name))


def run(model: Model, subnetwork: Subnetwork, form: str) -> tuple[Tensor, dict[str, Tensor]]:
    settings = TrainSettings(steps=10, batch=4, execution=form)  # type: ignore[arg-type]
    loss = make_execution(model, settings, torch.device("cpu")).backward(batch(), subnetwork)
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", CONFIGS)
def test_the_export_has_the_numbers_in_its_weights(family: str, stores: dict[str, TokenStore]) -> None:
    vocabulary = stores[family].vocabulary
    model = build(
        replace(CONFIGS[family], vocabulary=vocabulary.size, residual_multiplier=MULTIPLIER, norm_scaling=True)
    )
    exporter = model.config.exporter()
    assert exporter is not None
    stock: Any = exporter.convert(model, Subnetwork((1.0, 0.0, 1.0)), vocabulary)
    tokens = torch.randint(5, vocabulary.size, (2, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = scores(model, Batch(tokens, None, tokens), Subnetwork((1.0, 0.0, 1.0)))
        assert_close(stock.double()(input_ids=tokens).logits, ours, rtol=1e-5, atol=1e-5)


def test_another_size_keeps_them() -> None:
    chosen = {"residual_multiplier": MULTIPLIER, "norm_scaling": True}
    later = merged({"model": {**chosen, "layers": 3}}, {"model": {"size": "mini"}})
    assert later["model"] == {**chosen, "size": "mini"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"residual_multiplier": 0}, "model.residual_multiplier is 0.0; a number above 0 and up to 1 is allowed"),
        ({"residual_multiplier": 1.5}, "model.residual_multiplier is 1.5; a number above 0"),
        ({"norm_scaling": "deep"}, "model.norm_scaling is 'deep'; true or false"),
    ],
)
def test_what_is_not_allowed_is_refused(given: dict[str, Any], message: str) -> None:
    config = {"model": given, "method": {"name": "full"}, "train": {"steps": 4, "batch": 2}}
    with pytest.raises(ValueError, match=message):
        Config.read(config).model.build(vocabulary=50, positions=16)
