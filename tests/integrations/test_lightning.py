"""The callback in a stock Lightning `Trainer`."""

import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from raptr.integrations.lightning import SubnetworkCallback
from raptr.integrations.steps import stepwise
from raptr.methods import make_method
from raptr.models.attach import attach, running
from raptr.subnetworks import Shape
from tests.integrations.tiny import STEPS, Rows, llama, whole

# Lightning's own advice and its use of deprecated parts of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
]
SCHEDULE = "2-3-4-6"


class Module(LightningModule):
    """A small Llama; notes what each training and each validation forward ran."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.ran: list[tuple[int, ...]] = []
        self.evaluated: list[tuple[int, float]] = []
        self.losses: list[float] = []
        self.calls: list[int] = []
        self.wrapped = ""
        for layer, block in enumerate(self.model.model.layers):
            block.register_forward_pre_hook(lambda _block, _args, layer=layer: self.calls.append(layer))

    def on_train_start(self) -> None:
        self.wrapped = type(self.trainer.strategy.model).__name__

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls.clear()
        loss: Tensor = self.model(**batch).loss
        self.ran.append(tuple(self.calls))
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append((self.trainer.global_step, self.model(**batch).loss.item()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def trainer(path: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    given: dict[str, Any] = {"max_steps": STEPS, "accelerator": "cpu", "devices": 1, "gradient_clip_val": 1.0}
    given |= dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return Trainer(default_root_dir=path, callbacks=list(callbacks), **{**given, **settings})


def rows(count: int = 40) -> DataLoader[Any]:
    return DataLoader(Rows(count), batch_size=4)


def raptr(**settings: Any) -> SubnetworkCallback:
    return SubnetworkCallback("raptr", **{"schedule": SCHEDULE, "scaling": "sqrt", **settings})


def trained(path: Path, *callbacks: Callback, checkpoint: Path | None = None, **settings: Any) -> Module:
    module = Module()
    trainer(path, *callbacks, **settings).fit(module, rows(), ckpt_path=checkpoint)
    assert whole(module.model)
    return module


def subnetworks(steps: int = STEPS) -> list[tuple[int, ...]]:
    method = make_method("raptr", shape=Shape(layers=6), steps=steps, schedule=SCHEDULE)
    return [method.subnetwork(step).kept for step in range(steps)]


def equal(one: nn.Module, two: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_each_step_runs_its_subnetwork(tmp_path: Path) -> None:
    assert trained(tmp_path, raptr()).ran == subnetworks()


def test_full_is_the_run_without_the_callback(tmp_path: Path) -> None:
    plain, full = trained(tmp_path), trained(tmp_path, SubnetworkCallback("full"))
    assert plain.losses == full.losses
    assert equal(plain, full)


def test_a_run_stopped_and_resumed_is_the_undisturbed_one(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10, save_top_k=-1)
    settings: dict[str, Any] = {"max_steps": 20, "accumulate_grad_batches": 2, "enable_checkpointing": True}
    undisturbed = trained(tmp_path, raptr(), saving, **settings)
    callback = raptr()
    resumed = trained(tmp_path, callback, checkpoint=tmp_path / "step=10.ckpt", **settings)
    assert resumed.ran == undisturbed.ran[20:]
    assert resumed.losses == undisturbed.losses[20:]
    assert equal(resumed, undisturbed)
    assert callback.steps is not None
    assert callback.steps.flops == pytest.approx(sum(map(len, subnetworks(20))) / 120)
    with pytest.raises(ValueError, match="schedule was '2-3-4-6' and is '3-4-5-6'"):
        trained(tmp_path, raptr(schedule="3-4-5-6"), checkpoint=tmp_path / "step=10.ckpt", **settings)


@pytest.mark.filterwarnings("ignore")
def test_layers_that_were_trained_without_the_callback_are_not_overwritten(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trained(tmp_path, saving, enable_checkpointing=True)
    growing = SubnetworkCallback("progressive-stacking", schedule="2-3-6")  # growths at steps 3 and 7
    with pytest.raises(ValueError, match=r"step 7 are not .*progressive-stacking.* at step 7 .*overwrite"):
        trained(tmp_path, growing, checkpoint=tmp_path / "step=7.ckpt")
    trained(tmp_path, SubnetworkCallback("raptr", schedule=SCHEDULE), checkpoint=tmp_path / "step=7.ckpt")


@pytest.mark.parametrize("stop", [3, 5, 7])  # the growths are at steps 3 and 7
def test_a_model_that_grows_is_judged_saved_and_resumed(tmp_path: Path, stop: int) -> None:
    def run(*callbacks: Callback, checkpoint: Path | None = None) -> Module:
        module = Module()
        growing = SubnetworkCallback("progressive-stacking", schedule="2-3-6")
        settings: dict[str, Any] = {"accumulate_grad_batches": 2, "enable_checkpointing": bool(callbacks)}
        settings |= {"num_sanity_val_steps": 0, "val_check_interval": 2}
        run = trainer(tmp_path, growing, *callbacks, **settings)
        run.fit(module, rows(8), rows(4), ckpt_path=checkpoint)  # two batches an epoch: Lightning resumes between them
        return module

    undisturbed = run(ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1))
    resumed = run(checkpoint=tmp_path / f"step={stop}.ckpt")
    sizes = [2] * 3 + [3] * 4 + [6] * 3
    assert undisturbed.ran == [tuple(range(size)) for size in sizes for _ in range(2)]
    assert undisturbed.losses[2 * stop :] == resumed.losses
    assert undisturbed.evaluated[stop:] == resumed.evaluated
    assert equal(undisturbed, resumed)
    small = llama(num_hidden_layers=2).eval()
    saved = torch.load(tmp_path / "step=2.ckpt")["state_dict"]
    small.load_state_dict({name: saved[f"model.{name}"] for name in small.state_dict()})
    with torch.no_grad():
        assert undisturbed.evaluated[1] == (2, small(**next(iter(rows(4)))).loss.item())


@pytest.mark.filterwarnings("ignore")  # Lightning's own, which are raised once more where the expected one is caught
def test_a_model_that_has_yet_to_grow_is_announced(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 4

    with pytest.warns(UserWarning, match=r"step 4 of 10.*had 3 of its 6 layers"):
        trained(tmp_path, SubnetworkCallback("progressive-stacking", schedule="2-3-6"), Stop())


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_from_before_the_last_growth_is_announced_where_it_is_judged(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    run = trainer(tmp_path, SubnetworkCallback("stacking", schedule="3-6"), saving, enable_checkpointing=True)
    module = Module()
    run.fit(module, rows())
    with pytest.warns(UserWarning, match=r"step 4 of 10.*had 3 of its 6 layers"):
        run.validate(module, rows(4), ckpt_path=tmp_path / "step=4.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.validate(module, rows(4), ckpt_path=tmp_path / "step=10.ckpt")
    assert not [entry for entry in caught if "of its" in str(entry.message)]


def test_all_micro_batches_of_a_step_run_one_subnetwork(tmp_path: Path) -> None:
    module = trained(tmp_path, raptr(), accumulate_grad_batches=3)
    counts = [3, 3, 3, 1] * 3  # an epoch has ten batches of four rows
    assert module.ran == [kept for step, kept in enumerate(subnetworks()) for _ in range(counts[step])]


def test_accumulation_with_a_validation_between_micro_batches(tmp_path: Path) -> None:
    modules = []
    for settings in ({}, {"val_check_interval": 3}):
        module = Module()
        run = trainer(tmp_path, raptr(), accumulate_grad_batches=2, num_sanity_val_steps=0, **settings)
        run.fit(module, rows(), rows(8))
        modules.append(module)
    assert len(modules[1].evaluated) > len(modules[0].evaluated)
    assert modules[0].losses == modules[1].losses
    assert equal(*modules)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    plain, module = trained(tmp_path, raptr()), Module()
    module.model.gradient_checkpointing_enable()
    trainer(tmp_path, raptr()).fit(module, rows())
    assert module.losses == plain.losses
    assert equal(module, plain)


def test_epochs_give_the_number_of_steps(tmp_path: Path) -> None:
    assert trained(tmp_path, raptr(), max_steps=-1, max_epochs=3).ran == subnetworks(30)


def test_a_training_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_steps=-1.*Set max_steps"):
        trained(tmp_path, raptr(), max_steps=-1, max_epochs=-1)


def test_accumulation_that_changes_needs_a_number_of_steps(tmp_path: Path) -> None:
    changing = GradientAccumulationScheduler({0: 1, 1: 5})
    with pytest.raises(ValueError, match=r"GradientAccumulationScheduler.*max_epochs=2.*Set max_steps"):
        trained(tmp_path, raptr(), changing, max_steps=-1, max_epochs=2)
    assert len(trained(tmp_path, raptr(), changing, max_steps=12).ran) == 20
    constant = GradientAccumulationScheduler({0: 5})
    assert len(trained(tmp_path, raptr(), constant, max_steps=-1, max_epochs=2).ran) == 20


def test_validation_judges_what_the_method_says(tmp_path: Path) -> None:
    method = make_method("raptr", shape=Shape(layers=6), steps=STEPS, schedule=SCHEDULE)
    module, expected = Module(), []

    class Judge(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.sanity_checking:
                return
            with torch.no_grad(), running(attach(module), method.evaluated(trainer.global_step)):
                expected.append((trainer.global_step, module.model(**next(iter(rows(4)))).loss.item()))

    callbacks = SubnetworkCallback("raptr", schedule=SCHEDULE), Judge()
    run = trainer(tmp_path, *callbacks, val_check_interval=2, num_sanity_val_steps=0)
    run.fit(module, rows(), rows(4))
    assert [step for step, _ in expected] == [2, 4, 6, 8, 10]
    assert module.evaluated == expected


@pytest.mark.filterwarnings("ignore")  # Lightning's own, which are raised once more where the expected one is caught
def test_a_method_that_does_not_end_whole_is_announced(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"stochastic-depth never trains the whole model"):
        trained(tmp_path, SubnetworkCallback("stochastic-depth", scaled="layer"))


def test_the_logger_gets_stage_size_and_flops(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trained(tmp_path, raptr(), logger=logger, log_every_n_steps=1)
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    table = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    assert [int(float(row["raptr/size"])) for row in table] == [len(kept) for kept in subnetworks()]
    assert float(table[-1]["raptr/flops"]) == pytest.approx(sum(map(len, subnetworks())) / (6 * STEPS))


def test_zero_moves_idle_layers_and_skip_does_not(tmp_path: Path) -> None:
    kept = subnetworks()
    idle = next(layer for layer in range(6) if all(layer not in layers for layers in kept[:3]))
    start, found = Module().model.model.layers[idle].mlp.up_proj.weight, {}

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 3

    for policy in ("skip", "zero"):
        module = trained(tmp_path, raptr(idle=policy), Stop())
        found[policy] = module.model.model.layers[idle].mlp.up_proj.weight
    assert torch.equal(found["skip"], start)
    assert not torch.equal(found["zero"], start)


def test_mixed_precision_runs(tmp_path: Path) -> None:
    module = trained(tmp_path, raptr(), precision="bf16-mixed")
    assert module.ran == subnetworks()
    assert module.losses[-1] < module.losses[0]


class Overflow(Callback):
    """Makes a gradient overflow in one step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        factor = torch.inf if trainer.global_step == 3 else 1.0
        weight: Any = pl_module.get_parameter("model.lm_head.weight")
        self.hook = weight.register_hook(lambda gradient: gradient * factor)

    def on_train_batch_end(self, *_: Any) -> None:
        self.hook.remove()


@pytest.mark.parametrize("policy", ["skip", "zero"])
def test_a_step_that_the_grad_scaler_skips_is_a_step(tmp_path: Path, policy: str) -> None:
    def half(*callbacks: Callback, checkpoint: Path | None = None) -> tuple[Module, SubnetworkCallback]:
        # Lightning makes this plugin of precision="16-mixed", but not on a CPU.
        precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
        module, callback = Module(), raptr(idle=policy)
        settings: dict[str, Any] = {"plugins": [precision], "enable_checkpointing": bool(callbacks)}
        run = trainer(tmp_path, callback, Overflow(), *callbacks, **settings)
        run.fit(module, rows(4), ckpt_path=checkpoint)  # epochs of one batch, between which Lightning resumes exactly
        assert precision.scaler is not None
        assert precision.scaler.get_scale() == 512  # halved once
        assert whole(module.model)
        return module, callback

    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    module, callback = half(saving)
    assert module.ran == subnetworks()
    assert module.losses[-1] < module.losses[0]
    states = [torch.load(tmp_path / f"step={step}.ckpt")["state_dict"] for step in (3, 4, 5)]
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())
    assert not all(torch.equal(weight, states[2][name]) for name, weight in states[1].items())
    for step in (3, 4):  # before and right after the step that is skipped
        resumed, again = half(checkpoint=tmp_path / f"step={step}.ckpt")
        assert resumed.losses == module.losses[step:]
        assert equal(resumed, module)
        assert again.steps is not None
        assert callback.steps is not None
        assert again.steps.state() == callback.steps.state()


class LeavesOut(Module):
    """Leaves out a batch, as Lightning allows: before the model is called, or when the loss is known."""

    def __init__(self, *, called: bool) -> None:
        super().__init__()
        self.called = called

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        left_out = self.trainer.global_step == 3
        if left_out and not self.called:
            return None
        loss = super().training_step(batch, batch_idx)
        return None if left_out else loss


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("policy", ["skip", "zero"])
def test_a_batch_that_is_left_out_changes_nothing(tmp_path: Path, policy: str, called: bool) -> None:
    module, callback = LeavesOut(called=called), raptr(idle=policy)
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer(tmp_path, callback, saving, enable_checkpointing=True).fit(module, rows())
    assert module.ran == [kept for step, kept in enumerate(subnetworks()) if called or step != 3]
    assert callback.steps is not None
    assert callback.steps.steps_run == STEPS - 1
    assert whole(module.model)
    states = [torch.load(tmp_path / f"step={step}.ckpt")["state_dict"] for step in (3, 4, 5)]
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())
    assert not all(torch.equal(weight, states[2][name]) for name, weight in states[1].items())


class LeavesOutMicroBatch(Module):
    """Leaves out one of the two micro-batches of each step."""

    def __init__(self, place: int, *, called: bool) -> None:
        super().__init__()
        self.place, self.called = place, called

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        left_out = batch_idx % 2 == self.place
        if left_out and not self.called:
            return None
        loss = super().training_step(batch, batch_idx)
        return None if left_out else loss


@pytest.mark.parametrize("interval", [None, 3], ids=["", "validated between micro-batches"])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_a_step_is_made_of_the_micro_batches_that_are_not_left_out(
    tmp_path: Path, place: int, called: bool, interval: int | None
) -> None:
    module, callback = LeavesOutMicroBatch(place, called=called), raptr()
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "num_sanity_val_steps": 0, "val_check_interval": interval}
    trainer(tmp_path, callback, **settings).fit(module, rows(), rows(4))
    assert module.ran == [kept for kept in subnetworks() for _ in range(1 + called)]
    assert callback.steps is not None
    assert callback.steps.steps_run == STEPS
    assert whole(module.model)
    expected = Module()
    optimizer = expected.configure_optimizers()
    steps = stepwise(expected, "raptr", steps=STEPS, schedule=SCHEDULE, scaling="sqrt")
    batches = list(rows())
    for step in range(STEPS):
        steps.begin(step)
        loss: Any = expected.training_step(batches[(2 * step + 1 - place) % 10], 0)
        (loss / 2).backward()
        steps.end()
        nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert equal(module, expected)


def test_an_exception_leaves_the_whole_model(tmp_path: Path) -> None:
    class Fail(Callback):
        def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
            raise KeyError("mine")

    module = Module()
    with pytest.raises(KeyError, match="mine"):
        trainer(tmp_path, raptr(), Fail()).fit(module, rows())
    assert whole(module.model)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"idle is 'skip'.*heads.*'zero'"):
        trained(tmp_path, raptr(heads="1-1-2-2", idle="skip"))
    trained(tmp_path, raptr(heads="1-1-2-2"))
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"automatic_optimization=False.*stepwise"):
        trainer(tmp_path, raptr(), gradient_clip_val=None).fit(module, rows())
    compiled: Any = torch.compile(Module(), backend="eager")
    with pytest.raises(ValueError, match=r"compiled as a whole.*compile=True"):
        trainer(tmp_path, raptr()).fit(compiled, rows())


def test_ddp_that_waits_for_idle_layers_is_refused(tmp_path: Path) -> None:
    with patch.dict(os.environ):  # Lightning adds to it
        try:
            with pytest.raises(ValueError, match="ddp_find_unused_parameters_true"):
                trained(tmp_path, raptr(), strategy="ddp")
            module = trained(tmp_path, raptr(), strategy="ddp_find_unused_parameters_true")
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    assert module.ran == subnetworks()
