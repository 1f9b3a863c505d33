"""A step that is begun and ended equals one inside `running`, and no failure leaves a part of the model behind."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from raptr import idle, stepwise
from raptr.integrations.steps import Steps, warn_of_scales
from raptr.methods import METHODS, make_method
from raptr.models.attach import running
from raptr.subnetworks import Schedule, Shape
from raptr.train.idle import Policy
from tests.integrations.tiny import llama, whole

TOKENS = torch.arange(32).reshape(2, 16) % 20
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


def steps_of(model: nn.Module, **settings: Any) -> Steps:
    return stepwise(model, "raptr", **{"steps": 8, "schedule": "2-3-4-6", **settings})


def same(one: Tensor | None, two: Tensor | None) -> bool:
    return one is two if one is None or two is None else torch.equal(one, two)


def test_a_step_is_the_one_inside_running() -> None:
    model, other = llama(), llama()
    steps, control = steps_of(model), steps_of(other)
    for step in range(8):
        steps.begin(step)
        model(**BATCH).loss.backward()
        steps.end()
        with running(control.routed, control.method.subnetwork(step)):
            other(**BATCH).loss.backward()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert same(one.grad, two.grad)
        assert whole(model)
        assert not model._forward_pre_hooks
        model.zero_grad()
        other.zero_grad()


def test_stage_size_and_flops_are_counted() -> None:
    model = llama()
    steps, found = steps_of(model), []
    for step in range(8):
        steps.begin(step)
        model(**BATCH)
        steps.end()
        found.append(steps.metrics())
    assert [metrics["raptr/stage"] for metrics in found] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [metrics["raptr/size"] for metrics in found] == [2, 2, 3, 3, 4, 4, 6, 6]
    assert found[3]["raptr/flops"] == pytest.approx(10 / 24)
    assert found[-1]["raptr/flops"] == pytest.approx(30 / 48)


def test_begin_twice_is_refused_and_the_model_whole() -> None:
    model = llama()
    steps = steps_of(model)
    steps.begin(3)
    with pytest.raises(RuntimeError, match=r"begin\(4\).*step 3"):
        steps.begin(4)
    assert whole(model)
    steps.begin(4)
    assert not whole(model)


def test_end_without_begin_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"end\(\).*begin"):
        steps_of(llama()).end()


def test_a_step_in_which_the_model_was_not_called_is_refused() -> None:
    model = llama()
    steps = steps_of(model)
    steps.begin(0)
    llama()(**BATCH)
    with pytest.raises(RuntimeError, match=r"model\.layers"):
        steps.end()
    assert whole(model)
    assert steps.steps_run == 0


def test_end_in_a_finally_clause_leaves_the_exception_alone() -> None:
    model = llama()
    steps = steps_of(model)

    def step() -> None:
        steps.begin(0)
        try:
            raise KeyError("mine")
        finally:
            steps.end()

    with pytest.raises(KeyError, match="mine"):
        step()
    assert whole(model)
    assert steps.steps_run == 0


def test_training_in_an_except_clause_is_counted() -> None:
    model = llama()
    steps = steps_of(model)
    try:
        raise KeyError("out of memory, say")
    except KeyError:
        steps.begin(0)
        model(**BATCH)
        steps.end()
    assert steps.steps_run == 1


def test_evaluation_after_an_exception_runs_the_whole_model() -> None:
    model = llama().eval()
    with torch.no_grad():
        expected = model(**BATCH).loss
    steps = steps_of(model)
    steps.begin(0)  # and then comes an exception
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="step 0"):
        assert torch.equal(model(**BATCH).loss, expected)
    with torch.no_grad():
        assert torch.equal(model(**BATCH).loss, expected)
    with pytest.raises(RuntimeError, match=r"end\(\)"):
        steps.end()
    steps.begin(1)
    steps.close()
    assert whole(model)
    assert not model._forward_pre_hooks
    assert not model._load_state_dict_pre_hooks


def test_weights_are_loaded_after_an_exception() -> None:
    model = llama()
    weights = copy.deepcopy(model.state_dict())
    steps = steps_of(model)
    steps.begin(0)
    with pytest.warns(RuntimeWarning, match=r"load_state_dict.*step 0"):
        model.load_state_dict(weights)
    assert whole(model)
    steps.begin(1)
    steps.close()


def test_a_copy_made_within_a_step_is_whole_and_leaves_the_step_alone() -> None:
    model = llama()
    steps = steps_of(model)
    steps.begin(0)
    other = copy.deepcopy(model).eval()
    with torch.no_grad():
        other(**BATCH)
    assert whole(other)
    assert steps.step == 0


def test_evaluation_is_the_methods() -> None:
    model = llama().eval()
    steps = steps_of(model)
    with torch.no_grad():
        with running(steps.routed, steps.method.evaluated(2)):
            expected = model(**BATCH).loss
        steps.begin_evaluation(2)
        assert torch.equal(model(**BATCH).loss, expected)
        steps.close()
        assert whole(model)
        assert not torch.equal(model(**BATCH).loss, expected)


class Net(nn.Module):
    """Recomputes segments of several blocks in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(6)])
        self.checkpointing = False

    def forward(self, x: Tensor) -> Any:
        if self.checkpointing:
            x = checkpoint(self.segment(0), x, use_reentrant=False)
            return checkpoint(self.segment(3), x, use_reentrant=False)
        for block in self.blocks:
            x = block(x)
        return x

    def segment(self, start: int) -> Any:
        def run(x: Tensor) -> Tensor:
            for layer in range(start, start + 3):  # looked up anew when recomputed
                x = self.blocks[layer](x)
            return x

        return run


def test_what_is_recomputed_is_the_same_subnetwork() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 4, 8)
    steps, gradients = steps_of(model), []
    for model.checkpointing in (False, True):
        model.zero_grad()
        steps.begin(0)
        model(x).square().sum().backward()
        steps.end()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert any(gradient is None for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        assert same(gradient, gradients[1][name]), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_have_the_same_gradients(reentrant: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = llama().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        steps = steps_of(model)
        steps.begin(0)
        model(**BATCH).loss.backward()
        steps.end()
        idle(torch.optim.AdamW(model.parameters()), "zero")
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


# Dynamo itself reads `.grad` of the hidden states; it hides the warning, but not one that is an error.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of its own, on some versions
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_blocks_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, compiler = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **rest: compiler(fn, **{**rest, "backend": counter}))
    torch._dynamo.reset()
    model, plain = llama(), llama()
    keys = list(model.state_dict())
    steps, control = steps_of(model, compile=True), steps_of(plain)
    for step in range(8):
        losses = []
        for each, net in ((steps, model), (control, plain)):
            each.begin(step)
            loss = net(**BATCH).loss
            loss.backward()
            each.end()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1])
    assert counter.frame_count == 1
    assert list(model.state_dict()) == keys


WIDTHS = {"heads": "1-1-2-2", "parts": "1-2-2-4"}


def test_heads_and_parts_run_in_steps_as_inside_running() -> None:
    model, other = llama(), llama()
    steps, control, expected = steps_of(model, **WIDTHS), steps_of(other, **WIDTHS), 0.0
    assert steps.routed.shape == steps.method.target == Shape(layers=6, heads=2, parts=4)
    for step in range(8):
        subnetwork = control.method.subnetwork(step)
        steps.begin(step)
        model(**BATCH).loss.backward()
        steps.end()
        with running(control.routed, subnetwork):
            other(**BATCH).loss.backward()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert same(one.grad, two.grad)
        # Of 16 x 16 weights four, and of the scores of 16 tokens two products; three maps to and from a width of 32.
        heads, parts = (1, 1, 2, 2)[step // 2] / 2, (1, 2, 2, 4)[step // 2] / 4
        expected += subnetwork.size * (heads * (4 * 256 + 2 * 16 * 16) + parts * 3 * 512) / (1536 + 1536)
        assert steps.flops == pytest.approx(expected / (6 * (step + 1)))
        model.zero_grad()
        other.zero_grad()
    assert steps.flops < 0.5


def test_a_method_and_a_model_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model is 'raptr'; a torch\.nn\.Module is allowed"):
        stepwise("raptr", llama(), steps=10)  # type: ignore[arg-type]


def test_settings_of_heads_and_parts_are_refused_for_other_blocks() -> None:
    for axis, sizes in WIDTHS.items():
        with pytest.raises(ValueError, match=f"{axis} is '{sizes}'.*only depth.*EncoderLayer.*setting {axis}"):
            steps_of(Net(), **{axis: sizes})
    assert steps_of(llama(), mlp_parts=2, parts="1-1-2-2").method.target.parts == 2
    with pytest.raises(ValueError, match=r"mlp_parts is 5.*32"):
        steps_of(llama(), mlp_parts=5)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs(name: str) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    branches = name in ("pld", "stochastic-depth", "layer-dropout")
    if branches:
        with pytest.raises(ValueError, match=f"{name}.*scaled='layer'"):
            stepwise(model, name, steps=8)
    settings: dict[str, Any] = {"scaled": "layer"} if branches else {}
    steps = stepwise(model, name, steps=8, optimizer=optimizer, **settings)
    steps.begin(0)
    model(**BATCH).loss.backward()
    steps.end()
    assert whole(model)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_does_not_end_with_a_plain_model_is_announced(name: str) -> None:
    settings: dict[str, Any] = {"scaled": "layer"} if name == "stochastic-depth" else {}
    method = make_method(name, shape=Shape(layers=6), steps=8, **settings)
    if name == "stochastic-depth":
        with pytest.warns(UserWarning, match=r"stochastic-depth never trains the whole model"):
            warn_of_scales(method)
    else:
        warn_of_scales(method)  # a warning would be an error


def scaled_loop(
    policy: Policy, steps: range, start: dict[str, Any] | None = None, *, overflow: bool = True
) -> tuple[dict[str, Any], list[float]]:
    """Steps with a gradient scaler; in step 2 a gradient overflows, or the optimizer is not called at all."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scaler, part = torch.amp.GradScaler("cpu", init_scale=1024.0), steps_of(model)
    if start is not None:
        start = copy.deepcopy(start)
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
        scaler.load_state_dict(start["scaler"])
        part.resume(start["steps"])
    losses = []
    for step in steps:
        part.begin(step)
        loss = model(**BATCH).loss
        scaler.scale(loss).backward()
        part.end()
        if step == 2 and overflow:
            assert model.lm_head.weight.grad is not None
            model.lm_head.weight.grad[0, 0] = torch.inf
        if step % 2:  # with and without gradients that are unscaled before the policy is applied
            scaler.unscale_(optimizer)
        idle(optimizer, policy)
        if step != 2 or overflow:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": part.state()}
    return {**state, "scaler": scaler.state_dict()}, losses


@pytest.mark.parametrize("policy", ["skip", "zero"])
def test_a_step_that_the_scaler_skips_changes_nothing_but_is_counted(policy: Policy) -> None:
    state, losses = scaled_loop(policy, range(8))
    assert state["scaler"]["scale"] == 512  # halved once
    assert state["steps"]["steps_run"] == 8
    without, same = scaled_loop(policy, range(8), overflow=False)
    assert losses[:3] == same[:3]
    assert losses == pytest.approx(same, rel=1e-5)
    names = [name for name, _ in llama().named_parameters()]
    for number, moments in without["optimizer"]["state"].items():
        assert state["optimizer"]["state"][number]["step"] == moments["step"], names[number]
    for stop in (2, 3, 5):  # before the step that is skipped, right after it, and later
        half, first = scaled_loop(policy, range(stop))
        resumed, second = scaled_loop(policy, range(stop, 8), half)
        assert first + second == losses
        assert resumed["steps"] == state["steps"]
        assert all(torch.equal(resumed["model"][name], state["model"][name]) for name in state["model"])


def test_a_loop_that_repeats_a_skipped_step_runs_the_same_layers() -> None:
    model = llama()
    steps, ran = steps_of(model), []
    for step in (0, 1, 1, 2):
        steps.begin(step)
        model(**BATCH).loss.backward()
        steps.end()
        ran.append(tuple(i for i, block in enumerate(model.model.layers) if next(block.parameters()).grad is not None))
        model.zero_grad()
    assert ran == [steps.method.subnetwork(step).kept for step in (0, 1, 1, 2)]
    assert steps.flops == pytest.approx(sum(map(len, ran)) / 24)


def test_going_on_with_another_method_is_refused() -> None:
    model = llama()
    steps = steps_of(model)
    steps.begin(0)
    model(**BATCH)
    steps.end()
    same = steps_of(model)
    same.resume(steps.state())
    assert (same.steps_run, same.layers_run) == (1, 2)
    with pytest.raises(ValueError, match=r"schedule was '2-3-4-6' and is '3-4-5-6'"):
        steps_of(model, schedule="3-4-5-6").resume(steps.state())
    with pytest.raises(ValueError, match=r"steps was 8 and is 12"):
        steps_of(model, steps=12).resume(steps.state())
    older = steps.state()
    for setting in ("hold", "fixed"):  # a checkpoint from before there were these settings
        del older["method"][setting]
    same.resume(older)
    with pytest.raises(ValueError, match=r"hold was 1 and is 2"):
        steps_of(model, hold=2).resume(older)
    older["method"]["width_exponent"] = 0.5  # of checkpoints from before it was left out where all heads and parts run
    same.resume(older)


def test_a_method_with_a_schedule_that_no_text_stands_for_goes_on() -> None:
    model = llama()
    schedule = Schedule.parse("1-4-6", layers=6, steps=8, fixed=())  # as text the first and last layer would be fixed
    steps = steps_of(model, schedule=schedule)
    steps_of(model, schedule=schedule).resume(steps.state())
    with pytest.raises(ValueError, match=r"schedule was '1-4-6' and is '2-4-6'"):
        steps_of(model, schedule="2-4-6").resume(steps.state())


def test_a_model_inside_that_is_compiled_as_a_whole_is_refused() -> None:
    outer = nn.ModuleDict({"inner": cast(nn.Module, torch.compile(llama(), backend="eager"))})
    with pytest.raises(ValueError, match="compiled as a whole"):
        steps_of(outer)
