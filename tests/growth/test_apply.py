"""Heads and MLP parts added to real models: every slice of every tensor, and of what an optimizer keeps of it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from raptr.growth.apply import grow
from raptr.growth.plan import Growth, added
from raptr.models.bert.config import SIZES as BERTS
from raptr.models.contract import ModelConfig
from raptr.models.decoder.config import SIZES as DECODERS
from raptr.models.model import Model
from raptr.subnetworks import Shape

SMALL = {"layers": 2, "width": 10, "heads": 6, "head_size": 2, "mlp": 12, "vocabulary": 20, "positions": 4}
BERT, DECODER = replace(BERTS["tiny"], **SMALL), replace(DECODERS["tiny"], **SMALL)  # type: ignore[arg-type]
GROUPED = replace(DECODER, kv_heads=3)
every_family = pytest.mark.parametrize("config", [BERT, DECODER, GROUPED], ids=["bert", "decoder", "grouped"])
K, PART = 2, 3  # the sizes of a head and of an MLP part


def weights(model: Model) -> dict[str, Tensor]:
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def with_state(model: Model) -> dict[str, Tensor]:
    """A model's weights, and what AdamW and Muon keep of them, each of values that tell where it stood."""
    tensors = weights(model)
    for number, (name, weight) in enumerate(list(tensors.items())):
        parameter = name.removeprefix("model.")
        place = torch.arange(1.0, 1 + weight.numel()).view_as(weight)
        for kind, sign in (("exp_avg", 1), ("momentum_buffer", -1)):
            tensors[f"{kind}.{parameter}"] = sign * (place + 1000 * number)
        tensors[f"step.{parameter}"] = torch.tensor(50.0 + number)
    return tensors


def units(model: Model, name: str, tensor: Tensor) -> list[Tensor]:
    """The heads or MLP parts of a layer's tensor, one by one; written out for each tensor of both families."""
    shape, before = model.config.shape, {"qkv": -1, "mlp_in": -1, "attention_out": 0, "mlp_out": 0}
    module = name.split(".")[-2]
    count, rows = (shape.heads, K) if module in ("qkv", "attention_out") else (shape.parts, PART)
    if before[module]:  # blocks of all units below one another: (Q, K, V) or (queries of the groups, K, V); (gate, up)
        return list(tensor.reshape(-1, count, rows, *tensor.shape[1:]).unbind(1))
    return list(tensor.reshape(tensor.shape[0], -1, count, rows).unbind(2))


def is_cut(name: str) -> bool:
    return ".blocks." in name and ("qkv" in name or "mlp_in" in name or name.endswith("_out.weight"))


@every_family
@pytest.mark.parametrize("axes", [("heads",), ("parts",), ("heads", "parts")])
def test_old_units_keep_everything_and_new_ones_start_anew(config: ModelConfig, axes: tuple[str, ...]) -> None:
    old = replace(config.shape, **dict.fromkeys(axes, 2))
    plan = Growth((0, 1), heads=added(old.heads, config.shape.heads), parts=added(old.parts, config.shape.parts))
    small, large, fresh = config.resized(old).build(seed=0), config.build(seed=0), config.build(seed=0)
    before = with_state(small)
    after = {**grow(plan, before, weights(large), large), **weights(large)}
    assert after.keys() == before.keys()
    initial, widened = weights(fresh), set()
    for name, tensor in after.items():
        grown = is_cut(name) and ("heads" if "qkv" in name or "attention_out" in name else "parts") in axes
        if not grown:
            assert torch.equal(tensor, before[name]), name
            continue
        widened.add(name)
        if name.startswith("step."):
            weight = initial[name.replace("step.", "model.", 1)]
            assert sorted(tensor.shape)[:-1] == [1] * (weight.dim() - 1)  # one count for each row
            tensor, had = tensor.expand_as(weight), before[name].expand_as(before[name.replace("step.", "model.", 1)])
        else:
            had = before[name]
        now, then = units(large, name, tensor), units(small, name, had)
        assert [unit for unit in range(2) if not torch.equal(now[unit], then[unit])] == [], name
        for unit in range(2, len(now)):
            zero = torch.zeros_like(now[unit])
            expected = units(fresh, name, initial[name])[unit] if name.startswith("model.") else zero
            assert torch.equal(now[unit], expected), name
    assert len(widened) % 4 == 0
    assert widened


def test_a_second_growth_keeps_every_count() -> None:
    counts = {}
    before = with_state(BERT.resized(Shape(2, 2, 2)).build(seed=0))
    for heads in (3, 6):
        large = BERT.resized(Shape(2, heads, 2)).build(seed=0)
        plan = Growth((0, 1), heads=added({3: 2, 6: 3}[heads], heads))
        state = grow(plan, before, weights(large), large)
        counts = {name: tensor for name, tensor in state.items() if name.startswith("step.blocks.0.")}
        for name in ("step.blocks.0.qkv.weight", "step.blocks.0.qkv.bias", "step.blocks.0.attention_out.weight"):
            counts[name] += 10  # steps after the growth
        before = {**state, **weights(large)}
    bias, out = counts["step.blocks.0.qkv.bias"], counts["step.blocks.0.attention_out.weight"]
    first = with_state(BERT.build(seed=0))  # the count of a parameter is the same whatever the number of heads
    assert bias.tolist() == [*[first["step.blocks.0.qkv.bias"] + 20] * 4, 20, 20, *[10] * 6] * 3
    assert out.tolist() == [[*[first["step.blocks.0.attention_out.weight"] + 20] * 4, 20, 20, *[10] * 6]]
    assert counts["step.blocks.0.mlp_in.weight"].dim() == 0


@pytest.mark.parametrize("moments", ["copy", "zero", "reset"])
def test_a_new_layer_gets_units_too(moments: str) -> None:
    small, large, fresh = DECODER.resized(Shape(1, 4, 4)).build(seed=0), DECODER.build(seed=0), DECODER.build(seed=0)
    before = with_state(small)
    plan = Growth((0, 0), moments=moments, heads=added(4, 6))  # type: ignore[arg-type]
    state = grow(plan, before, weights(large), large)
    for layer in range(2):
        name = f"model.blocks.{layer}.qkv.weight"
        now, then = units(large, name, weights(large)[name]), units(small, name, before["model.blocks.0.qkv.weight"])
        assert all(torch.equal(a, b) for a, b in zip(now, then, strict=False))
        assert torch.equal(now[5], units(fresh, name, weights(fresh)[name])[5])
        kept = moments == "copy" or (moments == "zero" and layer == 0)
        assert (f"step.blocks.{layer}.qkv.weight" in state) == kept
        if kept:
            assert not units(large, name, state[f"exp_avg.blocks.{layer}.qkv.weight"])[5].any()
    assert ("exp_avg.tokens.weight" in state) == (moments != "reset")


def test_units_may_come_between_others() -> None:
    small, large = BERT.resized(Shape(2, 6, 2)).build(seed=0), BERT.resized(Shape(2, 6, 3)).build(seed=1)
    before = with_state(small)
    state = grow(Growth((0, 1), parts=(0, None, 1)), before, weights(large), large)
    name = "blocks.1.mlp_out.weight"
    now, then = (units(model, name, model.get_parameter(name).detach()) for model in (large, small))
    assert torch.equal(now[0], then[0])
    assert torch.equal(now[2], then[1])
    assert state[f"step.{name}"].squeeze().bool().tolist() == [True] * 3 + [False] * 3 + [True] * 3
