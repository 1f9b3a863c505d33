"""The decoder against a plain reference written here; a part of it against a physically smaller model; in float64."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptr.data.batch import Batch
from raptr.models.decoder.config import DecoderConfig
from raptr.models.decoder.model import Block, Decoder, normed
from raptr.models.layout import chosen
from raptr.subnetworks import Shape, Subnetwork
from tests.walks import scores

ROW: dict[str, Any] = {
    "layers": 4,
    "width": 24,
    "heads": 6,
    "head_size": 4,
    "mlp": 32,
    "vocabulary": 50,
    "positions": 16,
    "parts": 4,
}
CONFIGS = {
    "plain": DecoderConfig(**ROW),
    "grouped": DecoderConfig(**ROW, kv_heads=3),
    "one key": DecoderConfig(**ROW, kv_heads=1),
    "untied": DecoderConfig(**ROW, kv_heads=2, tied=False, rope_base=500.0),
}
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
FULL = Subnetwork.full(4)
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def batch(seed: int = 1) -> Batch:
    tokens = torch.randint(0, 50, (3, 13), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1].contiguous(), None, tokens[:, 1:].contiguous())


def decoder(config: DecoderConfig) -> Decoder:
    model = Decoder(config, seed=3).double()
    with torch.no_grad():  # gains at their start would hide mistakes, and small weights make attention even
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.3)
    return model


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rotate(x: Tensor, base: float) -> Tensor:
    """Each pair (i, i + K/2) as a complex number, turned by position · base^(-2i/K)."""
    length, size = x.shape[-2:]
    pair = torch.complex(x[..., : size // 2], x[..., size // 2 :])
    rates = torch.tensor([base ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
    angle = torch.arange(length)[:, None] * rates
    turned = pair * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def reference(model: Decoder, data: Batch, segments: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
    """Scores at all positions, head by head with an explicit mask."""
    config, length = model.config, data.tokens_BS.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool).tril().expand(len(data.tokens_BS), -1, -1)
    if segments is not None:
        allowed = allowed & (segments[:, :, None] == segments[:, None, :])
    if prefix is not None:
        allowed = allowed | (torch.arange(length) < prefix[:, None, None])
    x, size, groups = model.tokens.weight[data.tokens_BS], config.head_size, config.groups
    for block in model.blocks:
        assert isinstance(block, Block)
        rows = torch.split(block.qkv.weight, size)  # head by head: queries, keys, values
        y, added = norm(x, block.attention_norm.weight), torch.zeros_like(x)
        for head in range(config.heads):
            group = head % groups
            q, k, v = (y @ rows[at].T for at in (head, config.heads + group, config.heads + groups + group))
            q, k = rotate(q, config.rope_base), rotate(k, config.rope_base)
            weights = (q @ k.transpose(1, 2) / math.sqrt(size)).masked_fill(~allowed, -math.inf).softmax(-1)
            added = added + weights @ v @ torch.split(block.attention_out.weight, size, dim=1)[head].T
        x = x + added
        gate, up = (norm(x, block.mlp_norm.weight) @ half.T for half in block.mlp_in.weight.chunk(2))
        x = x + (gate * torch.sigmoid(gate) * up) @ block.mlp_out.weight.T
    return norm(x, model.head.norm.weight) @ (model.tokens.weight if config.tied else model.output_VD).T


@configs
def test_the_whole_equals_a_plain_reference(config: DecoderConfig) -> None:
    model, data = decoder(config), batch()
    expected = reference(model, data)
    assert_close(scores(model, data, FULL), expected)
    loss = F.cross_entropy(expected.flatten(0, 1), data.labels_BM.flatten())
    assert_close(model(data, model.inputs(FULL)), loss)


@configs
def test_documents_are_isolated_by_segments(config: DecoderConfig) -> None:
    model, data = decoder(config), batch()
    segments = torch.tensor([[0] * 5 + [1] * 7, [0] * 12, [0] + [1] * 4 + [2] * 7])
    isolated = data._replace(segments_BS=segments)
    assert_close(scores(model, isolated, FULL), reference(model, data, segments))
    # Rotary positions are relative: a document gives what it would give alone.
    alone = Batch(data.tokens_BS[:1, 5:], None, data.labels_BM[:1, 5:])
    assert_close(scores(model, isolated, FULL)[:1, 5:], scores(model, alone, FULL))


@configs
def test_no_position_sees_a_later_token(config: DecoderConfig) -> None:
    model, data = decoder(config), batch()
    before = scores(model, data, FULL)
    for place in range(12):
        tokens = data.tokens_BS.clone()
        tokens[:, place] = (tokens[:, place] + 1) % 50
        after = scores(model, data._replace(tokens_BS=tokens), FULL)
        assert torch.equal(after[:, :place], before[:, :place])
        assert (after[:, place:] != before[:, place:]).any(-1).all()


@configs
def test_a_prefix_is_seen_by_all_and_nothing_else_before_its_turn(config: DecoderConfig) -> None:
    model, prefix = decoder(config), torch.tensor([1, 7, 12])
    data = batch()._replace(prefix_B=prefix)
    before = scores(model, data, FULL)
    assert_close(before, reference(model, data, prefix=prefix))
    for place in range(12):
        tokens = data.tokens_BS.clone()
        tokens[:, place] = (tokens[:, place] + 1) % 50
        changed = (scores(model, data._replace(tokens_BS=tokens), FULL) != before).any(-1)
        expected = (torch.arange(12) >= place) | (place < prefix[:, None])
        assert torch.equal(changed, expected)


def test_the_z_loss_is_part_of_the_training_loss_alone() -> None:
    plain, data = decoder(CONFIGS["untied"]), batch()
    model = decoder(replace(CONFIGS["untied"], z_loss=0.25))
    written = scores(plain, data, FULL)
    log_z = written.exp().sum(-1).log()
    entropy = (log_z - written.gather(-1, data.labels_BM[..., None]).squeeze(-1)).mean()
    assert_close(model(data, model.inputs(FULL)), entropy + 0.25 * (log_z**2).mean())
    assert_close(plain(data, plain.inputs(FULL)), entropy)
    model.eval()
    assert_close(model(data, model.inputs(FULL)), entropy)


def gradients(model: Decoder, subnetwork: Subnetwork) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad(set_to_none=True)
    loss = model(batch(), model.inputs(subnetwork))
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


PARTS = {
    "depth": ((0, 2, 3), None, None),
    "heads": ((0, 1, 2, 3), (0, 2), None),
    "MLP parts": ((0, 1, 2, 3), None, (1, 3)),
    "all at once": ((1, 3), (1,), (0, 2, 3)),
}


@pytest.mark.parametrize(("layers", "heads", "parts"), PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("kv_heads", [None, 3])
def test_a_part_is_a_smaller_model(
    layers: tuple[int, ...], heads: tuple[int, ...] | None, parts: tuple[int, ...] | None, kv_heads: int | None
) -> None:
    config = DecoderConfig(**ROW, kv_heads=kv_heads)
    large, units = decoder(config), {"heads": config.shape.heads, "parts": config.shape.parts}
    kept = {"heads": heads, "parts": parts}
    shape = Shape(len(layers), *(units[axis] if kept[axis] is None else len(kept[axis] or ()) for axis in units))
    small = Decoder(config.resized(shape)).double()

    def origin(name: str) -> str:
        words = name.split(".")
        if words[0] == "blocks":
            words[1] = str(layers[int(words[1])])
        return ".".join(words)

    def cut(name: str, tensor: Tensor) -> Tensor:
        place = large.layout.get(name.split(".", 2)[-1]) if name.startswith("blocks.") else None
        index = None if place is None else kept[place.axis]
        if place is None or index is None:
            return tensor
        return chosen(tensor, place, units[place.axis], torch.tensor(index))

    originals = dict(large.named_parameters())
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            parameter.copy_(cut(name, originals[origin(name)]))

    def every(some: tuple[int, ...] | None) -> tuple[tuple[int, ...], ...] | None:
        return None if some is None else (some,) * 4

    subnetwork = Subnetwork(tuple(float(layer in layers) for layer in range(4)), heads=every(heads), parts=every(parts))
    loss, grads = gradients(large, subnetwork)
    expected_loss, expected = gradients(small, Subnetwork.full(len(layers)))
    assert_close(loss, expected_loss)
    for name, gradient in expected.items():
        whole = grads[origin(name)]
        assert gradient is not None
        assert whole is not None
        assert_close(cut(name, whole), gradient)


def test_scales_multiply_the_layer_or_its_branches() -> None:
    model, data = decoder(CONFIGS["grouped"]), batch()
    plain = model.inputs(FULL).blocks[0]
    x, context = model.enter(data, None), model.context(data)
    block = model.blocks[1]
    whole = Subnetwork((0.0, 0.5, 0.0, 0.0))
    assert_close(model.hidden(data, model.inputs(whole)), x + 0.5 * (block(x, plain, context) - x))
    branches = Subnetwork((0.0, 2.0, 0.0, 0.0), scaled="branches")
    with torch.no_grad():
        for name in model.OUTPUTS:
            getattr(block, name).weight.mul_(2)
    expected = block(x, plain, context)
    with torch.no_grad():
        for name in model.OUTPUTS:
            getattr(block, name).weight.div_(2)
    assert_close(model.hidden(data, model.inputs(branches)), expected)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kv_heads": 4}, r"model\.kv_heads is 4.* 6"),
        ({"head_size": 5}, r"model\.head_size is 5.*even"),
        ({"rope_base": 1.0}, r"model\.rope_base is 1\.0"),
        ({"z_loss": -0.1}, r"model\.z_loss is -0\.1"),
        ({"z_loss": math.nan}, r"model\.z_loss is nan"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(given: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DecoderConfig(**{**ROW, **given})


def test_the_large_size_has_the_parameters_that_its_name_says() -> None:
    with torch.device("meta"):
        config = DecoderConfig(24, 2048, 16, 128, 8192, vocabulary=32_768)
        count = config.layers * config.layer_weights(16, 4) + config.vocabulary * config.width
    assert 1.6e9 < count < 1.7e9


def test_half_precision_is_normalised_in_that_of_the_gain_without_a_warning() -> None:
    gain = nn.RMSNorm(24, eps=1e-6)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        gain.weight.add_(0.3)
        found = normed(gain, x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, gain(x.float()))
