"""A subnetwork is a smaller network: whole models, loss and gradients, in float64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from raptr.data.batch import Batch
from raptr.methods import make_method
from raptr.models.bert.config import SIZES, BertConfig
from raptr.models.bert.model import Bert, Block
from raptr.subnetworks import Shape, Subnetwork
from tests.walks import hidden, scores

CONFIG = BertConfig(layers=5, width=24, heads=4, head_size=6, mlp=48, vocabulary=50, positions=16, parts=4)
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50, (3, 16), generator=generator)
    positions = torch.stack([torch.randperm(16, generator=generator)[:3].sort().values for _ in range(3)])
    return Batch(tokens, positions, torch.randint(0, 50, (3, 3), generator=generator))


def bert(config: BertConfig = CONFIG) -> Bert:
    model = Bert(config, seed=3).double()
    with torch.no_grad():  # biases and gains at their start would hide mistakes
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    return model


def gradients(model: Bert, subnetwork: Subnetwork) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad(set_to_none=True)
    loss = model(batch(), model.inputs(subnetwork))
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def check_equal_to_smaller(
    large: Bert,
    subnetwork: Subnetwork,
    shape: Shape,
    source: Callable[[str], tuple[str, Callable[[Tensor], Tensor]]],
) -> None:
    """Build a model of `shape` whose tensors are cut from the large one by `source`; compare both."""
    small = Bert(CONFIG.resized(shape)).double()
    originals = dict(large.named_parameters())
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            origin, cut = source(name)
            parameter.copy_(cut(originals[origin]))
    plain = Subnetwork.full(shape.layers)
    loss_part, grads_part = gradients(large, subnetwork)
    loss_small, grads_small = gradients(small, plain)
    assert_close(loss_part, loss_small)
    for name, grad in grads_small.items():
        origin, cut = source(name)
        whole = grads_part[origin]
        assert grad is not None
        assert whole is not None
        assert_close(cut(whole), grad)


def test_depth_equals_a_shallower_network() -> None:
    kept = (0, 2, 4)

    def source(name: str) -> tuple[str, Callable[[Tensor], Tensor]]:
        parts = name.split(".")
        if parts[0] == "blocks":
            parts[1] = str(kept[int(parts[1])])
        return ".".join(parts), lambda tensor: tensor

    model = bert()
    part = Subnetwork(tuple(float(layer in kept) for layer in range(5)))
    check_equal_to_smaller(model, part, Shape(3, 4, 4), source)
    _, grads = gradients(model, part)
    idle = [name for name, grad in grads.items() if grad is None]
    assert idle == [name for name in grads if name.startswith(("blocks.1.", "blocks.3."))]


def test_heads_and_parts_equal_a_narrower_network() -> None:
    heads = ((0, 2), (1, 3), (0, 1), (2, 3), (1, 2))
    parts = ((3,), (0,), (2,), (1,), (0,))

    def source(name: str) -> tuple[str, Callable[[Tensor], Tensor]]:
        def cut(tensor: Tensor) -> Tensor:
            if not name.startswith("blocks"):
                return tensor
            layer = int(name.split(".")[1])
            h, p = torch.tensor(heads[layer]), torch.tensor(parts[layer])
            if ".qkv.weight" in name:
                return tensor.reshape(3, 4, 6, 24)[:, h].reshape(-1, 24)
            if ".qkv.bias" in name:
                return tensor.reshape(3, 4, 6)[:, h].reshape(-1)
            if "attention_out.weight" in name:
                return tensor.reshape(24, 4, 6)[:, h].reshape(24, -1)
            if "mlp_in.weight" in name:
                return tensor.reshape(4, 12, 24)[p].reshape(-1, 24)
            if "mlp_in.bias" in name:
                return tensor.reshape(4, 12)[p].reshape(-1)
            if "mlp_out.weight" in name:
                return tensor.reshape(24, 4, 12)[:, p].reshape(24, -1)
            return tensor

        return name, cut

    check_equal_to_smaller(bert(), Subnetwork((1.0,) * 5, heads=heads, parts=parts), Shape(5, 2, 1), source)


def test_idle_heads_and_parts_have_zero_gradients() -> None:
    model = bert()
    _, grads = gradients(model, Subnetwork((1.0,) * 5, heads=((1,),) * 5, parts=((2,),) * 5))
    qkv, mlp = grads["blocks.0.qkv.weight"], grads["blocks.0.mlp_in.weight"]
    assert qkv is not None
    assert mlp is not None
    assert [bool(g.any()) for g in qkv.view(3, 4, 6, 24).unbind(1)] == [False, True, False, False]
    assert [bool(g.any()) for g in mlp.view(4, 12, 24)] == [False, False, True, False]


def test_layer_scale_multiplies_the_whole_layer() -> None:
    model, data = bert(), batch()
    tokens = data.tokens_BS
    plain = Subnetwork.full(5)
    scaled = replace(plain, scales=(1.0, 1.5, 0.0, 1.0, 0.7))
    x = model.embedding.norm(model.tokens(tokens) + model.embedding.positions.weight[:16])
    for layer, s in enumerate(scaled.scales):
        x = x + s * (_layer(model, layer, x, 1.0, 1.0) - x)
    assert_close(hidden(model, tokens, scaled), model.head.final_norm(x))


def test_branch_scales_multiply_each_branch() -> None:
    model, tokens = bert(), batch().tokens_BS
    part = Subnetwork(
        (2.0, 0.5, 0.0, 1.0, 1.0),
        scaled="branches",
        head_scale=1.3,
        part_scale=0.8,
        heads=((0, 1, 2, 3),) * 5,
    )
    x = model.embedding.norm(model.tokens(tokens) + model.embedding.positions.weight[:16])
    for layer in part.kept:
        s = part.scales[layer]
        x = _layer(model, layer, x, s, s, heads=1.3, parts=0.8)
    assert_close(hidden(model, tokens, part), model.head.final_norm(x))


def _layer(
    model: Bert, layer: int, x: Tensor, attention: float, mlp: float, heads: float = 1.0, parts: float = 1.0
) -> Tensor:
    """A pre-LN layer written out, each branch times a number; what heads and parts give also times theirs."""
    block = model.blocks[layer]
    assert isinstance(block, Block)
    normed = block.attention_norm(x)
    q, k, v = block.qkv(normed).view(3, 16, 3, 4, 6).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-1, -2) / 6**0.5).softmax(-1)
    h: Tensor = x + attention * block.attention_out(heads * (weights @ v).transpose(1, 2).reshape(3, 16, 24))
    out: Tensor = block.mlp_out(parts * torch.nn.functional.gelu(block.mlp_in(block.mlp_norm(h))))
    return h + mlp * out


def test_everything_kept_is_full_bit_for_bit() -> None:
    model = bert().float()
    method = make_method("raptr", shape=CONFIG.shape, steps=8, schedule="5-5", heads="4-4", parts="4-4")
    loss_full, grads_full = gradients(model, Subnetwork.full(5))
    loss_part, grads_part = gradients(model, method.subnetwork(0))
    assert torch.equal(loss_full, loss_part)
    for name, grad in grads_full.items():
        other = grads_part[name]
        assert grad is not None
        assert other is not None
        assert torch.equal(grad, other)


def test_no_layer_at_all_is_a_network_too() -> None:
    model = bert()
    loss, grads = gradients(model, Subnetwork((0.0,) * 5))
    assert loss.isfinite()
    assert all((grad is None) == name.startswith("blocks") for name, grad in grads.items())


def test_the_head_runs_on_masked_positions_only() -> None:
    model, data = bert(), batch()
    found = scores(model, data, Subnetwork.full(5))
    assert found.shape == (3, 3, 50)
    assert data.positions_BM is not None
    moved = data._replace(positions_BM=data.positions_BM.flip(1))
    assert_close(scores(model, moved, Subnetwork.full(5)), found.flip(1))


def test_without_positions_the_head_runs_on_all_of_them() -> None:
    model, data = bert(), batch()
    everywhere = torch.arange(data.tokens_BS.shape[1]).expand_as(data.tokens_BS)
    listed = Batch(data.tokens_BS, everywhere, data.tokens_BS.roll(1, 1))
    implied = listed._replace(positions_BM=None)
    full = Subnetwork.full(5)
    assert torch.equal(model(implied, model.inputs(full)), model(listed, model.inputs(full)))
    assert torch.equal(scores(model, implied, full), scores(model, listed, full))


def test_initial_weights_belong_to_seed_and_name() -> None:
    one, same, other = Bert(CONFIG, 0), Bert(CONFIG, 0), Bert(CONFIG, 1)
    deeper = Bert(CONFIG.resized(Shape(7, 4, 4)), 0)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, dict(same.named_parameters())[name])
        assert torch.equal(parameter, dict(deeper.named_parameters())[name])
        if parameter.ndim == 2:
            assert not torch.equal(parameter, dict(other.named_parameters())[name])
    weight = Bert(SIZES["tiny"], 0).tokens.weight
    assert weight.mean().abs() < 2e-4
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert weight[0, :3].tolist() == pytest.approx([0.0026388087, -0.0025888446, 0.0010609610], rel=1e-6)


def test_dropout_follows_the_seed_and_rests_in_evaluation() -> None:
    model, data = bert(replace(CONFIG, dropout=0.5)), batch()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(model(data, model.inputs(Subnetwork.full(5))).item())
    assert losses[0] == losses[1] != losses[2]
    model.eval()
    assert model(data, model.inputs(Subnetwork.full(5))).item() == model(data, model.inputs(Subnetwork.full(5))).item()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"6 layers.* 5"):
        bert().inputs(Subnetwork.full(6))
    with pytest.raises(ValueError, match=r"17 tokens.* 16 "):
        hidden(bert(), torch.zeros(1, 17, dtype=torch.long), Subnetwork.full(5))
    with pytest.raises(ValueError, match=r"model\.parts is 5.*mlp.*48"):
        replace(CONFIG, parts=5)
    with pytest.raises(ValueError, match=r"model\.dropout is 1.* 0 to "):
        replace(CONFIG, dropout=1)
    with pytest.raises(ValueError, match=r"model\.layers is 0.* 1 "):
        replace(CONFIG, layers=0)


def test_segments_do_not_see_each_other() -> None:
    model, tokens = bert(), batch().tokens_BS
    segments = torch.zeros_like(tokens)
    segments[:, 10:] = 1
    together = hidden(model, tokens, Subnetwork.full(5), segments)
    first = hidden(model, tokens[:, :10], Subnetwork.full(5))
    assert_close(together[:, :10], first)
    other = tokens.clone()
    other[:, 10:] = (other[:, 10:] + 1) % 50
    assert_close(hidden(model, other, Subnetwork.full(5), segments)[:, :10], first)
    assert not torch.allclose(hidden(model, tokens, Subnetwork.full(5))[:, :10], first)
    one = torch.zeros_like(tokens)
    assert_close(hidden(model, tokens, Subnetwork.full(5), one), hidden(model, tokens, Subnetwork.full(5)))
