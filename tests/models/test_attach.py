"""Attached models: a subnetwork equals a physically smaller model, costs what it runs and leaves no trace."""

import copy
import importlib
import math
import pickle
import re
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from raptr.methods import METHODS, Method, make_method
from raptr.models.attach import attach, running
from raptr.subnetworks import Shape, Subnetwork

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}
ENCODER = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {**SIZES, "use_cache": False}
GPT2: dict[str, Any] = {
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 40,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": False,
}
GPT2 |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
# These use a key-value cache, as they do by default.
GPTJ = {**GPT2, "rotary_dim": 4, "use_cache": True}
TOKENS = {"hidden_size": 16, "vocab_size": 40, "bos_token_id": 0, "eos_token_id": 0}
FALCON = {**TOKENS, "num_attention_heads": 2}
BLOOM = {**TOKENS, "n_head": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
VIT = {**{key: SIZES[key] for key in list(SIZES)[:3]}, "hidden_dropout_prob": 0.0, "image_size": 8, "patch_size": 4}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 40, "decoder_start_token_id": 0}
FAMILIES: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "bert": ("bert.encoder.layer", hf.BertForMaskedLM, hf.BertConfig, ENCODER),
    "roberta": (
        "roberta_prelayernorm.encoder.layer",
        hf.RobertaPreLayerNormForMaskedLM,
        hf.RobertaPreLayerNormConfig,
        ENCODER,
    ),
    "llama": ("model.layers", hf.LlamaForCausalLM, hf.LlamaConfig, LLAMA),
    "gpt2": ("transformer.h", hf.GPT2LMHeadModel, hf.GPT2Config, GPT2),
    "falcon": ("transformer.h", hf.FalconForCausalLM, hf.FalconConfig, FALCON),
    "bloom": ("transformer.h", hf.BloomForCausalLM, hf.BloomConfig, BLOOM),
    "gptj": ("transformer.h", hf.GPTJForCausalLM, hf.GPTJConfig, GPTJ),
    "vit": ("vit.layers", hf.ViTForImageClassification, hf.ViTConfig, VIT),
    "t5": ("encoder.block", hf.T5ForConditionalGeneration, hf.T5Config, T5),
}
COUNTS = {"gpt2": "n_layer", "gptj": "n_layer", "bloom": "n_layer", "t5": "num_layers"}
PATHS = {"plain": "blocks"} | {family: FAMILIES[family][0] for family in FAMILIES if family != "t5"}
CAUSAL = ("llama", "gpt2", "falcon", "bloom", "gptj")
every_family = pytest.mark.parametrize("family", PATHS)


class Block(nn.Module):
    """A residual block that counts its calls, in whichever shape a test asks it to return."""

    seen: Tensor

    def __init__(self, returns: str = "tensor", dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(dropout)
        self.returns, self.calls = returns, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, flag: bool = False) -> Any:
        if not torch.compiler.is_compiling():
            self.calls += 1
            self.seen += 1
        y = x.add_(1) if self.returns == "in place" else x + self.dropout(torch.tanh(self.linear(x)))
        shapes = {"narrow": y[..., :4], "dict": {"x": y}, "tuple": (y, y, None)}
        return shapes["tuple"] if flag else shapes.get(self.returns, y)


class Plain(nn.Module):
    """A model of residual blocks that calls them with keywords alone, as some models do."""

    def __init__(self, layers: int = 4, **settings: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(**settings) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            out = block(x=x, flag=False)
            x = out[0] if isinstance(out, tuple) else out
        return x.square().mean()


def make(family: str, layers: int = 4) -> Any:
    if family == "plain":
        return Plain(layers)
    _, model, config, settings = FAMILIES[family]
    return model(config(**settings, **{COUNTS.get(family, "num_hidden_layers"): layers}))


def loss_of(model: nn.Module) -> Tensor:
    if isinstance(model, Plain):
        x = torch.linspace(-1, 1, 24, dtype=model.embed.weight.dtype)
        return torch.as_tensor(model(x.reshape(3, 8)))
    if isinstance(model, hf.ViTForImageClassification):
        pixels = torch.linspace(-1, 1, 384, dtype=model.dtype).reshape(2, 3, 8, 8)
        return torch.as_tensor(model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss)
    tokens = torch.arange(2, 22).reshape(2, 10)
    return torch.as_tensor(model(input_ids=tokens, labels=tokens).loss)


def run(model: nn.Module, subnetwork: Subnetwork | None = None) -> tuple[float, dict[str, Tensor]]:
    """The loss of a subnetwork (the untouched model without one), and the gradients that exist."""
    if subnetwork is None:
        loss = loss_of(model)
    else:
        with running(attach(model), subnetwork):
            loss = loss_of(model)
    torch.autograd.backward(loss)
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def keep(*kept: int, layers: int = 4, scale: float = 1.0) -> Subnetwork:
    return Subnetwork(tuple(scale if layer in kept else 0.0 for layer in range(layers)))


def calls(blocks: list[nn.Module]) -> list[int]:
    return [block.calls for block in blocks if isinstance(block, Block)]


def same(left: nn.Module, right: list[nn.Module]) -> bool:
    return all(a is b for a, b in zip(left.children(), right, strict=True))


@every_family
def test_the_blocks_are_found_and_nothing_is_changed(family: str) -> None:
    model = make(family)
    keys = list(model.state_dict())
    routed = attach(model)
    assert (routed.path, routed.layers, routed.model) == (PATHS[family], 4, model)
    assert routed.blocks == list(model.get_submodule(PATHS[family]))
    assert routed.lists[0].module is model.get_submodule(PATHS[family])
    assert list(model.state_dict()) == keys
    for module in model.modules():
        assert not {**module._forward_hooks, **module._forward_pre_hooks}
        assert "forward" not in vars(module)


@every_family
def test_the_full_subnetwork_is_the_untouched_model_bit_for_bit(family: str) -> None:
    model = make(family)
    expected, grads = run(copy.deepcopy(model))
    loss, found = run(model, Subnetwork.full(4))
    assert loss == expected
    assert found.keys() == grads.keys()
    assert all(torch.equal(found[name], grads[name]) for name in grads)


@every_family
@pytest.mark.parametrize("kept", [(0, 2), (1, 3), (2,), (0, 1, 3)])
def test_a_subset_is_a_physically_smaller_model(family: str, kept: tuple[int, ...]) -> None:
    model, small, path = make(family).double(), make(family, len(kept)).double(), PATHS[family]
    names = {name: name for name in model.state_dict()}
    for name in list(names):
        if match := re.match(rf"{re.escape(path)}\.(\d+)(\..*)", name):
            layer = int(match[1])
            names[name] = f"{path}.{kept.index(layer)}{match[2]}" if layer in kept else ""
    small.load_state_dict({new: model.state_dict()[old] for old, new in names.items() if new})
    expected, grads = run(small)
    loss, found = run(model, keep(*kept))
    assert loss == pytest.approx(expected, abs=1e-10)
    # Exactly the smaller model's parameters have a gradient, so those of bypassed blocks are None.
    assert {names[name] for name in found} == grads.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, grads[names[name]], rtol=0, atol=1e-10)


@pytest.mark.parametrize("returns", ["tensor", "tuple"])
def test_a_scale_multiplies_what_the_block_adds(returns: str) -> None:
    model = Plain(returns=returns).double()
    factors = (math.sqrt(2), 0.0, 1.0, 0.5)
    x = model.embed(torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(3, 8))
    for factor, block in zip(factors, model.blocks, strict=True):
        x = x + factor * torch.tanh(block.get_submodule("linear")(x))
    expected = x.square().mean()
    grad = torch.autograd.grad(expected, model.embed.weight)[0]
    loss, found = run(model, Subnetwork(factors))
    assert loss == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(found["embed.weight"], grad, rtol=0, atol=1e-12)
    with torch.inference_mode(), running(attach(model), Subnetwork(factors)):
        assert loss_of(model).item() == loss


@every_family
def test_no_layer_means_no_layer(family: str) -> None:
    model = make(family)
    loss, found = run(model, keep())
    assert found
    assert not any(name.startswith(PATHS[family]) for name in found)
    assert loss != loss_of(model).item()


def test_only_kept_blocks_are_called_apart_from_one_probe() -> None:
    model = Plain(returns="tuple", dropout=0.5)
    routed, blocks, state = attach(model), list(model.blocks), torch.get_rng_state()
    with running(routed, keep()):
        loss_of(model)
    # Nothing had run before block 0 was bypassed; the probe gives random numbers and buffers back.
    assert calls(blocks) == [1, 0, 0, 0]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.get_buffer("blocks.0.seen") == 0
    for kept, expected in (((1, 3), [1, 1, 0, 1]), ((), [1, 1, 0, 1]), ((0, 1), [2, 2, 0, 1])):
        with running(routed, keep(*kept, scale=0.5)):
            loss_of(model)
        assert calls(blocks) == expected
    model = Plain()
    run(model, keep(0, 2))
    assert calls(list(model.blocks)) == [1, 0, 1, 0]


def test_what_a_bypass_returns_follows_the_call_flags() -> None:
    model = Plain()
    x = torch.ones(8)
    with running(attach(model), keep()):
        assert model.blocks[0](x, False) is x
        assert model.blocks[0](x, True) == (x, None, None)
        assert model.blocks[0].returns == "tensor"


@every_family
def test_names_copies_and_settings_are_the_real_ones_inside(family: str) -> None:
    model = make(family).eval()
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    keys = list(model.state_dict())
    with running(attach(model), keep(0, scale=2.0)):
        assert dict(model.named_parameters()) == parameters
        assert dict(model.named_modules()) == modules
        assert list(model.state_dict()) == keys
        copied = copy.deepcopy(model)
        first = model.get_submodule(PATHS[family])[0]
        assert not first.training
        with pytest.raises(AttributeError, match="nothing_here"):
            _ = first.nothing_here
        model.train()
        assert first.training
        loss_of(model)
    assert all(module.training for module in model.modules())
    assert dict(model.named_modules()) == modules
    assert torch.equal(loss_of(copied), loss_of(model))
    assert not modules.keys() - dict(copied.named_modules()).keys()
    assert not set(copied.modules()) & set(model.modules())


def test_everything_is_restored_after_an_exception_and_nesting_is_refused() -> None:
    model = Plain()
    routed, blocks, keys = attach(model), list(model.blocks), list(model.state_dict())
    with pytest.raises(ZeroDivisionError), running(routed, keep(1)):
        _ = 1 / same(model.blocks, blocks)
    assert same(model.blocks, blocks)
    assert list(model.state_dict()) == keys
    other = attach(model)
    with running(routed, keep(0)):
        for inner in (routed, other):
            with pytest.raises(RuntimeError, match=r"'blocks' .*already"), running(inner, keep(1)):
                pass
        with pytest.raises(RuntimeError, match=r"'blocks' .*`running`"):
            attach(model)
        loss_of(model)
    assert calls(blocks) == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("subnetwork", "sentence"),
    [
        (Subnetwork.full(3), "has 3 layers.* 4 blocks at 'blocks'"),
        (Subnetwork((1.0,) * 4, heads=((0,),) * 4), "only depth.*Block.*setting heads"),
        (Subnetwork((1.0,) * 4, parts=((0,),) * 4), "only depth.*Block.*setting parts"),
        (Subnetwork((1.0, 0.0, 2.0, 1.0), scaled="branches"), "'branches'.*scaled='layer'"),
        (Subnetwork((1.0,) * 4, head_gates=(1.0, 0.5)), "gates.*heads"),
        (Subnetwork((1.0,) * 4, part_gates=(1.0, 0.5)), "gates.*parts"),
    ],
)
def test_subnetworks_that_cannot_run_are_refused(subnetwork: Subnetwork, sentence: str) -> None:
    model = Plain()
    blocks = list(model.blocks)
    with pytest.raises(ValueError, match=sentence), running(attach(model), subnetwork):
        pass
    assert same(model.blocks, blocks)
    run(model, Subnetwork((1.0, 0.0, 1.0, 0.0), scaled="branches"))
    assert calls(blocks) == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("returns", "sentence"),
    [("dict", "dict.*tensor"), ("narrow", r"\(3, 4\) .*\(3, 8\)"), ("in place", "'blocks' .*in place.* 0 and 1")],
)
def test_blocks_that_cannot_be_routed_are_refused(returns: str, sentence: str) -> None:
    model = Plain(returns=returns)
    with torch.no_grad(), running(attach(model), keep(0, scale=2)):
        with pytest.raises(ValueError, match=sentence):
            loss_of(model)
        with pytest.raises(ValueError, match=r"Block .*hidden states"):
            model.blocks[0](flag=True)


def test_a_shared_position_bias_is_not_lost_silently() -> None:
    model = make("t5", 3).eval()
    with pytest.raises(ValueError, match=r"'encoder.block' \(3 entries\), 'decoder.block' \(3 entries\)"):
        attach(model)
    routed, expected = attach(model, "encoder.block"), loss_of(model)
    with running(routed, Subnetwork.full(3)):
        assert torch.equal(loss_of(model), expected)
    with running(routed, keep(0, 2, layers=3)):
        assert not torch.equal(loss_of(model), expected)
    # Known from the run before, found by a probe, and with one layer running.
    for again, kept in (
        (routed, (1, 2)),
        (attach(model, "encoder.block"), (1, 2)),
        (attach(model, "encoder.block"), (2,)),
    ):
        with (
            pytest.raises(ValueError, match=r"layer 1 .*'encoder.block' .*hidden states.*fixed"),
            running(again, keep(*kept, layers=3)),
        ):
            loss_of(model)


def test_blocks_are_found_among_other_lists_or_named_or_given() -> None:
    model, twin = Plain(), Plain(3)
    model.norms = nn.ModuleList([nn.LayerNorm(2) for _ in range(4)])
    model.mixed = nn.ModuleList([nn.Linear(99, 99), nn.LayerNorm(8)] * 4)
    for block in model.blocks:
        block.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(9)])
    assert attach(model).path == "blocks"
    model.heavy = nn.ModuleList([nn.Linear(99, 99), nn.Linear(99, 99)])
    with pytest.raises(ValueError, match=r"blocks=.*'heavy'"):
        attach(model)
    both = nn.ModuleDict({"left": Plain(3), "right": twin})
    with pytest.raises(ValueError, match=r"blocks=.*'left.blocks' \(3 entries\), 'right.blocks'"):
        attach(both)
    assert attach(both, "right.blocks").lists[0].module is twin.blocks
    assert attach(both, twin.blocks).path == "right.blocks"


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [("nowhere", r"blocks is 'nowhere'.* 'blocks' \(4 entries\)"), ("embed", "blocks is 'embed'")]
    + [(nn.ModuleList(), "blocks is .*nn.ModuleList")],
)
def test_blocks_that_are_no_list_of_the_model_are_refused(blocks: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        attach(Plain(), blocks)
    with pytest.raises(ValueError, match="blocks is 'blocks'"):
        attach(Plain(0), "blocks")
    with pytest.raises(ValueError, match=r"no list of residual blocks was found\. The model has no nn\.ModuleList"):
        attach(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(ValueError, match=r"blocks is 'nowhere'.* of the model\. The model has no nn\.ModuleList"):
        attach(nn.Linear(8, 8), "nowhere")


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model is 'raptr'; a torch\.nn\.Module is allowed"):
        attach("raptr")  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_gradient_checkpointing_gives_equal_gradients(family: str, reentrant: bool) -> None:
    model = make(family).double().train()
    # The first layer is left out, so that the probe meets a checkpointed block.
    subnetwork = Subnetwork((0.0, 1.5, 0.0, 1.0))
    expected, grads = run(copy.deepcopy(model), subnetwork)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    loss, found = run(model, subnetwork)
    assert loss == expected
    assert found.keys() == grads.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, grads[name], rtol=0, atol=1e-12)


def compiled(module: nn.Module, in_place: bool, backend: Any) -> Any:
    if not in_place:
        return torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
    module.compile(backend=backend, fullgraph=True, dynamic=False)
    return module


# Dynamo itself reads `.grad` of the hidden states; it hides the warning, but not one that is an error.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of its own, on some versions
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("in_place", [False, True])
def test_blocks_compiled_one_by_one_never_see_the_choice(in_place: bool) -> None:
    torch._dynamo.reset()
    model, counter, graphs = Plain(), CompileCounter(), 0
    twin = copy.deepcopy(model)
    model.blocks = nn.ModuleList([compiled(block, in_place, counter) for block in model.blocks])
    run(model, keep())
    # The probe met a compiled block, and ran it as it was written.
    assert counter.frame_count == graphs == 0
    for number, kept in enumerate([(1, 2, 3), (0, 1, 2, 3), (0, 2), (), (3,), (1, 2), (0, 3)]):
        subnetwork = keep(*kept, scale=1 + number / 10)
        assert run(model, subnetwork)[0] == pytest.approx(run(twin, subnetwork)[0], abs=1e-6)
        graphs = counter.frame_count if number <= 1 else graphs
    assert 0 < counter.frame_count == graphs <= 4
    with pytest.raises(ValueError, match=r"compile.*blocks"):
        attach(compiled(twin, in_place, counter))


def test_a_few_training_steps_leave_idle_layers_where_they_were() -> None:
    model = Plain()
    routed, optimizer, losses = attach(model), torch.optim.AdamW(model.parameters(), lr=0.05), []
    for kept in [(0, 3), (0, 1, 3), (0, 3), (0, 1, 3), (0, 1, 3)]:
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        with running(routed, keep(*kept)):
            losses.append(loss_of(model))
        torch.autograd.backward(losses[-1])
        optimizer.step()
        for layer in range(4):
            name = f"blocks.{layer}.linear.weight"
            assert torch.equal(model.state_dict()[name], before[name]) == (layer not in kept)
    assert losses[-1] < losses[0]


def causal(family: str) -> Any:
    """A model whose weights are large enough that a wrong position or mask shows."""
    torch.manual_seed(0)
    model = make(family).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim == 2 else 1)
    return model


@pytest.mark.parametrize("family", [family for family in PATHS if family != "plain"])
def test_hidden_states_have_an_entry_for_every_layer(family: str) -> None:
    model = make(family).eval()
    given: dict[str, Tensor] = {"input_ids": torch.arange(2, 22).reshape(2, 10)}
    if family == "vit":
        given = {"pixel_values": torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)}
    full = model(**given, output_hidden_states=True).hidden_states
    for scale, kept in ((1.0, (0, 2)), (1.0, (1, 3)), (2.0, (0, 2)), (0.5, (1, 2))):
        # Attached anew, so that the first bypassed layer is probed, which must not be recorded.
        with running(attach(model), keep(*kept, scale=scale)):
            states = model(**given, output_hidden_states=True).hidden_states
        assert len(states) == len(full) == 5
        for layer in range(3):  # the last entry is normalised in most models
            assert torch.equal(states[layer + 1], states[layer]) == (layer not in kept)
        if 0 in kept:
            expected = full[0] + scale * (full[1] - full[0])
            torch.testing.assert_close(states[1], expected)
        plain = model(**given, output_hidden_states=True).hidden_states
        assert all(map(torch.equal, plain, full))


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("kept", [(0, 2), (1, 3)])
def test_a_part_generates_what_it_would_without_a_cache_or_refuses(family: str, kept: tuple[int, ...]) -> None:
    model = causal(family)
    routed, tokens = attach(model), torch.arange(2, 22).reshape(2, 10)
    asked = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with running(routed, keep(*kept)):
        expected = model(input_ids=tokens, use_cache=False).logits[:, -1].argmax(-1)
        generated = model.generate(tokens, use_cache=False, **asked)
        assert torch.equal(generated[:, 10], expected)
        with pytest.raises(ValueError, match="use_cache=False"):
            model.generate(tokens, use_cache=True, **asked)
        assert torch.equal(model(input_ids=tokens, use_cache=True).logits, model(input_ids=tokens).logits)
    with running(routed, Subnetwork.full(4)):
        full = model.generate(tokens, use_cache=True, **asked)
    assert torch.equal(full, model.generate(tokens, use_cache=False, **asked))


def test_a_block_list_that_was_replaced_is_refused() -> None:
    model = Plain()
    routed = attach(model)
    model.blocks = nn.ModuleList(list(model.blocks)[:3])
    with pytest.raises(RuntimeError, match=r"'blocks'.*[Aa]ttach"), running(routed, keep(0)):
        pass
    del model.blocks
    with pytest.raises(RuntimeError, match=r"'blocks'.*[Aa]ttach"), running(routed, keep(0)):
        pass
    whole = Plain()
    routed = attach(whole)
    whole.compile(backend="eager")
    with pytest.raises(ValueError, match=r"compile.*blocks"), running(routed, keep(0)):
        pass


def test_a_context_that_ran_another_model_is_refused() -> None:
    model = Plain()
    routed, copied = attach(model), copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"no block at 'blocks'.*attach"), running(routed, keep(0)):
        loss_of(copied)
    with pytest.raises(ZeroDivisionError), running(routed, keep(0)):
        _ = 1 / 0
    with running(routed, keep()):
        loss_of(model)


def test_data_parallel_on_several_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # where there is a GPU, the model would go there
    model = Plain()
    routed = attach(model)
    with running(routed, keep(0, 2)):
        assert torch.equal(loss_of(model), nn.DataParallel(model)(torch.linspace(-1, 1, 24).reshape(3, 8)))
    # As on a machine with two GPUs, but for the copies themselves.
    module = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(module, "_get_device_index", lambda device, *_: device)
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", lambda tensors, devices, *_a, **_k: [tensors, tensors])
    assert len(module.replicate(model, [0, 1])) == 2
    with pytest.raises(RuntimeError, match=r"DataParallel.*DistributedDataParallel"), running(routed, keep(0, 2)):
        module.replicate(model, [0, 1])
    with pytest.raises(KeyError, match="mine"), running(routed, keep(0, 2)):
        raise KeyError("mine")


def test_stand_ins_are_not_pickled() -> None:
    model = Plain()
    with pytest.raises(RuntimeError, match=r"pickled.*running"), running(attach(model), keep(0)):
        pickle.dumps(model)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(loss_of(again), loss_of(model))


def test_weights_are_not_loaded_into_stand_ins() -> None:
    model = Plain()
    routed, other = attach(model), Plain().state_dict()
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"load_state_dict.*running"), running(routed, keep(0)):
            model.load_state_dict(other, strict=strict)
    model.load_state_dict(other)
    assert torch.equal(model.get_parameter("blocks.3.linear.weight"), other["blocks.3.linear.weight"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_encoder_of_torch_runs_in_evaluation_too(scale: float) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 4)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, padded = torch.randn(2, 6, 16), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    routed, subnetwork = attach(model), keep(0, 2, scale=scale)
    with running(routed, subnetwork):
        slow = model(x, src_key_padding_mask=padded)  # in training, without the fast path
    model.eval()
    with torch.no_grad(), running(routed, subnetwork):
        fast = model(x, src_key_padding_mask=padded)
        plain = model(x)
    torch.testing.assert_close(fast[~padded], slow[~padded], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(plain[0], slow[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_or_says_what_to_change(name: str) -> None:
    def run_all(method: Method) -> None:
        for step in (0, 1, 30, 39):
            for subnetwork in (method.subnetwork(step), method.evaluated(step + 1), method.drawn(1, 0, step + 1)):
                model = Plain(method.shape(step).layers)
                with running(attach(model), subnetwork):
                    loss_of(model)

    changes: dict[str, Any] = {}
    if name in ("pld", "stochastic-depth", "layer-dropout"):
        with pytest.raises(ValueError, match="scaled='layer'"):
            run_all(make_method(name, shape=Shape(4), steps=40))
        changes = {"scaled": "layer"}
    run_all(make_method(name, shape=Shape(4), steps=40, **changes))
    method = make_method(name, shape=Shape(4), steps=40, **changes)
    if method.shape(0).layers < 4:
        with (
            pytest.raises(ValueError, match=r"[12] layers.*4 blocks.*method.shape\(step\).layers"),
            running(attach(Plain(4)), method.subnetwork(0)),
        ):
            pass
