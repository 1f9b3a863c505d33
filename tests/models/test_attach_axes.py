"""Heads and MLP parts of attached models: a part equals a physically smaller model, and the real one comes back."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from raptr.methods import make_method
from raptr.models.attach import Routed, attach, running
from raptr.subnetworks import Shape, Subnetwork

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


def part(*, scales: tuple[float, ...] = (1.0,) * LAYERS) -> Subnetwork:
    return Subnetwork(scales, **CHOICES["both"])


@every_family
def test_the_real_model_is_back_and_was_never_renamed(family: str) -> None:
    model = make(family).train()
    modules, attributes = dict(model.named_modules()), {m: dict(vars(m)) for m in model.modules()}
    weights, expected = copy.deepcopy(model.state_dict()), loss_of(model)
    with running(attach(model), part()):
        inside = dict(model.named_modules())
        loss_of(model)
    assert inside == dict(model.named_modules()) == modules
    broken = model.get_submodule(FAMILIES[family][4])[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), running(attach(model), part()):
        loss_of(model)
    broken.remove()
    for module, before in attributes.items():
        assert vars(module).keys() == before.keys()
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
        assert all(vars(module)[key] is value for key, value in before.items() if isinstance(value, int | bool | dict))
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)
    assert torch.equal(loss_of(model), expected)


@every_family
def test_all_heads_and_parts_are_the_whole_model(family: str) -> None:
    model = make(family)
    every = ((0, 1, 2, 3),) * LAYERS
    loss, found = run(attach(model), Subnetwork((1.0,) * LAYERS, heads=every, parts=every))
    expected = loss_of(model)
    assert loss == expected.item()
    wanted = gradients(model, expected)
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-14)


@every_family
@pytest.mark.parametrize("choice", CHOICES)
def test_only_the_kept_slices_are_multiplied(family: str, choice: str) -> None:
    def layers(subnetwork: Subnetwork) -> int:
        with FlopCounterMode(display=False) as counter, running(routed, subnetwork):
            torch.autograd.backward(loss_of(model))
        return int(counter.get_total_flops())

    model = make(family, attn_implementation="eager")
    routed, whole, none = attach(model), Subnetwork.full(LAYERS), Subnetwork((0.0,) * LAYERS)
    run(routed, part())  # what is looked at once, is looked at here
    fixed = layers(none)
    for scales in ((1.0, 1.0, 1.0), (0.0, 1.0, 1.0)):
        subnetwork = Subnetwork(scales, **CHOICES[choice])
        share = (layers(subnetwork) - fixed) / (layers(whole) - fixed)
        assert routed.layers_run(subnetwork, LENGTH) / LAYERS == pytest.approx(share, rel=1e-12)
        assert routed.layers_run(subnetwork) == routed.layers_run(subnetwork, LENGTH)
    assert routed.layers_run(Subnetwork((1.0, 0.0, 1.0))) == 2


@every_family
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_recomputed_blocks_have_the_same_gradients(family: str, reentrant: bool, inside: bool) -> None:
    model, subnetwork = make(family).train(), part(scales=(1.5, 0.0, 1.0))
    expected, wanted = run(attach(copy.deepcopy(model)), subnetwork)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    routed, recompute = attach(model), [vars(block)["_gradient_checkpointing_func"] for block in attach(model).blocks]
    with running(routed, subnetwork):
        loss = loss_of(model)
        found = gradients(model, loss) if inside else {}
    found = found or gradients(model, loss)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-12)
    assert [vars(block)["_gradient_checkpointing_func"] for block in routed.blocks] == recompute


# Dynamo itself reads `.grad` of the hidden states; it hides the warning, but not one that is an error.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@every_family
def test_compiled_blocks_are_not_compiled_again_for_another_choice(family: str) -> None:
    torch._dynamo.reset()
    model, counter = make(family).float(), CompileCounter()
    twin = copy.deepcopy(model)
    for block in attach(model).blocks:
        block.compile(backend=counter, fullgraph=True, dynamic=False)
    routed, graphs = attach(model), []
    for draw in range(5):
        heads, parts = ((draw % 3, 3),) * LAYERS, ((draw % 4,),) * LAYERS
        subnetwork = Subnetwork((1.0, draw % 2, 1.0), heads=heads, parts=parts, head_scale=2 + draw, part_scale=2)
        assert run(routed, subnetwork)[0] == pytest.approx(run(attach(twin), subnetwork)[0], abs=1e-5)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1] > 0


def test_the_first_look_leaves_no_trace() -> None:
    model = make("llama", attention_dropout=0.5, attn_implementation="eager").train()
    routed, state, tokens = attach(model), torch.get_rng_state(), torch.arange(2, 22).reshape(2, LENGTH)
    given = {"input_ids": tokens, "output_attentions": True, "output_hidden_states": True, "use_cache": True}
    with running(routed, part()):
        first = model(**given)
        torch.set_rng_state(state)
        second = model(**given)
    assert torch.equal(first.logits, second.logits)
    assert len(first.attentions) == len(second.attentions) == LAYERS
    assert len(first.hidden_states) == len(second.hidden_states) == LAYERS + 1
    assert first.past_key_values.get_seq_length() == LENGTH
    assert all(module.training for module in model.modules())
    for choice in CHOICES.values():
        subnetwork = Subnetwork((1.0,) * LAYERS, **choice)
        with running(routed, subnetwork), pytest.raises(ValueError, match=r"'model.layers'.*use_cache=False"):
            model(input_ids=tokens[:, :1], past_key_values=first.past_key_values, use_cache=True)


def test_a_method_is_made_for_the_shape() -> None:
    model = make("llama, grouped")
    routed = attach(model)
    assert routed.shape == Shape(layers=LAYERS, heads=4, parts=4)
    assert attach(model, mlp_parts=8).shape.parts == 8
    method = make_method("raptr", shape=routed.shape, steps=20, schedule="2-3", heads="2-4", parts="1-4")
    for step in range(3):
        subnetwork = method.subnetwork(step)
        assert subnetwork.heads is not None
        assert subnetwork.parts is not None
        _, found = run(routed, subnetwork)
        for layer in subnetwork.kept:
            query = found[f"model.layers.{layer}.self_attn.q_proj.weight"].view(4, -1)
            gate = found[f"model.layers.{layer}.mlp.gate_proj.weight"].view(4, -1)
            assert tuple(query.any(1).nonzero().flatten().tolist()) == subnetwork.heads[layer]
            assert tuple(gate.any(1).nonzero().flatten().tolist()) == subnetwork.parts[layer]
    assert method.subnetwork(19) == Subnetwork.full(LAYERS)


def small(kind: str) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_head=2, n_layer=LAYERS, vocab_size=40))
    if kind == "experts":
        settings: dict[str, Any] = {
            **sizes,
            "num_hidden_layers": LAYERS,
            "num_local_experts": 2,
            "num_key_value_heads": 2,
        }
        return hf.MixtralForCausalLM(hf.MixtralConfig(**settings))
    if kind == "cross-attention":
        config = hf.BertConfig(**sizes, num_hidden_layers=LAYERS, is_decoder=True, add_cross_attention=True)
        return hf.BertLMHeadModel(config)
    if kind == "norm over all heads":
        return hf.Olmo2ForCausalLM(hf.Olmo2Config(**sizes, num_hidden_layers=LAYERS, pad_token_id=0))
    assert kind == "wrapped"
    model = make("llama")
    for layer in range(LAYERS):
        model.model.layers[layer] = checkpoint_wrapper(model.model.layers[layer])
    return model


@pytest.mark.parametrize("kind", ["gpt2", "experts", "cross-attention", "norm over all heads", "wrapped"])
def test_of_other_blocks_only_whole_layers_run(kind: str) -> None:
    model = small(kind)
    routed = attach(model)
    assert routed.shape == Shape(layers=LAYERS)
    for axis, subnetwork in (
        ("heads", Subnetwork((1.0,) * LAYERS, heads=((0,),) * LAYERS)),
        ("parts", Subnetwork((1.0,) * LAYERS, part_scale=2.0)),
    ):
        kind = type(routed.blocks[0]).__name__
        with pytest.raises(ValueError, match=f"only depth.*{kind}.*setting {axis}"), running(routed, subnetwork):
            pass
    with pytest.raises(ValueError, match=r"mlp_parts is 2.*only depth"):
        attach(model, mlp_parts=2)
    with running(routed, Subnetwork((1.0, 0.0, 1.0))):
        loss_of(model)


class OwnAttention(nn.Module):
    """An attention that counts its heads by the width that it gets, or by itself and would then mix positions."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.head_dim, self.heads = 4, heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (len(x), x.shape[1] if self.heads < 0 else -1, self.heads, self.head_dim)
        q, k, v = (one(x).view(shape).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        o = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        out: Tensor = self.o_proj(o.reshape(*x.shape[:2], -1))
        return out


class OwnBlock(nn.Module):
    """A block whose units are independent of each other, or not."""

    def __init__(self, independent: bool) -> None:
        super().__init__()
        self.attention, self.independent = OwnAttention(-1 if independent else 4), independent
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(16, 32), "fc2": nn.Linear(32, 16)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        units = self.mlp["fc1"](x)
        y: Tensor = x + self.mlp["fc2"](units.tanh() if self.independent else units.softmax(-1))
        return y


class OwnModel(nn.Module):
    def __init__(self, independent: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(OwnBlock(independent) for _ in range(2))
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("axis", ["heads", "parts"])
def test_blocks_whose_units_are_not_independent_are_found_out(axis: str) -> None:
    model, x = OwnModel(independent=False), torch.randn(2, 8, 16)
    routed, expected = attach(model), model(x)
    assert routed.shape == Shape(layers=2, heads=4, parts=4)
    kept: dict[str, Any] = {axis: ((0, 2), (1, 3))}
    sentence = f"{axis}.*only depth.*OwnBlock.*setting {axis}"
    with running(routed, Subnetwork((1.0, 1.0), **kept)), pytest.raises(ValueError, match=sentence):
        model(x)
    assert torch.equal(model(x), expected)


def test_a_model_of_ones_own_may_recompute_its_blocks() -> None:
    model, x = OwnModel(independent=True), torch.randn(2, 8, 16, requires_grad=True)
    subnetwork, found = Subnetwork((1.0, 1.0), heads=((0, 2), (1, 3)), parts=((0,), (2,))), []
    for model.reentrant in (None, False, True):
        with running(attach(model), subnetwork):
            loss = model(x).square().sum()
        found.append(gradients(model, loss))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[name], found[0][name]) for name in other)


def test_settings_that_do_not_fit_the_blocks_are_refused() -> None:
    model = make("bert")
    for given in (3, 0, True, "4"):
        with pytest.raises(ValueError, match=rf"mlp_parts is {given!r}.*{MLP}"):
            attach(model, mlp_parts=given)  # type: ignore[arg-type]
    more = Subnetwork((1.0,) * LAYERS, heads=((0, 4),) * LAYERS)
    with pytest.raises(ValueError, match=r"4 heads.*'bert.encoder.layer'"), running(attach(model), more):
        pass
    odd = make("llama", intermediate_size=30, num_key_value_heads=1)
    assert attach(odd).shape == Shape(layers=LAYERS)
    assert attach(odd, mlp_parts=3).shape.parts == 3
    with pytest.raises(ValueError, match=r"parts.*30.*mlp_parts"):
        attach(odd).need("parts", "parts is '1-2'")
    with pytest.raises(ValueError, match=r"heads is '1-2'.*share"):
        attach(odd).need("heads", "heads is '1-2'")
