"""Attached models of many families: tiny ones, as the sweep in benchmarks/families.py builds and compares them."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import families as sweep
from raptr.methods import make_method
from raptr.models.attach import Routed, attach, running
from raptr.models.blocklists import Blocks
from raptr.subnetworks import Shape, Subnetwork

CLASSES = {family: name for family, (_, name) in sweep.families().items()}
# Families whose list is found, with its path.
FOUND = {
    "llama": "model.layers",
    "mistral": "model.layers",
    "qwen2": "model.layers",
    "qwen3": "model.layers",
    "gemma": "model.layers",
    "gemma3_text": "model.layers",
    "gpt2": "transformer.h",
    "gpt_neo": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
    "gpt_oss": "model.layers",
    "openai-gpt": "transformer.h",
    "opt": "model.decoder.layers",
    "phi": "model.layers",
    "falcon": "transformer.h",
    "bloom": "transformer.h",
    "mixtral": "model.layers",
    "deepseek_v3": "model.layers",
    "mamba": "backbone.layers",
    "bert": "bert.encoder.layer",
    "roberta": "roberta.encoder.layer",
    "deberta": "deberta.encoder.layer",
    "deberta-v2": "deberta.encoder.layer",
    "electra": "electra.encoder.layer",
    "distilbert": "distilbert.transformer.layer",
    "modernbert": "model.layers",
    "esm": "esm.encoder.layer",
    "vit": "vit.layers",
    "deit": "deit.layers",
    "dinov2": "dinov2.encoder.layer",
    "clip": "vision_model.encoder.layers",
}
# Those of them of which heads and MLP parts run too.
AXES = {
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi", "bert", "roberta", "electra", "distilbert"),
    *("esm", "vit", "deit", "dinov2", "clip"),
}
# The one whose first layers cannot be copied to the others: it is dense, those are mixtures of experts.
UNLIKE = "deepseek_v3"
# Encoder-decoders, whose lists are named.
PAIRS = {
    "bart": ["model.encoder.layers", "model.decoder.layers"],
    "pegasus_x": ["model.encoder.layers", "model.decoder.layers"],
    "whisper": ["model.encoder.layers", "model.decoder.layers"],
}
T5 = ["encoder.block", "decoder.block"]
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.mark.parametrize("family", FOUND)
def test_a_subnetwork_of_a_family_is_the_smaller_model(family: str) -> None:
    line = sweep.line(family, CLASSES[family])
    refused = line.pop("growth", "")
    works = {"named": False, "blocks": [FOUND[family]], "scales": True, "result": "any"}
    assert line == works | {"axes": family in AXES, "grows": family != UNLIKE}
    assert bool(re.search(r"layer 3 .*from layer 1, which has no mlp\.experts", refused)) == (family == UNLIKE)


@pytest.mark.parametrize("family", PAIRS)
def test_two_lists_run_as_one(family: str) -> None:
    line = sweep.line(family, CLASSES[family])
    works = {"named": True, "blocks": PAIRS[family], "scales": True, "result": "any"}
    assert line == works | {"axes": False, "grows": True}


@pytest.mark.parametrize(("family", "blocks"), [("t5", T5), ("mt5", T5), ("wavlm", ["wavlm.encoder.layers"])])
def test_the_layer_that_makes_the_position_bias_has_to_run(family: str, blocks: list[str]) -> None:
    line = sweep.line(family, CLASSES[family])
    reason = line.pop("reason")
    works = {"named": len(blocks) > 1, "blocks": blocks, "scales": True, "result": "first layer runs"}
    assert line == works | {"axes": False, "grows": True}
    assert "layer 1 " in reason
    assert "fixed" in reason


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("albert", "4 layers.* there is 1 block at .*share one block cannot be left out"),
        ("focalnet", r"\(2, .*\) of \(2, "),
        ("xlm", "'transformer.attentions', .*parts of the same layers.*whole.*blocks="),
    ],
)
def test_families_without_a_list_of_residual_layers_are_refused(family: str, reason: str) -> None:
    line = sweep.line(family, CLASSES[family])
    assert line["result"] == "refused"
    assert re.search(reason, line["reason"])


@pytest.mark.parametrize("blocks", ["transformer.attentions", "transformer.ffns", ["transformer.ffns"]])
def test_a_list_of_parts_of_layers_is_refused(blocks: Any) -> None:
    model, given = sweep.build("xlm", CLASSES["xlm"])
    for scales in ((1.0, 0.0, 1.0, 1.0), (0.0, 0.0, 0.0, 1.0), (1.0, 1.0, 0.5, 1.0)):
        with (
            pytest.raises(ValueError, match=r"'transformer\.(attentions|ffns)'.*parts of layers.*blocks="),
            running(attach(model, blocks), Subnetwork(scales)),
        ):
            model(**given)


class Twins(nn.Module):
    """Layers with a list beside them that is as long."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(4, 2) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        scores = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = checkpoint(block, x, use_reentrant=True)
            scores.append(head(x))
        return torch.stack(scores)


def test_layers_with_another_list_beside_them_run() -> None:
    model, x = Twins(), torch.randn(2, 4, requires_grad=True)
    with running(attach(model, "blocks"), Subnetwork((1.0, 0.0, 0.5))):
        scores = model(x)
    y = model.blocks[0](x)
    assert torch.equal(scores[1], model.heads[1](y))
    assert torch.allclose(scores[2], model.heads[2](y + 0.5 * (model.blocks[2](y) - y)))


def gemma(cls: str, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """Six layers, of which the last two read keys and values that layers 3 and 4 store."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60, "sliding_window": 8}
    sizes |= {"vocab_size_per_layer_input": 60, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"] * 3, "use_cache": False}
    torch.manual_seed(0)
    model = getattr(hf, f"{cls}ForCausalLM")(getattr(hf, f"{cls}TextConfig")(**sizes | settings)).train()
    tokens = torch.randint(5, 50, (2, 12))
    return model, {"input_ids": tokens, "labels": tokens}


GEMMAS: dict[str, dict[str, Any]] = {
    "Gemma4": {"global_head_dim": 16},
    "Gemma3n": {"activation_sparsity_pattern": None, "laurel_rank": 4},
}


@pytest.mark.parametrize("cls", GEMMAS)
@pytest.mark.parametrize(("kept", "needed", "reader"), [((0, 1, 4, 5), 3, 5), ((0, 2, 5), 4, 6), ((5,), 4, 6)])
def test_a_layer_that_stores_keys_for_others_is_not_bypassed(
    cls: str, kept: tuple[int, ...], needed: int, reader: int
) -> None:
    model, batch = gemma(cls, **GEMMAS[cls])
    with (
        pytest.raises(ValueError, match=rf"layer {needed} .*layer {reader} .*'model\.layers'.*3, 4 .*fixed"),
        running(attach(model), Subnetwork(tuple(float(layer in kept) for layer in range(6)))),
    ):
        model(**batch)


@pytest.mark.parametrize("cls", GEMMAS)
def test_layers_that_read_what_others_store_train(cls: str) -> None:
    model, batch = gemma(cls, **GEMMAS[cls])
    routed = attach(model)
    method = make_method("raptr", shape=Shape(layers=6), steps=8, schedule="4-5-6", fixed=(3, 4))
    for step in range(8):
        model.zero_grad()
        with running(routed, method.subnetwork(step)):
            model(**batch).loss.backward()
        ran = [layer for layer, block in enumerate(routed.blocks) if next(block.parameters()).grad is not None]
        assert tuple(ran) == method.subnetwork(step).kept
    with pytest.raises(KeyError, match="mine"), running(routed, method.subnetwork(0)):
        raise KeyError("mine")


def test_a_probe_stores_nothing() -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    model, batch = gemma("Gemma4", num_hidden_layers=4, layer_types=types)
    with (  # layer 1 is probed, to learn what layers return
        pytest.raises(ValueError, match=r"layer 1 .*layer 4 .*1, 2 .*fixed"),
        running(attach(model), Subnetwork((0.0, 1.0, 1.0, 1.0))),
    ):
        model(**batch)


@contextmanager
def other_layers(routed: Routed, subnetwork: Subnetwork) -> Iterator[None]:
    with running(routed, Subnetwork(subnetwork.scales[::-1])):
        yield


@contextmanager
def nothing(_routed: Routed, _subnetwork: Subnetwork) -> Iterator[None]:
    yield


@pytest.mark.parametrize("broken", [other_layers, nothing])
def test_the_sweep_notices_other_layers(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "running", broken)
    assert sweep.line("bert", CLASSES["bert"])["result"] == "wrong"


def test_a_family_that_is_tried_again_replaces_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "families.json"
    record.write_text(json.dumps({"families": [{"family": "bert"}, {"family": "llama"}]}), encoding="utf-8")
    monkeypatch.setattr(sweep, "apart", sweep.line)  # in this process
    monkeypatch.setattr(sweep, "families", lambda: {"llama": ("text", "NoSuchModel"), "opt": ("text", "Unused")})
    monkeypatch.setattr(sys, "argv", ["families", "llama", "--out", str(record)])
    sweep.main()
    bert, llama = json.loads(record.read_text(encoding="utf-8"))["families"]
    assert bert == {"family": "bert"}
    assert (llama["result"], llama["kind"]) == ("not tried", "text")
    assert "NoSuchModel" in llama["reason"]


def t5() -> tuple[Any, dict[str, Tensor]]:
    model: Any
    model, given = sweep.build("t5", CLASSES["t5"])
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 0
    return model, {"input_ids": given["input_ids"], "labels": given["decoder_input_ids"]}


def idle(routed: Routed) -> list[int]:
    return [n for n, block in enumerate(routed.blocks) if all(p.grad is None for p in block.parameters())]


def test_a_method_trains_both_lists_of_an_encoder_decoder() -> None:
    model, batch = t5()
    routed = attach(model, T5)
    assert routed.layers == 8
    method = make_method(
        "raptr", shape=Shape(layers=8), steps=20, schedule="4-6-8", fixed=(1, 4, 5, -1), groups=2, scaling="sqrt"
    )
    for step in (0, 1, 9):
        subnetwork = method.subnetwork(step)
        model.zero_grad()
        with running(routed, subnetwork):
            loss = model(**batch).loss
        loss.backward()
        assert idle(routed) == [layer for layer in range(8) if layer not in subnetwork.kept]
        assert len([layer for layer in subnetwork.kept if layer < 4]) == subnetwork.size // 2


def test_each_list_can_have_a_subnetwork_of_its_own() -> None:
    model, batch = t5()
    encoder, decoder, both = attach(model, T5[0]), attach(model, T5[1]), attach(model, T5)
    left, right = Subnetwork((1.0, 0.0, 1.0, 1.0)), Subnetwork((1.0, 1.0, 0.0, 0.0))
    with running(encoder, left), running(decoder, right):
        apart = model(**batch).loss
    with running(both, Subnetwork(left.scales + right.scales)):
        assert torch.equal(model(**batch).loss, apart)
    with running(both, Subnetwork.full(8)):
        with pytest.raises(RuntimeError, match=r"'encoder.block'.*already"), running(encoder, left):
            pass
        model(**batch)
    with (
        pytest.raises(ValueError, match=r"layer 5 .*'decoder.block'.*fixed"),
        running(both, Subnetwork(left.scales + (0.0, 1.0, 1.0, 1.0))),
    ):
        model(**batch)
    assert torch.isfinite(model(**batch).loss)


def test_a_decoder_whose_encoder_runs_in_part_generates_with_a_cache() -> None:
    model, batch = t5()
    model.eval()
    asked = {"max_new_tokens": 4, "do_sample": False, "input_ids": batch["input_ids"]}
    both, part = attach(model, T5), (1.0, 0.0, 0.0, 1.0)
    with running(both, Subnetwork(part + (1.0,) * 4)):
        assert torch.equal(model.generate(**asked, use_cache=True), model.generate(**asked, use_cache=False))
    with running(both, Subnetwork((1.0,) * 4 + part)), pytest.raises(ValueError, match=r"'decoder.block'.*use_cache"):
        model.generate(**asked, use_cache=True)


@pytest.mark.parametrize("family", ["llama", "mamba", "qwen3_next", "rwkv"])
@pytest.mark.parametrize("kept", [(0, 3), (1, 2)])
def test_an_empty_cache_changes_nothing_and_a_filled_one_is_refused(family: str, kept: tuple[int, ...]) -> None:
    model, given = sweep.build(family, CLASSES[family])
    subnetwork = Subnetwork(tuple(float(layer in kept) for layer in range(4)))
    flags: dict[bool, Any] = {use_cache: {**given, "use_cache": use_cache} for use_cache in (False, True)}
    with running(attach(model), subnetwork):
        assert torch.equal(sweep.output_of(model, flags[True]), sweep.output_of(model, flags[False]))
    if family != "rwkv":  # which passes its state on from block to block, in no cache
        name = "cache_params" if family == "mamba" else "past_key_values"
        cache = model.eval()(**flags[True])[name]
        with running(attach(model), subnetwork), pytest.raises(ValueError, match=r"layers'.*use_cache=False"):
            model(**flags[True], **{name: cache})


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        (["encoder.block", "encoder.block"], "'encoder.block'.*same blocks"),
        (["encoder.block", "encoder.block.0.layer"], "'encoder.block.0.layer'.*same blocks"),
        (["encoder.block", "nowhere"], r"'nowhere'.*'decoder.block' \(4 entries\)"),
        ([], r"blocks is an empty list.*'encoder.block'"),
    ],
)
def test_lists_that_cannot_be_one_are_refused(blocks: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        attach(t5()[0], blocks)


class ViT(nn.Module):
    """As `timm` writes it: the blocks are called as a whole."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 4, 4)
        encoder = [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(layers)]
        self.blocks = nn.Sequential(*encoder)
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 5))

    def forward(self, image: Tensor) -> Tensor:
        x: Tensor = self.blocks(self.patch_embed(image).flatten(2).transpose(1, 2))
        logits: Tensor = self.head(x.mean(1))
        return logits


def test_blocks_in_a_sequence_run_as_those_in_a_list() -> None:
    line = sweep.check(ViT(), {"image": torch.randn(2, 3, 32, 32)})
    works = {"named": False, "blocks": ["blocks"], "scales": True, "result": "any"}
    assert line == works | {"axes": False, "grows": True}


def test_sequences_of_unlike_modules_are_no_blocks() -> None:
    inner = ViT()
    model = nn.Sequential(nn.Linear(3, 3), inner, nn.Sequential(nn.Linear(3, 3)))
    assert attach(model).path == "1.blocks"
    assert attach(model, inner.blocks).path == "1.blocks"


def test_a_list_of_lists_holds_no_blocks() -> None:
    stages = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), nn.ModuleList([nn.Linear(2, 2)] * 2)])
    model = nn.ModuleDict({"stages": stages})
    assert attach(model).path == "stages.0"
    with pytest.raises(ValueError, match=r"blocks is 'stages'.*lists"):
        attach(model, "stages")


def test_a_model_with_adapters_trains_those_of_the_layers_that_run() -> None:
    peft = importlib.import_module("peft")
    model: Any = sweep.make("llama", CLASSES["llama"], {})
    model = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    )
    routed = attach(model)
    assert routed.path == "base_model.model.model.layers"
    with running(routed, Subnetwork((1.0, 0.0, 0.0, 1.0))):
        loss = model(input_ids=torch.arange(10).reshape(2, 5), labels=torch.arange(10).reshape(2, 5)).loss
    loss.backward()
    assert idle(routed) == [1, 2]
    assert all(("lora_" in name) == (p.grad is not None) for name, p in routed.blocks[0].named_parameters())
    line = sweep.check(model, {"input_ids": torch.arange(5, 25).reshape(2, 10)})
    assert "base_layer.weight is frozen" in line.pop("growth")
    works = {"named": False, "blocks": [routed.path], "scales": True, "result": "any"}
    assert line == works | {"axes": False, "grows": False}


class Passing(nn.Module):
    """A block that adds what it is given beside the hidden states; how it returns that is the test's choice."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.linear, self.returns = nn.Linear(4, 4), returns

    def forward(self, x: Tensor, stream: Tensor | None = None) -> Any:
        y = x + torch.tanh(self.linear(x)) + (0 if stream is None else stream)
        if self.returns == "shared" and stream is None:
            stream = x.detach() + 1
        elif self.returns == "second stream":
            assert stream is not None
            stream = stream * 1.5
        return [y, stream] if self.returns == "list" else (y, stream)


class Chain(nn.Module):
    def __init__(self, returns: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Passing(returns) for _ in range(4)])
        self.given = returns != "shared"

    def forward(self, x: Tensor) -> Tensor:
        stream = x / 2 if self.given else None
        for block in self.blocks:
            x, stream = block(x, stream)
        return x


@pytest.mark.parametrize("returns", ["unchanged", "second stream", "list"])
@pytest.mark.parametrize("kept", [(0, 2), (1, 3), (3,)])
def test_a_bypassed_block_passes_on_what_it_was_given(returns: str, kept: tuple[int, ...]) -> None:
    model, x = Chain(returns), torch.randn(3, 4)
    routed, smaller = attach(model), Chain(returns)
    smaller.blocks = nn.ModuleList([model.blocks[layer] for layer in kept])
    expected = smaller(x)
    # The first time the structure is learnt from a probe, where the first layer is bypassed; then it is known.
    for _ in range(2):
        with running(routed, Subnetwork(tuple(float(layer in kept) for layer in range(4)))):
            assert torch.equal(model(x), expected)


@pytest.mark.parametrize("before", [(), (0, 1)])
def test_a_block_that_makes_what_others_receive_is_not_bypassed(before: tuple[int, ...]) -> None:
    model, x = Chain("shared"), torch.randn(3, 4)
    routed, smaller = attach(model), Chain("shared")
    if before:
        smaller.blocks = nn.ModuleList([model.blocks[layer] for layer in before])
        with running(routed, Subnetwork((1.0, 1.0, 0.0, 0.0))):
            assert torch.equal(model(x), smaller(x))
    with (
        pytest.raises(ValueError, match=r"layer 1 .*'blocks'.*fixed"),
        running(routed, Subnetwork((0.0, 0.0, 0.0, 1.0))),
    ):
        model(x)


def test_a_block_that_stands_twice_in_the_list_has_two_layers() -> None:
    block = nn.Linear(4, 4)
    model = nn.Sequential(block, nn.Linear(4, 4), block)
    x, routed = torch.randn(2, 4), attach(model)
    assert routed.layers == 3
    with running(routed, Subnetwork((1.0, 0.0, 1.0))):
        assert torch.equal(model(x), block(block(x)))
    assert model[2] is block


def test_lists_can_be_given_as_modules() -> None:
    model: Any = hf.BartModel(hf.BartConfig(vocab_size=40, d_model=16, encoder_layers=2, decoder_layers=3))
    lists: list[Blocks] = [model.encoder.layers, model.decoder.layers]
    routed = attach(model, lists)
    assert routed.path == "encoder.layers, decoder.layers"
    assert routed.blocks == [*model.encoder.layers, *model.decoder.layers]
