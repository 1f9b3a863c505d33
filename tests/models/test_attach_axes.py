"""Heads and MLP parts of attached models: a part equals a physically smaller model, and the real one comes back."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from raptr.models.attach import Routed, attach, running
from raptr.subnetworks import Subnetwork

LAYERS, LENGTH, WIDTH, HEAD, MLP = 3, 10, 24, 6, 32
COMMON = {"hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "vocab_size": 40}
BERT = {**COMMON, "num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {**COMMON, "head_dim": HEAD, "use_cache": False, "attention_bias": True, "mlp_bias": True}
# The class, its settings, groups of heads, query heads of each, and where the layers are.
FAMILIES: dict[str, tuple[Any, dict[str, Any], int, int, str]] = {
    "bert": (hf.BertForMaskedLM, BERT, 4, 1, "bert.encoder.layer"),
    "llama": (hf.LlamaForCausalLM, {**LLAMA, "num_attention_heads": 4}, 4, 1, "model.layers"),
    "llama, grouped": (
        hf.LlamaForCausalLM,
        {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4},
        4,
        2,
        "model.layers",
    ),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
# Where the linear maps are in a layer: by axis, whether the axis is in the rows or the columns.
MAPS = {
    r"attention\.self\.(query|key|value)|self_attn\.[qkv]_proj": ("heads", 0),
    r"attention\.output\.dense|self_attn\.o_proj": ("heads", 1),
    r"intermediate\.dense|mlp\.(gate|up)_proj": ("parts", 0),
    r"output\.dense|mlp\.down_proj": ("parts", 1),
}
HEADS, PARTS = ((0, 2), (1, 3), (1, 2)), ((3,), (0,), (2,))
CHOICES: dict[str, dict[str, Any]] = {
    "heads": {"heads": HEADS, "head_scale": 2**0.5},
    "parts": {"parts": PARTS, "part_scale": 2.0},
    "both": {"heads": HEADS, "head_scale": 2.0, "parts": PARTS, "part_scale": 4.0},
}


def make(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model_class, given, *_ = FAMILIES[family]
    model = model_class(model_class.config_class(**{**given, **settings})).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def loss_of(model: nn.Module) -> Tensor:
    tokens = torch.arange(2, 22).reshape(2, LENGTH)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.autograd.backward(loss)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def run(routed: Routed, subnetwork: Subnetwork) -> tuple[float, dict[str, Tensor]]:
    with running(routed, subnetwork):
        loss = loss_of(routed.model)
    return loss.item(), gradients(routed.model, loss)


def cuts(family: str, subnetwork: Subnetwork) -> Iterator[tuple[int, str, int, Any, float]]:
    """For each linear map of a running layer: layer, name, the dimension that is cut, what is kept, and the scale."""
    path = FAMILIES[family][4]
    for layer in subnetwork.kept:
        for name in dict(make(family).get_submodule(f"{path}.{layer}").named_modules()):
            for pattern, (axis, dim) in MAPS.items():
                if re.fullmatch(pattern, name):
                    kept = getattr(subnetwork, axis)
                    scale = subnetwork.head_scale if axis == "heads" else subnetwork.part_scale
                    yield layer, name, dim, None if kept is None else kept[layer], scale if dim == 1 else 1.0
                    break


def kept_rows(size: int, kept: tuple[int, ...]) -> list[int]:
    """The rows of the kept ones of four units."""
    return [row for unit in kept for row in range(unit * size // 4, (unit + 1) * size // 4)]


def smaller(family: str, subnetwork: Subnetwork, model: nn.Module) -> tuple[nn.Module, dict[str, tuple[str, Any]]]:
    """A model with only what runs, and by its parameters' names: those of the whole, and what of them it has."""
    path = FAMILIES[family][4]
    heads = 4 if subnetwork.heads is None else len(subnetwork.heads[subnetwork.kept[0]])
    parts = 4 if subnetwork.parts is None else len(subnetwork.parts[subnetwork.kept[0]])
    settings: dict[str, Any] = {"num_hidden_layers": subnetwork.size, "intermediate_size": MLP // 4 * parts}
    if family != "bert":
        each = FAMILIES[family][3]
        settings |= {"num_attention_heads": heads * each, "num_key_value_heads": heads}
    small: Any = make(family, **settings)
    if family == "bert":  # whose configuration has no size of a head
        for layer in small.bert.encoder.layer:
            attention, width = layer.attention.self, heads * HEAD
            attention.query, attention.key, attention.value = (nn.Linear(WIDTH, width).double() for _ in range(3))
            attention.num_attention_heads, attention.all_head_size = heads, width
            layer.attention.output.dense = nn.Linear(width, WIDTH).double()
    origin: dict[str, tuple[str, Any]] = {name: (name, None) for name, _ in small.named_parameters()}
    for name in origin:
        if match := re.match(rf"{re.escape(path)}\.(\d+)(\..*)", name):
            origin[name] = (f"{path}.{subnetwork.kept[int(match[1])]}{match[2]}", None)
    for layer, name, dim, kept, scale in cuts(family, subnetwork):
        for kind in ("weight", "bias"):
            mine = f"{path}.{subnetwork.kept.index(layer)}.{name}.{kind}"
            if mine in origin:
                whole = f"{path}.{layer}.{name}.{kind}"
                cut = kept is not None and (kind == "weight" or dim == 0)
                rows = kept_rows(model.get_parameter(whole).shape[dim], kept) if cut else None
                origin[mine] = (whole, (dim, rows, scale if kind == "weight" else 1.0))
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            parameter.copy_(of_whole(model.get_parameter(origin[name][0]), origin[name][1]))
    return small, origin


def of_whole(tensor: Tensor, cut: Any) -> Tensor:
    if cut is None:
        return tensor
    dim, rows, scale = cut
    part = tensor if rows is None else tensor.index_select(dim, torch.tensor(rows))
    return part * float(scale)


@every_family
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (0.0, 1.0, 0.0)])
def test_a_part_is_a_physically_smaller_model(family: str, choice: str, scales: tuple[float, ...]) -> None:
    model, subnetwork = make(family), Subnetwork(scales, **CHOICES[choice])
    small, origin = smaller(family, subnetwork, model)
    expected = loss_of(small)
    wanted = gradients(small, expected)
    loss, found = run(attach(model), subnetwork)
    assert loss == pytest.approx(expected.item(), abs=1e-10)
    assert loss != pytest.approx(loss_of(model).item(), abs=1e-3)
    assert found.keys() == {whole for whole, _ in origin.values()}
    for name, (whole, cut) in origin.items():
        scale, rest = (1.0, found[whole].clone()) if cut is None else (cut[2], found[whole].clone())
        # What the smaller model has of a weight is the scale times it; all the rest has a gradient of zero.
        kept = of_whole(found[whole], None if cut is None else (*cut[:2], 1.0))
        torch.testing.assert_close(kept, scale * wanted[name], rtol=0, atol=1e-10)
        if cut is not None and cut[1] is not None:
            rest.index_fill_(cut[0], torch.tensor(cut[1]), 0.0)
            assert not rest.any()
            assert found[whole].any()
