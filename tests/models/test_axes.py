"""Subnetworks on every axis, and on several at once, equal physically smaller networks: loss and gradients, float64."""

from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from raptr.data.batch import Batch
from raptr.methods import make_method
from raptr.models.bert.config import BertConfig
from raptr.models.contract import ModelConfig
from raptr.models.decoder.config import DecoderConfig
from raptr.models.layout import by_unit, chosen
from raptr.models.model import Model
from raptr.subnetworks import Shape, Subnetwork
from raptr.train.config import TrainSettings
from raptr.train.execution import make_execution

ROW: dict[str, Any] = {"layers": 4, "width": 24, "head_size": 4, "mlp": 32, "vocabulary": 50, "positions": 16}
CONFIGS: dict[str, ModelConfig] = {
    "bert": BertConfig(**ROW, heads=4),
    "decoder": DecoderConfig(**ROW, heads=4),
    "grouped decoder": DecoderConfig(**ROW, heads=8, kv_heads=4, tied=False),
}
SIZES: dict[str, Any] = {"schedule": "2-3-4", "heads": "1-3-4", "parts": "1-2-4"}
AXES = [axes for count in (1, 2, 3) for axes in combinations(SIZES, count)]
CPU = torch.device("cpu")
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, 50, (2, 3, 16), generator=generator)
    return Batch(tokens, None, labels)


def build(config: ModelConfig) -> Model:
    model = config.build(seed=3).double()
    with torch.no_grad():  # biases and gains at their start would hide mistakes
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    return model


def gradients(model: Model, subnetwork: Subnetwork, form: str) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    settings = TrainSettings(steps=10, batch=3, execution=form)  # type: ignore[arg-type]
    loss = make_execution(model, settings, CPU).backward(batch(), subnetwork)
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("form", ["skip", "gather"])
@pytest.mark.parametrize("axes", AXES, ids="-".join)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_subnetwork_is_a_smaller_network(config: ModelConfig, axes: tuple[str, ...], form: str) -> None:
    given = {"schedule": "4-4-4", **{axis: SIZES[axis] for axis in axes}}
    method = make_method("raptr", shape=config.shape, steps=30, width_exponent=0, **given)
    large = build(config)
    for step in (0, 7, 12, 25):  # two of the first stage, the second and the last
        subnetwork = method.subnetwork(step)
        counts = {"heads": config.shape.heads, "parts": config.shape.parts, **subnetwork.counts}
        small = config.resized(Shape(counts["size"], counts["heads"], counts["parts"])).build(0).double()
        assert counts["size"] == 4 or "schedule" in axes

        def cut(name: str, tensor: Tensor, whole: Subnetwork = subnetwork) -> Tensor:
            _, _, key = name.split(".", 2) if name.startswith("blocks.") else ("", "", "")
            place = large.layout.get(key)
            kept = None if place is None else getattr(whole, place.axis)
            if place is None or kept is None:
                return tensor
            layer = whole.kept[int(name.split(".")[1])]
            return chosen(tensor, place, getattr(config.shape, place.axis), torch.tensor(kept[layer]))

        def origin(name: str, whole: Subnetwork = subnetwork) -> str:
            words = name.split(".")
            return ".".join(["blocks", str(whole.kept[int(words[1])]), *words[2:]]) if words[0] == "blocks" else name

        originals = dict(large.named_parameters())
        with torch.no_grad():
            for name, parameter in small.named_parameters():
                parameter.copy_(cut(name, originals[origin(name)]))
        loss, found = gradients(large, subnetwork, form)
        expected_loss, expected = gradients(small, Subnetwork.full(counts["size"]), "skip")
        assert_close(loss, expected_loss)
        assert found.keys() == {origin(name) for name in expected}
        for name, gradient in expected.items():
            assert_close(cut(name, found[origin(name)]), gradient)


class Products(TorchDispatchMode):
    """torch's flop counter without its tracking of modules, which cannot follow `torch.autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@pytest.mark.parametrize("form", ["skip", "gather"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_both_forms_make_the_smaller_networks_products(config: ModelConfig, form: str) -> None:
    method = make_method("raptr", shape=config.shape, steps=30, **SIZES)
    model, settings = build(config), TrainSettings(steps=10, batch=3, execution=form)  # type: ignore[arg-type]
    run = make_execution(model, settings, CPU)

    def counted(run: Any, subnetwork: Subnetwork) -> int:
        with sdpa_kernel(SDPBackend.MATH), Products() as products:
            run.backward(batch(), subnetwork)
        return int(products.flops)

    for step in (0, 15, 29):
        counts = {"heads": config.shape.heads, "parts": config.shape.parts, **method.subnetwork(step).counts}
        shape = Shape(counts["size"], counts["heads"], counts["parts"])
        small = make_execution(config.resized(shape).build(0).double(), settings, CPU)
        model.zero_grad(set_to_none=True)
        assert counted(run, method.subnetwork(step)) == counted(small, Subnetwork.full(shape.layers))


@pytest.mark.parametrize("name", ["qkv.weight", "qkv.bias", "attention_out.weight"])
def test_the_gradient_of_a_choice_is_its_transpose(name: str) -> None:
    config = replace(CONFIGS["bert"], layers=1)
    model = build(config)
    tensor, cut, index = dict(model.blocks[0].named_parameters())[name], model.layout[name], torch.tensor([0, 3])
    part = chosen(tensor, cut, 4, index)
    seen = torch.randn_like(part)
    (found,) = torch.autograd.grad(part, tensor, seen)
    plain = by_unit(tensor, cut, 4).index_select(cut.dim + 1, index).flatten(cut.dim, cut.dim + 2)
    (expected,) = torch.autograd.grad(plain, tensor, seen)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert_close((part * seen).sum(), (tensor * found).sum())
    assert_close(chosen(found, cut, 4, index), seen)
