"""Growth inside a model that has all its layers trains what a model that is built anew at each growth does."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from accelerate.accelerator import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from raptr import attach, idle, make_method, running, stepwise
from raptr.integrations.steps import Steps
from raptr.methods import Method
from raptr.subnetworks import Shape
from tests.integrations.tiny import llama, whole

STEPS = 12
TOKENS = (torch.arange(4)[:, None] * 3 + torch.arange(12)) % 20
SOURCES = {  # of each method: where the layers of the second and of the third stage come from
    "stacking": ([0, 1, 1], [0, 1, 2, 0, 1, 2]),
    "progressive-stacking": ([0, 1, 1], [0, 1, 2, 0, 1, 2]),
    "double-then-part": ([0, 1, 1], [0, 1, 2, 0, 1, 2]),
    "midas": ([0, 0, 1], [0, 1, 2, 0, 1, 2]),
    "lemon": ([0, 1, 1], [0, 0, 1, 1, 2, 2]),
    "msg": ([0, 1, 1], [0, 1, 2, 0, 1, 2]),
    "msg-interpolation": ([0, 1, 1], [0, 0, 1, 1, 2, 2]),
    "g-stack": ([0, 1, 0, 1, 0, 1],),
    "one-layer": ([0, 0, 0, 0, 0, 0],),
}
SCHEDULES = {"double-then-part": "2-3-5-6", "g-stack": "2-6", "one-layer": "1-6"}
Make = Callable[[nn.Module], Optimizer]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def batch(step: int) -> dict[str, Tensor]:
    tokens = (TOKENS + step) % 20
    return {"input_ids": tokens, "labels": tokens}


def method_of(name: str, **settings: Any) -> Method:
    schedule = SCHEDULES.get(name, "2-3-6")
    return make_method(name, shape=Shape(6, 2, 4), steps=STEPS, schedule=schedule, **settings)


def grown(
    model: nn.Module, optimizer: Optimizer, sources: list[int], moments: str, make: Make
) -> tuple[nn.Module, Optimizer]:
    """A new model and a new optimizer, made from smaller ones by the names of their parameters."""
    larger = llama(num_hidden_layers=len(sources))
    make_new = make(larger)
    old, names = dict(model.named_parameters()), {}
    for name in dict(larger.named_parameters()):
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(sources[int(parts[2])])
        names[name] = ".".join(parts)
    new_layers = {layer for layer, source in enumerate(sources) if source in sources[:layer]}
    with torch.no_grad():
        for name, parameter in larger.named_parameters():
            source = old[names[name]]
            parameter.copy_(source)
            new = name.split(".")[1] == "layers" and int(name.split(".")[2]) in new_layers
            if moments == "copy" or (moments == "zero" and not new):
                make_new.state[parameter] = copy.deepcopy(optimizer.state[source])
    return larger, make_new


def built_anew(method: Method, make: Make, moments: str) -> tuple[nn.Module, list[float]]:
    """Training of models that have no more layers than the method's in each stage."""
    plans = list(SOURCES[method.name])
    model: nn.Module = llama(num_hidden_layers=method.shape(0).layers)
    model.load_state_dict({name: llama().state_dict()[name] for name in model.state_dict()})
    optimizer, losses = make(model), []
    for step in range(STEPS):
        if method.shape(step).layers > len(model.model.layers):  # type: ignore[union-attr,arg-type]
            model, optimizer = grown(model, optimizer, plans.pop(0), moments, make)
        with running(attach(model), method.subnetwork(step)):
            loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert not plans
    return model, losses


def in_place(
    name: str, make: Make, steps: range = range(STEPS), start: dict[str, Any] | None = None, **settings: Any
) -> tuple[hf.LlamaForCausalLM, list[float], dict[str, Any]]:
    """The same in a model of six layers; the last value resumes it."""
    model = llama()
    optimizer = make(model)
    if start is not None:
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
    schedule, losses = SCHEDULES.get(name, "2-3-6"), []
    method = stepwise(model, name, steps=STEPS, schedule=schedule, optimizer=optimizer, **settings)
    for step in steps:
        method.begin(step)
        loss = model(**batch(step)).loss
        loss.backward()
        method.end()
        idle(optimizer, "skip")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert whole(model)
    return model, losses, copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def equal(one: nn.Module, two: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), two.state_dict().items(), strict=True)
    return all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


@pytest.mark.parametrize("moments", ["copy", "zero", "reset"])
@pytest.mark.parametrize("name", SOURCES)
def test_growth_in_place_trains_what_models_built_anew_do(name: str, moments: str) -> None:
    expected, losses = built_anew(method_of(name, moments=moments), adamw, moments)
    model, found, _ = in_place(name, adamw, moments=moments)
    assert found == losses
    assert equal(model, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
        lambda model: hf.optimization.Adafactor(model.parameters(), lr=1e-2, relative_step=False),
    ],
    ids=["sgd", "fused", "adafactor", "adafactor of transformers"],
)
def test_any_optimizer_state_is_copied(make: Make) -> None:
    expected, losses = built_anew(method_of("progressive-stacking"), make, "copy")
    model, found, _ = in_place("progressive-stacking", make)
    assert found == losses
    assert equal(model, expected)
    assert in_place("progressive-stacking", make, moments="reset")[1] != losses


@pytest.mark.parametrize("name", ["progressive-stacking", "lemon", "msg"])
def test_a_resumed_loop_grows_once(name: str) -> None:
    model, losses, _ = in_place(name, adamw)
    for stop in range(1, STEPS):  # the growths are at steps 4 and 8
        _, first, start = in_place(name, adamw, range(stop))
        resumed, second, _ = in_place(name, adamw, range(stop, STEPS), start)
        assert first + second == losses, stop
        assert equal(resumed, model)


def test_a_step_that_is_repeated_does_not_grow_again_and_an_earlier_one_does() -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters())  # it has no state, and makes no step here
    steps = stepwise(model, "progressive-stacking", steps=STEPS, schedule="2-3-6", optimizer=optimizer)

    def run(step: int) -> None:
        steps.begin(step)
        model(**batch(step)).loss.backward()
        steps.end()

    layers = model.model.layers
    for step in range(5):
        run(step)
    made = layers[2].mlp.up_proj.weight
    assert torch.equal(made, layers[1].mlp.up_proj.weight)
    with torch.no_grad():
        made.add_(1.0)
    run(4)
    run(5)
    assert not torch.equal(made, layers[1].mlp.up_proj.weight)
    run(4)  # back to the weights before it, which the loop has loaded
    assert torch.equal(made, layers[1].mlp.up_proj.weight)
    run(8)  # and over the steps in between
    assert torch.equal(layers[5].mlp.up_proj.weight, made)


def test_a_checkpoint_that_is_loaded_into_a_loop_that_has_begun_does_not_grow_again() -> None:
    trained, _, later = in_place("progressive-stacking", adamw, range(10))
    model = llama()
    steps = stepwise(model, "progressive-stacking", steps=STEPS, schedule="2-3-6", optimizer=adamw(model))
    for step in range(2):
        steps.begin(step)
        model(**batch(step)).loss.backward()
        steps.end()
    model.load_state_dict(later["model"])
    with pytest.raises(RuntimeError, match=r"begin\(10\): steps 2 to 9 .*layers from 3 on are trained.*resume"):
        steps.begin(10)
    assert equal(model, trained)
    steps.resume(steps.state())
    steps.begin(10)
    steps.close()
    assert equal(model, trained)


def test_layers_above_the_model_have_neither_gradients_nor_optimizer_state() -> None:
    model, _, start = in_place("progressive-stacking", adamw, range(4))
    before = llama()
    for layer in range(2, 6):
        assert equal(model.model.layers[layer], before.model.layers[layer])
    names = [name for name, _ in model.named_parameters()]
    assert {names[number].split(".")[2] for number in start["optimizer"]["state"] if "layers" in names[number]} == {
        "0",
        "1",
    }


def test_the_model_is_judged_with_the_layers_that_it_has() -> None:
    model, _, _ = in_place("progressive-stacking", adamw, range(6))
    steps = stepwise(model, "progressive-stacking", steps=STEPS, schedule="2-3-6", optimizer=adamw(model))
    small = llama(num_hidden_layers=3)
    small.load_state_dict({name: weight for name, weight in model.state_dict().items() if name in small.state_dict()})
    model.eval()
    with torch.no_grad():
        expected = small.eval()(**batch(0)).loss
        steps.begin_evaluation(6)
        assert torch.equal(model(**batch(0)).loss, expected)
        steps.close()
        plain = model(**batch(0)).loss
        assert not torch.equal(plain, expected)
        steps.expect_evaluation(6)
        for _ in range(2):
            assert torch.equal(model(**batch(0)).loss, expected)
            assert whole(model)
        copied = copy.deepcopy(model)
        assert torch.equal(copied(**batch(0)).loss, plain)
        with pytest.raises(ValueError, match="input_ids"):
            model()
        assert whole(model)
        steps.close()
        assert torch.equal(model(**batch(0)).loss, plain)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_calls_with_gradients_are_no_evaluation() -> None:
    model = llama()
    expected = model(**batch(0)).loss
    steps = stepwise(model, "progressive-stacking", steps=STEPS, schedule="2-3-6", optimizer=adamw(model))
    steps.expect_evaluation(1)
    assert torch.equal(model(**batch(0)).loss, expected)
    assert torch.equal(model.eval()(**batch(0)).loss, expected)
    with torch.no_grad():
        assert torch.equal(model.train()(**batch(0)).loss, expected)


def test_growth_and_flops_are_counted() -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters())  # it has no state, and makes no step here
    steps = stepwise(model, "progressive-stacking", steps=STEPS, schedule="2-3-6", optimizer=optimizer)
    sizes = []
    for step in range(STEPS):
        steps.begin(step)
        model(**batch(step))
        steps.end()
        sizes.append(steps.size)
    assert sizes == [2] * 4 + [3] * 4 + [6] * 4
    assert steps.flops == pytest.approx(11 / 18)


def wrapped(optimizer: Optimizer) -> Optimizer:
    """As a loop with `accelerate` has it."""
    wrapper: Optimizer = Accelerator(cpu=True).prepare(optimizer)
    return wrapper


@pytest.fixture
def no_accelerator() -> Iterator[None]:
    """Other tests, of the Trainer, make an accelerator of their own."""
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    ("given", "stepped", "told"),
    [
        ("blocks", "blocks", False),
        ("blocks", "others", True),
        ("both", "both", False),
        ("both", "others", True),  # the one for the embeddings has state
        ("wrapped", "blocks", False),
        ("plain", "plain", False),
        ("plain wrapped", "plain", False),
    ],
)
@pytest.mark.usefixtures("no_accelerator")
def test_an_optimizer_that_the_loop_does_not_step_is_noticed(given: str, stepped: str, told: bool) -> None:
    model = llama()
    blocks = list(model.model.layers.parameters())
    rest = [parameter for name, parameter in model.named_parameters() if ".layers." not in name]
    of_blocks, of_rest, plain = torch.optim.AdamW(blocks), torch.optim.AdamW(rest), torch.optim.SGD(blocks)
    sets: dict[str, list[Optimizer]] = {
        "blocks": [of_blocks],
        "others": [torch.optim.AdamW(blocks), of_rest],
        "both": [of_blocks, of_rest],
        "wrapped": [wrapped(of_blocks)],
        "plain": [plain],
        "plain wrapped": [wrapped(plain)],
    }
    steps = stepwise(model, "progressive-stacking", steps=STEPS, schedule="2-3-6", optimizer=sets[given])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(STEPS):
            steps.begin(step)
            model(**batch(step)).loss.backward()
            steps.end()
            for optimizer in sets[stepped]:
                optimizer.step()
            model.zero_grad()
    expected = ["begin(4): the model grows", "begin(8): the model grows"] if told else []
    assert [str(warning.message).split(",")[0] for warning in found] == expected


def test_what_cannot_grow_is_refused() -> None:
    model = llama()
    optimizer = adamw(model)
    with pytest.raises(ValueError, match=r"stacking.*optimizer is not given.*optimizer="):
        stepwise(model, "stacking", steps=STEPS)
    attention = [p for name, p in model.named_parameters() if "mlp" not in name]
    with pytest.raises(ValueError, match=r"stacking.*optimizer does not hold mlp\.gate_proj"):
        stepwise(model, "stacking", steps=STEPS, optimizer=torch.optim.AdamW(attention))
    with pytest.raises(ValueError, match=r"lemon.*init='zero'.*init='copy'"):
        stepwise(model, "lemon", steps=STEPS, optimizer=optimizer, init="zero")
    with pytest.raises(ValueError, match=r"msg adds heads or MLP parts.*raptr pretrain"):
        stepwise(model, "msg", steps=STEPS, optimizer=optimizer, heads="1-2")
    model.model.layers[4].mlp = nn.Linear(16, 16)
    with pytest.raises(ValueError, match=r"layer 5 of the blocks at 'model.layers'.*layer 3.*no mlp\.weight"):
        stepwise(model, "stacking", steps=STEPS, schedule="4-6", optimizer=adamw(model))
    unlike = t5(num_decoder_layers=2)
    lists = ["encoder.block", "decoder.block"]
    with pytest.raises(ValueError, match=r"stacking grows several lists.*'encoder.block, decoder.block' have 4, 2"):
        stepwise(unlike, "stacking", steps=STEPS, blocks=lists, optimizer=adamw(unlike))


def t5(**settings: Any) -> hf.T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 4, "num_heads": 2, "vocab_size": 20}
    more: dict[str, Any] = {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(hf.T5Config(**{**sizes, **more, **settings}))


def test_the_lists_of_an_encoder_decoder_grow_together() -> None:
    model = t5()
    optimizer = adamw(model)
    sizes: list[int] = []
    lists = ["encoder.block", "decoder.block"]
    steps = stepwise(model, "progressive-stacking", steps=10, schedule="1-2-4", blocks=lists, optimizer=optimizer)
    small = t5(num_layers=1)
    small.load_state_dict({name: weight for name, weight in model.state_dict().items() if name in small.state_dict()})
    for step in range(10):
        steps.begin(step)
        loss = model(**batch(step)).loss
        loss.backward()
        steps.end()
        if step == 0:
            assert torch.equal(loss, small(**batch(step)).loss)
        if step in (3, 7):  # right after a growth
            for blocks in (model.encoder.block, model.decoder.block):
                half = sizes[-1] // 2
                for lower, upper in zip(blocks[:half], blocks[half : 2 * half], strict=True):
                    assert equal(lower.get_submodule("layer.1"), upper.get_submodule("layer.1"))
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(steps.size)
    assert sizes == [2] * 3 + [4] * 4 + [8] * 3


def test_what_only_the_first_block_has_stays_there() -> None:
    model = hf.T5EncoderModel(t5().config)
    optimizer = adamw(model)
    steps = stepwise(model, "progressive-stacking", steps=8, schedule="2-4", optimizer=optimizer)
    for step in range(8):
        steps.begin(step)
        model(input_ids=TOKENS).last_hidden_state.square().sum().backward()
        steps.end()
        optimizer.step()
        optimizer.zero_grad()
    assert steps.size == 4


def test_a_norm_that_the_first_block_lacks_keeps_its_weights() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    sizes["num_attention_heads"] = 2
    model = hf.ModernBertForMaskedLM(hf.ModernBertConfig(vocab_size=20, pad_token_id=0, **sizes))
    optimizer = adamw(model)
    steps = stepwise(model, "progressive-stacking", steps=4, schedule="2-4", optimizer=optimizer)
    for step in range(4):
        steps.begin(step)
        if step == 2:
            first, third = model.model.layers[0], model.model.layers[2]
            assert isinstance(first.attn_norm, nn.Identity)
            assert torch.equal(third.attn_norm.weight, torch.ones(16))
            assert torch.equal(third.attn.Wqkv.weight, first.attn.Wqkv.weight)
        model(**batch(step)).loss.backward()
        steps.end()
        optimizer.step()
        optimizer.zero_grad()


def test_several_optimizers_and_frozen_parameters() -> None:
    model = llama()
    for block in model.model.layers:
        block.input_layernorm.requires_grad_(False)
    matrices = [p for p in model.parameters() if p.dim() == 2 and p.requires_grad]
    others = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others)]
    steps = stepwise(model, "progressive-stacking", steps=8, schedule="3-6", optimizer=optimizers)
    for step in range(5):
        steps.begin(step)
        model(**batch(step)).loss.backward()
        steps.end()
        if step < 4:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    one, two = model.model.layers[1], model.model.layers[4]
    for name, source in one.named_parameters():
        target = two.get_parameter(name)
        assert torch.equal(source, target)
        for optimizer in optimizers:
            assert (source in optimizer.state) == (target in optimizer.state)
            for key, value in optimizer.state.get(source, {}).items():
                assert torch.equal(value, optimizer.state[target][key])
                assert value is not optimizer.state[target][key]


def test_frozen_weights_and_adapters_do_not_grow() -> None:
    frozen = llama()
    frozen.model.layers[0].requires_grad_(False)
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    models: list[tuple[nn.Module, str]] = [(frozen, "self_attn.q_proj.weight"), (adapted, "q_proj.base_layer.weight")]
    for model, name in models:
        optimizer = adamw(model)
        with pytest.raises(ValueError, match=rf"stacking.*layer 4 .* layer 1, .*{name} is frozen.*such as raptr"):
            stepwise(model, "stacking", steps=STEPS, schedule="3-6", optimizer=optimizer)
        assert losses_of(stepwise(model, "raptr", steps=STEPS), optimizer)


def losses_of(steps: Steps, optimizer: Optimizer, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, STEPS):
        steps.begin(step)
        loss = steps.routed.model(**batch(step)).loss
        loss.backward()
        steps.end()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_loaded_weights_that_growth_overwrites_are_announced(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    config = hf.AutoConfig.from_pretrained(tmp_path)

    def warned(model: nn.Module, name: str, first: int = 0, **settings: Any) -> list[str]:
        optimizer = adamw(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses_of(stepwise(model, name, steps=STEPS, optimizer=optimizer, **settings), optimizer, first)
        return [str(entry.message) for entry in caught if "overwrites" in str(entry.message)]

    load = hf.LlamaForCausalLM.from_pretrained
    (message,) = warned(load(tmp_path), "progressive-stacking", schedule="2-3-6")
    assert "method progressive-stacking overwrites 4 of the 6 layers at 'model.layers'" in message
    assert "raptr" in message
    assert "pld" in message
    (message,) = warned(load(tmp_path, num_hidden_layers=8), "g-stack", schedule="4-8")
    assert "overwrites 2 of the 8 layers" in message
    assert not warned(load(tmp_path), "raptr")
    assert not warned(load(tmp_path), "progressive-stacking", first=3, schedule="2-3-6")  # a checkpoint of this method
    assert not warned(load(tmp_path, num_hidden_layers=12), "g-stack", schedule="6-12")  # grows what was loaded
    assert not warned(hf.LlamaForCausalLM(config), "progressive-stacking", schedule="2-3-6")  # it has a name only


def test_trained_weights_that_growth_overwrites_are_announced_however_they_came() -> None:
    trained, copied = llama(), llama()
    losses_of(stepwise(trained, "full", steps=STEPS), adamw(trained))
    copied.load_state_dict(trained.state_dict())
    for model in (trained, copied, copy.deepcopy(trained)):
        steps = stepwise(model, "progressive-stacking", steps=STEPS, schedule="2-3-6", optimizer=adamw(model))
        with pytest.warns(UserWarning, match=r"overwrites 4 of the 6 layers.*loaded or trained before.*raptr"):
            steps.begin(0)
        steps.close()
    smaller, larger = llama(), llama(num_hidden_layers=12)
    smaller.load_state_dict(trained.state_dict())
    larger.load_state_dict(smaller.state_dict(), strict=False)
    steps = stepwise(larger, "g-stack", steps=STEPS, schedule="6-12", optimizer=adamw(larger))
    steps.begin(0)  # it grows what was loaded: a warning would be an error
    steps.close()


def test_what_was_frozen_or_adapted_after_the_attachment_does_not_grow() -> None:
    def freeze(model: nn.Module) -> None:
        model.get_submodule("model.layers.0").requires_grad_(False)

    def adapt(model: nn.Module) -> None:
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))

    for change in (freeze, adapt):
        model = llama()
        before = copy.deepcopy(model.model.layers[3].self_attn.v_proj.weight)
        steps = stepwise(model, "stacking", steps=STEPS, schedule="3-6", optimizer=adamw(model))
        change(model)
        with pytest.raises(ValueError, match=r"stacking.*layer 4 .* layer 1, .* is frozen.*such as raptr"):
            steps.begin(0)
        assert torch.equal(model.model.layers[3].self_attn.v_proj.weight, before)


def test_a_second_training_of_a_model_that_has_grown_is_announced() -> None:
    model = llama()
    optimizer = adamw(model)

    def train() -> None:
        steps = stepwise(model, "progressive-stacking", steps=STEPS, schedule="2-3-6", optimizer=optimizer)
        losses_of(steps, optimizer)

    train()  # a warning would be an error
    with pytest.warns(UserWarning, match=r"overwrites 4 of the 6 layers.*loaded or trained before"):
        train()


def test_optimizers_may_come_from_an_iterator() -> None:
    model = llama()
    optimizer = adamw(model)
    steps = stepwise(model, "progressive-stacking", steps=STEPS, schedule="2-3-6", optimizer=iter([optimizer]))
    assert losses_of(steps, optimizer) == in_place("progressive-stacking", adamw)[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, at the import
def test_an_optimizer_whose_state_is_elsewhere_is_refused(tmp_path: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = llama()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        with pytest.raises(ValueError, match=r"stacking copies.*ZeroRedundancyOptimizer.*Use FSDP2.*raptr"):
            stepwise(model, "stacking", steps=STEPS, optimizer=optimizer)
        assert losses_of(stepwise(model, "raptr", steps=STEPS), optimizer)
    finally:
        distributed.destroy_process_group()


class Residual(nn.Module):
    """A block with a constant of its layer, which no checkpoint has, and statistics, which it has."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.factor: Tensor
        self.register_buffer("factor", torch.tensor(1.0 + layer), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return x + self.factor * y


def test_statistics_are_copied_and_constants_of_a_layer_are_not() -> None:
    model = nn.Sequential(*(Residual(layer) for layer in range(4)))
    optimizer = adamw(model)
    steps = stepwise(model, "progressive-stacking", steps=4, schedule="2-4", optimizer=optimizer)
    for step in range(3):
        steps.begin(step)
        if step == 2:
            for lower, upper in ((0, 2), (1, 3)):
                mean, copied = (model.get_buffer(f"{layer}.norm.running_mean") for layer in (lower, upper))
                assert mean.any()
                assert torch.equal(mean, copied)
        model(torch.randn(16, 8)).square().mean().backward()
        steps.end()
        optimizer.step()
        optimizer.zero_grad()
    assert [model.get_buffer(f"{layer}.factor") for layer in range(4)] == [1, 2, 3, 4]
