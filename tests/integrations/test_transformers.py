"""The callback in a stock `Trainer`: the same subnetworks as a loop of one's own, whatever the trainer does around."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn

from raptr.integrations.steps import stepwise
from raptr.integrations.transformers import SubnetworkCallback
from raptr.methods import make_method
from raptr.models.attach import running
from raptr.subnetworks import Schedule, Shape
from tests.integrations.tiny import STEPS, Rows, llama, whole

SCHEDULE = "2-3-4-6"


class Watch(hf.TrainerCallback):
    """What each training forward and each evaluation forward ran, and what loggers that come first were shown."""

    def __init__(self, model: nn.Module) -> None:
        self.ran: list[tuple[int, tuple[int, ...]]] = []
        self.evaluated: list[tuple[int, ...]] = []
        self.logs: list[dict[str, float]] = []
        self.idle: list[tuple[int, ...]] = []
        self.step = 0
        self.calls: list[int] = []
        self.blocks = list(model.get_submodule("model.layers").children())
        for layer, block in enumerate(self.blocks):
            block.register_forward_pre_hook(lambda _block, _args, layer=layer: self.calls.append(layer))
        model.register_forward_hook(lambda module, _args, _output: self.forward(module))

    def forward(self, module: nn.Module) -> None:
        ran, self.calls = tuple(self.calls), []
        if module.training:
            self.ran.append((self.step, ran))
        else:
            self.evaluated.append(ran)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        gradients = [next(block.parameters()).grad for block in self.blocks]
        self.idle.append(tuple(layer for layer, gradient in enumerate(gradients) if gradient is None))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def arguments(path: Path, **settings: Any) -> hf.TrainingArguments:
    given: dict[str, Any] = {"max_steps": STEPS, "logging_steps": 1, "per_device_train_batch_size": 4}
    given |= {"learning_rate": 1e-2, "lr_scheduler_type": "linear", "warmup_steps": 2, "report_to": "none"}
    given |= {"save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    return hf.TrainingArguments(str(path), **{**given, **settings})


def trainer(path: Path, *callbacks: Any, model: Any = None, **settings: Any) -> hf.Trainer:
    return hf.Trainer(
        model=model or llama(),
        args=arguments(path, **settings),
        train_dataset=Rows(),
        eval_dataset=Rows(8),
        callbacks=list(callbacks),
    )


def raptr(**settings: Any) -> SubnetworkCallback:
    return SubnetworkCallback("raptr", **{"schedule": SCHEDULE, "scaling": "sqrt", **settings})


def losses(run: hf.Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def weights(run: hf.Trainer) -> dict[str, Tensor]:
    return dict(run.model.state_dict())  # type: ignore[union-attr]


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def subnetworks(steps: int = STEPS, **settings: Any) -> list[tuple[int, ...]]:
    method = make_method("raptr", shape=Shape(layers=6), steps=steps, schedule=SCHEDULE, **settings)
    return [method.subnetwork(step).kept for step in range(steps)]


def test_each_step_runs_its_subnetwork_and_idle_layers_have_no_gradient(tmp_path: Path) -> None:
    model = llama()
    watch = Watch(model)
    run = trainer(tmp_path, watch, raptr(), model=model)
    run.train()
    assert watch.ran == list(enumerate(subnetworks()))
    assert [tuple(sorted({*range(6)} - {*idle})) for idle in watch.idle] == subnetworks()
    assert whole(model)


def test_full_is_the_run_without_the_callback(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", model=llama(attention_dropout=0.1))
    plain.train()
    full = trainer(tmp_path / "full", SubnetworkCallback("full"), model=llama(attention_dropout=0.1))
    full.train()
    assert losses(plain) == losses(full)
    assert equal(weights(plain), weights(full))


def test_a_run_stopped_and_resumed_is_the_undisturbed_one(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5, "gradient_accumulation_steps": 2}
    undisturbed = trainer(tmp_path / "one", raptr(), model=llama(attention_dropout=0.1), **settings)
    undisturbed.train()
    shutil.copytree(tmp_path / "one" / "checkpoint-5", tmp_path / "two" / "checkpoint-5")
    resumed = trainer(tmp_path / "two", raptr(), model=llama(attention_dropout=0.1), **settings)
    resumed.train(resume_from_checkpoint=True)
    assert len(losses(resumed)) == STEPS
    assert losses(resumed) == losses(undisturbed)
    assert equal(weights(resumed), weights(undisturbed))
    last = [entry for entry in resumed.state.log_history if "loss" in entry][-1]
    assert last["raptr/flops"] == pytest.approx(sum(map(len, subnetworks())) / (6 * STEPS))


def test_resuming_restores_callbacks_where_asked(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5}
    trainer(tmp_path, raptr(), **settings).train()
    shutil.rmtree(tmp_path / "checkpoint-10")
    model = llama()
    watch = Watch(model)
    run = trainer(tmp_path, watch, raptr(), model=model, restore_callback_states_from_checkpoint=True, **settings)
    run.train(resume_from_checkpoint=True)
    assert [ran for _, ran in watch.ran] == subnetworks()[5:]


def test_resuming_with_another_method_is_refused(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5}
    trainer(tmp_path, raptr(), **settings).train()
    with pytest.raises(ValueError, match=r"schedule was '2-3-4-6' and is '3-4-5-6'"):
        trainer(tmp_path, raptr(schedule="3-4-5-6"), **settings).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"steps was 10 and is 20"):
        trainer(tmp_path, raptr(), **settings, max_steps=20).train(resume_from_checkpoint=True)


def test_one_trainer_can_train_twice(tmp_path: Path) -> None:
    run = trainer(tmp_path, raptr())
    run.train()
    run.args.max_steps = 8
    run.train()
    assert len(losses(run)) == 8


def test_all_micro_batches_of_a_step_run_one_subnetwork(tmp_path: Path) -> None:
    model = llama()
    watch = Watch(model)
    trainer(tmp_path, watch, raptr(), model=model, gradient_accumulation_steps=3).train()
    counts = [3, 3, 3, 1] * 3  # an epoch has ten batches of four rows
    assert watch.ran == [(step, kept) for step, kept in enumerate(subnetworks()) for _ in range(counts[step])]


def test_accumulation_computes_the_step_of_the_whole_batch(tmp_path: Path) -> None:
    whole_batch = trainer(tmp_path / "one", raptr(), per_device_train_batch_size=8)
    parts = trainer(tmp_path / "two", raptr(), per_device_train_batch_size=4, gradient_accumulation_steps=2)
    whole_batch.train()
    parts.train()
    assert losses(parts) == pytest.approx(losses(whole_batch), rel=1e-4)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    plain, saving = trainer(tmp_path / "one", raptr()), trainer(tmp_path / "two", raptr(), gradient_checkpointing=True)
    plain.train()
    saving.train()
    assert losses(plain) == losses(saving)
    assert equal(weights(plain), weights(saving))


def test_heads_and_parts_train_recomputed_and_resumed(tmp_path: Path) -> None:
    widths = {"heads": "1-1-2-2", "parts": "1-2-3-4"}
    settings = {"save_strategy": "steps", "save_steps": 3, "bf16": True}
    plain = trainer(tmp_path / "one", raptr(**widths), **settings)
    plain.train()
    saving = trainer(tmp_path / "two", raptr(**widths, idle="zero"), gradient_checkpointing=True, **settings)
    saving.train()
    shutil.copytree(tmp_path / "one" / "checkpoint-3", tmp_path / "three" / "checkpoint-3")
    resumed = trainer(tmp_path / "three", raptr(**widths), **settings)
    resumed.train(resume_from_checkpoint=True)
    for other in (saving, resumed):
        assert losses(other) == losses(plain)
        assert equal(weights(other), weights(plain))
        assert other.state.log_history[-2]["raptr/flops"] == plain.state.log_history[-2]["raptr/flops"]
    depth = trainer(tmp_path / "four", raptr(), **settings)
    depth.train()
    assert losses(depth) != losses(plain)
    assert plain.state.log_history[-2]["raptr/flops"] < depth.state.log_history[-2]["raptr/flops"]


def test_the_page_shows_a_callback_with_heads_and_parts(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    shown = re.search(r"## Heads and MLP parts.*?```python\ncallback = (.*?)\n```", page, flags=re.DOTALL)
    assert shown is not None
    callback: SubnetworkCallback = eval(shown[1], {"SubnetworkCallback": SubnetworkCallback})
    run = trainer(tmp_path, callback, model=llama(num_attention_heads=8, num_key_value_heads=4))
    run.train()
    assert callback.steps is not None
    assert callback.steps.method.target == Shape(layers=6, heads=4, parts=4)
    assert losses(run)[-1] < losses(run)[0]


def test_idle_heads_and_parts_are_not_skipped(tmp_path: Path) -> None:
    for axis, sizes in {"heads": "1-1-2-2", "parts": "1-2-3-4"}.items():
        with pytest.raises(ValueError, match=f"idle is 'skip'.*{axis}.*'zero'"):
            trainer(tmp_path, raptr(**{axis: sizes}, idle="skip")).train()


def test_epochs_give_the_number_of_steps(tmp_path: Path) -> None:
    model = llama()
    watch, callback = Watch(model), raptr()
    trainer(tmp_path, watch, callback, model=model, max_steps=-1, num_train_epochs=3).train()
    assert callback.steps is not None
    assert callback.steps.method.steps == 30  # 40 rows in batches of 4
    assert [ran for _, ran in watch.ran] == subnetworks(30)


def test_evaluation_between_steps_runs_the_whole_model(tmp_path: Path) -> None:
    model = llama()
    watch = Watch(model)
    settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    trainer(tmp_path, watch, raptr(), model=model, **settings).train()
    assert set(watch.evaluated) == {(0, 1, 2, 3, 4, 5)}
    assert [ran for _, ran in watch.ran] == subnetworks()


def test_evaluation_between_steps_has_the_scales_of_the_method(tmp_path: Path) -> None:
    model = llama()
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    callback = raptr(scaling="none")
    run = trainer(tmp_path, callback, model=model, **settings)
    run.train()
    found = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    plain, scaled = [], []
    assert callback.steps is not None
    for step in range(2, STEPS + 1, 2):
        model.load_state_dict(load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors"), strict=False)
        plain.append(run.evaluate()["eval_loss"])
        with running(callback.steps.routed, callback.steps.method.evaluated(step)):
            scaled.append(run.evaluate()["eval_loss"])
    assert found == scaled
    assert [one == two for one, two in zip(plain, scaled, strict=True)] == [False] * 4 + [True]


def test_a_method_that_does_not_end_whole_is_announced(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"stochastic-depth never trains the whole model") as found:
        trainer(tmp_path, SubnetworkCallback("stochastic-depth", scaled="layer")).train()
    assert len(found) == 1


def test_early_stopping_ends_with_the_whole_model(tmp_path: Path) -> None:
    model = llama()
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings |= {"load_best_model_at_end": True, "learning_rate": 10.0, "metric_for_best_model": "eval_loss"}
    run = trainer(tmp_path, raptr(), hf.EarlyStoppingCallback(1), model=model, **settings)
    run.train()
    assert run.state.global_step < STEPS
    assert whole(model)


class Stop(hf.TrainerCallback):
    """Stops training between two micro-batches."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2


def test_stopping_between_micro_batches_ends_with_the_whole_model(tmp_path: Path) -> None:
    model = llama()
    watch = Watch(model)
    settings = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}
    trainer(tmp_path, watch, Stop(), raptr(), model=model, **settings).train()
    assert len(watch.ran) == 5
    assert set(watch.evaluated) <= {(0, 1, 2, 3, 4, 5)}
    assert whole(model)


class Fail(hf.TrainerCallback):
    """Fails in the backward pass of a step, as far as the model can tell."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 6:
            raise KeyboardInterrupt


def test_after_an_interruption_the_trainer_evaluates_and_goes_on(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5, "gradient_accumulation_steps": 2}
    undisturbed = trainer(tmp_path / "one", raptr(), **settings)
    undisturbed.train()
    model = llama()
    run = trainer(tmp_path / "two", raptr(), Fail(), model=model, **settings)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert not whole(model)
    with pytest.warns(RuntimeWarning, match="step 6"):
        run.evaluate()
    assert whole(model)
    run.remove_callback(Fail)
    run.train(resume_from_checkpoint=True)
    assert equal(weights(run), weights(undisturbed))


def test_after_an_interruption_the_trainer_begins_anew(tmp_path: Path) -> None:
    model = llama()
    run = trainer(tmp_path, raptr(), Fail(), model=model, gradient_accumulation_steps=2)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.remove_callback(Fail)
    run.train()
    assert len(losses(run)) == STEPS
    assert whole(model)


def test_every_logger_gets_stage_size_and_flops(tmp_path: Path) -> None:
    model = llama()
    watch = Watch(model)  # comes before the callback, as those of report_to do
    run = trainer(tmp_path, watch, raptr(), model=model, save_strategy="steps", save_steps=STEPS)
    run.train()
    kept = json.loads((tmp_path / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    for logs in (watch.logs, kept):
        training = [entry for entry in logs if "loss" in entry]
        assert [entry["raptr/size"] for entry in training] == [len(layers) for layers in subnetworks()]
        assert [training[0]["raptr/stage"], training[-1]["raptr/stage"]] == [1, 4]
        assert training[-1]["raptr/flops"] == pytest.approx(sum(map(len, subnetworks())) / (6 * STEPS))
        assert not any("raptr/size" in entry for entry in logs if "loss" not in entry)


def test_tensorboard_gets_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer(tmp_path, raptr(), report_to="tensorboard").train()
    written = b"".join(path.read_bytes() for path in (tmp_path / "board").rglob("events*"))
    assert b"train/raptr/size" in written


def test_zero_moves_idle_layers_and_skip_does_not(tmp_path: Path) -> None:
    before, found = weights(trainer(tmp_path)), {}
    kept = subnetworks()
    idle = next(layer for layer in range(6) if all(layer not in layers for layers in kept[:3]))
    name = f"model.layers.{idle}.mlp.up_proj.weight"
    for policy in ("skip", "zero"):
        settings = {"max_steps": STEPS, "weight_decay": 0.1}
        run = trainer(tmp_path, raptr(idle=policy), StopAt(3), **settings)
        run.train()
        found[policy] = weights(run)[name]
    assert torch.equal(found["skip"], before[name])
    assert not torch.equal(found["zero"], before[name])


class StopAt(hf.TrainerCallback):
    """Stops training after some steps of a longer plan."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.steps


def test_mixed_precision_runs(tmp_path: Path) -> None:
    model = llama()
    watch = Watch(model)
    run = trainer(tmp_path, watch, raptr(), model=model, bf16=True)
    run.train()
    assert [ran for _, ran in watch.ran] == subnetworks()
    assert losses(run)[-1] < losses(run)[0]


class Overflow(hf.TrainerCallback):
    """Makes a gradient overflow in one step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        factor = torch.inf if state.global_step == 3 else 1.0
        self.hook = model.lm_head.weight.register_hook(lambda gradient: gradient * factor)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.hook.remove()


def with_scaler(path: Path, *callbacks: Any, **settings: Any) -> hf.Trainer:
    """As the Trainer is with fp16=True, which it does not allow on a CPU."""
    run = trainer(path, *callbacks, save_strategy="steps", save_steps=1, **settings)
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return run


# With clipping, gradients are unscaled and looked at before idle parameters get theirs; without it, afterwards.
@pytest.mark.parametrize(("norm", "optim"), [(0.0, "adamw_torch"), (1.0, "adamw_torch"), (1.0, "adamw_torch_fused")])
@pytest.mark.parametrize("policy", ["skip", "zero"])
def test_a_step_that_the_grad_scaler_skips_is_a_step(tmp_path: Path, policy: str, norm: float, optim: str) -> None:
    model = llama()
    settings = {"max_grad_norm": norm, "optim": optim}
    watch, callback = Watch(model), raptr(idle=policy)
    run = with_scaler(tmp_path / "one", watch, callback, Overflow(), model=model, **settings)
    run.train()
    scaler = run.accelerator.scaler
    assert scaler is not None
    assert scaler.get_scale() == 512  # halved once
    assert [ran for _, ran in watch.ran] == subnetworks()
    assert callback.steps is not None
    assert callback.steps.steps_run == STEPS
    assert losses(run)[-1] < losses(run)[0]
    saved = [load_file(tmp_path / "one" / f"checkpoint-{step}" / "model.safetensors") for step in (3, 4, 5)]
    assert equal(saved[0], saved[1])
    assert not equal(saved[1], saved[2])
    for step in (3, 4):  # before and right after the step that is skipped
        shutil.copytree(tmp_path / "one" / f"checkpoint-{step}", tmp_path / str(step) / f"checkpoint-{step}")
        callback = raptr(idle=policy)
        resumed = with_scaler(tmp_path / str(step), callback, Overflow(), **settings)
        resumed.train(resume_from_checkpoint=True)
        assert losses(resumed) == losses(run)
        assert equal(weights(resumed), weights(run))
        assert callback.steps is not None
        assert callback.steps.steps_run == STEPS


def test_compiled_as_a_whole_is_refused_and_block_by_block_offered(tmp_path: Path) -> None:
    with patch.dict(os.environ):  # the Trainer's arguments add to it
        run = trainer(tmp_path, raptr(), torch_compile=True, torch_compile_backend="eager")
        with pytest.raises(ValueError, match=r"torch_compile.*compile=True"):
            run.train()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_blocks_are_compiled_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **rest: compiler(fn, **{**rest, "backend": "eager"}))
    torch._dynamo.reset()
    plain, compiled = trainer(tmp_path / "one", raptr()), trainer(tmp_path / "two", raptr(compile=True))
    plain.train()
    compiled.train()
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)
    assert weights(compiled).keys() == weights(plain).keys()


GROWING: dict[str, Any] = {"schedule": "2-3-6"}  # growths at steps 3 and 7 of 10


@pytest.mark.parametrize("stop", [2, 3, 5, 7])  # before a growth, right at it, and in between
def test_a_model_that_grows_is_judged_saved_and_resumed(tmp_path: Path, stop: int) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"gradient_accumulation_steps": 2}
    runs, watches = [], []
    for name in ("one", "two"):
        model = llama(attention_dropout=0.1)
        watches.append(Watch(model))
        callback = SubnetworkCallback("progressive-stacking", **GROWING)
        run = trainer(tmp_path / name, watches[-1], callback, model=model, **settings)
        run.train(resume_from_checkpoint=name == "two")
        runs.append(run)
        if name == "one":
            shutil.copytree(tmp_path / "one" / f"checkpoint-{stop}", tmp_path / "two" / f"checkpoint-{stop}")
    sizes = [2] * 3 + [3] * 4 + [6] * 3
    assert [ran for step, ran in watches[0].ran[::2]] == [tuple(range(size)) for size in sizes]
    assert watches[0].evaluated == [tuple(range(size)) for size in sizes]
    assert [entry["raptr/size"] for entry in runs[0].state.log_history if "loss" in entry] == sizes
    assert losses(runs[1]) == losses(runs[0])
    assert equal(weights(runs[1]), weights(runs[0]))
    assert watches[1].evaluated == watches[0].evaluated[stop:]


def test_a_model_that_has_yet_to_grow_is_announced(tmp_path: Path) -> None:
    def growing(*callbacks: Any, **settings: Any) -> None:
        trainer(tmp_path, SubnetworkCallback("progressive-stacking", **GROWING), *callbacks, **settings).train()

    growing()  # a warning would be an error
    with pytest.warns(UserWarning, match=r"step 7 of 10.*had 3 of its 6 layers.*not trained"):
        growing(StopAt(7))
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    with pytest.warns(UserWarning, match=r"step 1 of 10.*had 2 of its 6 layers"):
        growing(learning_rate=10.0, load_best_model_at_end=True, metric_for_best_model="eval_loss", **settings)


def test_layers_that_were_trained_without_the_callback_are_not_overwritten(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5}
    trainer(tmp_path, **settings).train()
    shutil.rmtree(tmp_path / "checkpoint-10")
    growing = SubnetworkCallback("progressive-stacking", **GROWING)
    with pytest.raises(ValueError, match=r"step 5 are not .*progressive-stacking.* at step 7 .*overwrite"):
        trainer(tmp_path, growing, **settings).train(resume_from_checkpoint=True)
    early = SubnetworkCallback("g-stack", schedule="3-6", growth_at=0.4)
    run = trainer(tmp_path, early, **settings)
    run.train(resume_from_checkpoint=True)  # its growth is over; the checkpoint of step 10 keeps its settings
    callbacks: Any = run.state.stateful_callbacks
    assert callbacks["SubnetworkCallback"]["attributes"]["saved"]["steps_run"] == 5


def test_growth_in_the_trainer_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    model, batches = llama(), []
    model.register_forward_pre_hook(lambda _model, _args, given: batches.append(given), with_kwargs=True)
    settings = {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0.0}
    run = trainer(tmp_path, SubnetworkCallback("progressive-stacking", **GROWING), model=model, **settings)
    run.train()
    assert len(batches) == STEPS
    model, found = llama(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    steps = stepwise(model, "progressive-stacking", steps=STEPS, optimizer=optimizer, **GROWING)
    for step, batch in enumerate(batches):
        steps.begin(step)
        loss = model(**batch).loss
        loss.backward()
        steps.end()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert losses(run) == pytest.approx(found, rel=1e-5)


def test_a_schedule_of_a_fixed_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule is .*'6-8-10-12'"):
        SubnetworkCallback("raptr", schedule=Schedule.recommended(layers=6, steps=10))


def test_two_methods_in_one_trainer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"2 callbacks SubnetworkCallback; one is allowed"):
        trainer(tmp_path, raptr(), SubnetworkCallback("pld")).train()


def test_two_gpus_in_one_process_are_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, raptr())
    run.args._n_gpu = 2
    with pytest.raises(ValueError, match=r"nn\.DataParallel on 2 GPUs.*torchrun"):
        run.callback_handler.on_train_begin(run.args, run.state, run.control)
