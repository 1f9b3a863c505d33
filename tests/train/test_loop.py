"""The loop on a small corpus: resuming, idle parameters, accumulation, evaluation, refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from raptr.data import TokenStore
from raptr.data.prepare import Document, prepare
from raptr.methods import METHODS
from raptr.models.layout import split
from raptr.models.model import cut_of
from raptr.models.registry import FAMILIES
from raptr.train import checkpoint, loop
from raptr.train.config import Config
from raptr.train.diverged import Diverged
from raptr.train.evaluate import Evaluation, evaluate
from raptr.train.loop import Trainer
from raptr.train.optimizer import OptimizerSettings, decay_groups
from raptr.train.run import RunFolder
from raptr.train.safety import StopRequest
from tests.train.legs import QUIET, differing, leg, records

CPU = torch.device("cpu")
STEPS = 16


def config(method: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    return Config.read(
        {
            "model": {
                "size": "tiny",
                "width": 16,
                "heads": 4,
                "head_size": 4,
                "mlp": 16,
                **sections.get("model", {}),
            },
            "method": method or {"name": "raptr"},
            "data": {"length": 24, "vocabulary": 600},
            "optimizer": {"peak": 0.01, "warmup": 3, **sections.get("optimizer", {})},
            "train": {
                "steps": STEPS,
                "batch": 4,
                "eval_samples": 8,
                "log_every": 1,
                "checkpoint_every": 100,
                "device": "cpu",
                **sections.get("train", {}),
            },
        }
    )


WIDE = {"width": 128, "head_size": 32, "mlp": 128}  # matrices whose second moments Adafactor factors
CASES: list[tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = [
    *((name, {}, {}) for name in METHODS),
    ("raptr", {"scaling": "sqrt"}, {"optimizer": {"idle": "zero"}}),
    ("raptr", {"selection": "bernoulli", "fixed": []}, {"train": {"accumulate": 2}}),
    ("raptr", {"full_start": 2}, {"model": {"dropout": 0.1}, "train": {"accumulate": 4}}),
    (
        "raptr",
        {"schedule": "3-4-6", "heads": "1-2-4", "parts": "1-2-4", "scaling": "sqrt"},
        {"optimizer": {"idle": "zero"}},
    ),
    (
        "raptr",
        {"schedule": "3-6-6", "heads": "1-2-4", "parts": "4-8-16"},
        {"optimizer": {"idle": "zero"}, "train": {"execution": "gather", "accumulate": 2}},
    ),
    ("raptr", {"parts": "1-2-4", "width_exponent": 1}, {"optimizer": {"idle": "zero"}}),
    ("raptr", {"schedule": "3-4-6", "heads": "1-2-4", "parts": "1-2-4"}, {"optimizer": {"idle": "skip"}}),
    (
        "raptr",  # in some steps no layer runs
        {"schedule": "1-6", "heads": "1-4", "selection": "bernoulli", "fixed": []},
        {"optimizer": {"idle": "skip"}},
    ),
    ("raptr", {"scaling": "sqrt"}, {"train": {"execution": "gather"}}),
    ("stacking", {}, {"model": {"init": "fan-in"}}),
    ("raptr", {}, {"optimizer": {"name": "muon"}}),
    ("stacking", {}, {"optimizer": {"name": "muon"}}),
    ("raptr", {}, {"optimizer": {"name": "adafactor", "decay": 0.5, "decay_shape": "inverse-sqrt"}}),
    ("raptr", {}, {"optimizer": {"name": "adafactor", "idle": "zero"}, "model": WIDE}),
    ("stacking", {}, {"optimizer": {"name": "adafactor"}, "model": WIDE}),
]
# Right after the start, in the middle of stages and at their ends, and just before the run's; each list is one run.
STOPS = {"bert": ((1, 2, 5, 11), (4, 12, 15)), "decoder": ((4, 11),)}
MODELS: dict[str, dict[str, Any]] = {"bert": {}, "decoder": {"family": "decoder", "heads": 8, "kv_heads": 4}}


@pytest.mark.parametrize(("name", "settings", "sections"), CASES)
@pytest.mark.parametrize("family", STOPS)
def test_stopped_again_and_again_ends_bit_for_bit_as_never_stopped(
    name: str,
    settings: dict[str, Any],
    sections: dict[str, dict[str, Any]],
    family: str,
    stores: dict[str, TokenStore],
    tmp_path: Path,
) -> None:
    store, model = stores[family], {**MODELS[family], **sections.get("model", {})}
    chosen = config({"name": name, **settings}, **{**sections, "model": model})
    whole, weights = leg(chosen, tmp_path / "whole", store)
    for stops in STOPS[family]:
        run = tmp_path / f"stopped-at-{stops[0]}"
        for until in (*stops, STEPS):
            result, resumed = leg(chosen, run, store, until)
            assert result.step == until
        assert differing(weights, resumed) == []
        assert result.eval_loss == whole.eval_loss
        assert records(run) == records(tmp_path / "whole")


OTHERS: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, dampening=0.5),
    "nadam": torch.optim.NAdam,
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("optimizer", OTHERS)
@pytest.mark.parametrize("method", ["raptr", "stacking"])
def test_any_optimizer_resumes_bit_for_bit_and_skips_idle_layers(
    optimizer: str, method: str, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(settings: OptimizerSettings, model: nn.Module, *, compiled: bool) -> Optimizer:
        return OTHERS[optimizer](decay_groups(model, settings.weight_decay))

    monkeypatch.setattr(loop, "make_optimizer", make)
    chosen = config({"name": method})
    _, weights = leg(chosen, tmp_path / "whole", store)
    for until in (1, 5, 12, STEPS):
        _, resumed = leg(chosen, tmp_path / "legs", store, until)
    assert differing(weights, resumed) == []
    assert records(tmp_path / "legs") == records(tmp_path / "whole")
    moved, idle_names = _one_step(store, tmp_path / "idle", "skip")
    assert moved == set()
    assert any(not name.startswith("model.") for name in idle_names)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "adamw") for name in ("full", "raptr", "stacking", "msg")), ("raptr", "muon"), ("raptr", "adafactor")],
)
def test_deterministic_training_on_a_gpu_resumes_bit_for_bit(
    name: str, optimizer: str, store: TokenStore, tmp_path: Path
) -> None:
    chosen = config(
        {"name": name},
        model={"width": 64, "head_size": 16},
        train={"device": "cuda", "deterministic": True},
        optimizer={"name": optimizer},
    )
    _, weights = leg(chosen, tmp_path / "whole", store)
    for until in (5, 11, STEPS):
        _, resumed = leg(chosen, tmp_path / "legs", store, until)
    assert differing(weights, resumed) == []
    assert records(tmp_path / "legs") == records(tmp_path / "whole")


@pytest.mark.parametrize("compiled", [True, False])
def test_the_optimizer_is_compiled_where_blocks_are(
    compiled: bool, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(loop, "make_optimizer", lambda *_, compiled: seen.append(compiled))
    chosen = config(train={"compile": compiled}, optimizer={"name": "adafactor"})
    loop.Trainer(chosen, RunFolder(tmp_path), store, torch.device("cpu"))
    assert seen == [compiled]


def test_a_run_from_before_a_setting_existed_goes_on(store: TokenStore, tmp_path: Path) -> None:
    leg(config(), tmp_path / "run", store, until=4)
    file = tmp_path / "run" / "config.yaml"
    newer = ("deterministic:", "idle:", "init:", "momentum:", "name: adamw")
    lines = file.read_text().splitlines()
    older = [line for line in lines if not line.strip().startswith(newer)]
    assert len(older) == len(lines) - len(newer)
    file.write_text("\n".join(older))
    assert leg(config(), tmp_path / "run", store)[0].step == STEPS


def test_a_run_that_names_no_idle_policy_records_the_one_it_had(store: TokenStore, tmp_path: Path) -> None:
    method = {"name": "raptr", "parts": "1-2-4"}
    explicit, unset = config(method, optimizer={"idle": "zero"}), config(method)
    _, weights = leg(explicit, tmp_path / "explicit", store)
    leg(unset, tmp_path / "unset", store, until=4)
    assert "  idle: zero\n" in (tmp_path / "unset" / "config.yaml").read_text()
    _, resumed = leg(explicit, tmp_path / "unset", store)
    assert differing(weights, resumed) == []
    leg(explicit, tmp_path / "older", store, until=4)
    assert differing(weights, leg(unset, tmp_path / "older", store)[1]) == []


def test_initial_weights_belong_to_the_run(store: TokenStore, tmp_path: Path) -> None:
    chosen = config(model={"init": "fan-in"})
    leg(chosen, tmp_path / "run", store, until=4)
    assert "  init: fan-in\n" in (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(ValueError, match=r"model\.init.*'fan-in'.*'bert'"):
        leg(config(), tmp_path / "run", store)
    assert leg(chosen, tmp_path / "run", store)[0].step == STEPS
    leg(config(), tmp_path / "default", store, until=1)
    assert records(tmp_path / "run")[0]["loss"] != records(tmp_path / "default")[0]["loss"]


def test_the_end_of_every_stage_is_recorded(store: TokenStore, tmp_path: Path) -> None:
    chosen = config({"name": "raptr", "schedule": "3-4-6", "lengths": "equal"}, train={"log_every": 10})
    leg(chosen, tmp_path / "run", store)
    stages = {record["step"]: record["stage"] for record in records(tmp_path / "run") if record["kind"] == "train"}
    assert stages == {5: 1, 10: 2, 11: 2, 16: 3}


def test_asked_to_stop_in_an_evaluation_it_saves_what_it_has(store: TokenStore, tmp_path: Path) -> None:
    chosen, folder, stop = config(train={"eval_every": 5}), RunFolder(tmp_path / "run"), StopRequest()
    with folder.opened(chosen):
        trainer = Trainer(chosen, folder, store, CPU)

        def evaluate() -> None:
            Trainer.evaluate(trainer)
            stop.asked = trainer.step == 5

        trainer.evaluate = evaluate  # type: ignore[method-assign]
        result = trainer.train(STEPS, QUIET, stop)
    assert result.stopped
    assert checkpoint.steps(folder.checkpoints) == [result.step]


def test_a_bad_number_is_not_evaluated(store: TokenStore, tmp_path: Path) -> None:
    chosen, folder = config(train={"eval_every": 2, "log_every": 10}), RunFolder(tmp_path / "run")
    with folder.opened(chosen):
        trainer = Trainer(chosen, folder, store, CPU)
        with torch.no_grad():
            trainer.parameters[0].fill_(torch.nan)
        trainer.step = 1  # past the evaluation of a model that has not trained
        with pytest.raises(Diverged, match="step 1 "):
            trainer.train(STEPS, QUIET)
    assert not folder.metrics.exists() or "NaN" not in folder.metrics.read_text()


def test_a_kill_between_checkpoints_loses_only_the_steps_since(store: TokenStore, tmp_path: Path) -> None:
    chosen = config(train={"checkpoint_every": 3})
    _, weights = leg(chosen, tmp_path / "whole", store)
    folder = RunFolder(tmp_path / "killed")
    with folder.opened(chosen):
        trainer = Trainer(chosen, folder, store, CPU)
        trainer.save = lambda: None if trainer.step > 9 else Trainer.save(trainer)  # type: ignore[method-assign]
        trainer.train(11, QUIET)
    with folder.metrics.open("a") as file:
        file.write('{"kind": "train", "st')  # torn by the kill
    assert checkpoint.steps(folder.checkpoints) == [6, 9]
    with folder.metrics.open("rb") as file:
        assert not file.read().endswith(b"\n")
    _, resumed = leg(chosen, tmp_path / "killed", store)
    assert differing(weights, resumed) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_kept_trains_as_full_bit_for_bit(family: str, stores: dict[str, TokenStore], tmp_path: Path) -> None:
    store, model = stores[family], {"family": family}
    _, full = leg(config({"name": "full"}, model=model), tmp_path / "full", store)
    _, raptr = leg(config({"name": "raptr", "schedule": "6-6-6"}, model=model), tmp_path / "raptr", store)
    assert differing(full, raptr) == []


def test_golden_losses(store: TokenStore, tmp_path: Path) -> None:
    """A change that should not alter the computation shows the same losses."""
    leg(config({"name": "raptr", "scaling": "sqrt"}, train={"eval_every": 1}), tmp_path, store)
    golden = json.loads((Path(__file__).parents[1] / "golden" / "losses.json").read_text())
    losses = {"train": [], "eval": []}  # type: dict[str, list[float]]
    for record in records(tmp_path):
        losses[record["kind"]].append(record["loss"])
    assert losses["train"] == pytest.approx(golden["train"], rel=1e-5)
    assert losses["eval"] == pytest.approx(golden["eval"], rel=1e-5)


def _one_step(
    store: TokenStore, tmp_path: Path, idle: str, family: str = "bert", **optimizer: Any
) -> tuple[set[str], set[str]]:
    """Which tensors of idle and of running layers move in step 1, whose state is no longer fresh."""
    sections = {"model": {"family": family}, "optimizer": {"idle": idle, "warmup": 0, **optimizer}}
    chosen = config({"name": "raptr", "schedule": "2-6"}, **sections)
    trainer = Trainer(chosen, RunFolder(tmp_path), store, CPU)
    for _ in range(4):
        trainer.optimize(trainer.method.subnetwork(7))  # a full step first, so that every moment is set
        trainer.step = 0
    trainer.optimize(replace(trainer.method.subnetwork(0), scales=(1.0,) * 6))
    before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    part = trainer.method.subnetwork(1)
    assert part.kept == (0, 5)
    trainer.optimize(part)
    moved = {name for name, tensor in trainer.tensors().items() if not torch.equal(tensor, before[name])}
    idle_names = {name for name in before if any(f".blocks.{layer}." in name for layer in (1, 2, 3, 4))}
    return moved & idle_names, idle_names


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_skip_leaves_idle_layers_alone(name: str, family: str, stores: dict[str, TokenStore], tmp_path: Path) -> None:
    moved, idle_names = _one_step(stores[family], tmp_path, "skip", family, name=name)
    assert moved == set()
    assert any(not name.startswith("model.") for name in idle_names)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("policy", ["skip", "zero", None])
@pytest.mark.parametrize("execution", ["skip", "gather"])
@pytest.mark.parametrize("family", FAMILIES)
def test_idle_heads_and_mlp_parts_get_what_the_policy_says(
    family: str, execution: str, policy: str | None, stores: dict[str, TokenStore], tmp_path: Path
) -> None:
    """The trainer's steps are those of Adam with moments and a step count for each element, of those that take part."""
    method = {"name": "raptr", "schedule": "4-5-6", "heads": "1-2-4", "parts": "1-3-4"}
    sections: dict[str, Any] = {"optimizer": {"idle": policy, "clip": 0}, "train": {"execution": execution}}
    trainer = Trainer(config(method, **sections, model=MODELS[family]), RunFolder(tmp_path), stores[family], CPU)
    settings, shape, state = trainer.config.optimizer, trainer.model.config.shape, {}
    decayed = {id(parameter) for parameter in trainer.optimizer.param_groups[0]["params"]}
    for name, parameter in trainer.model.named_parameters():
        state[name] = [parameter.detach().clone(), *(torch.zeros_like(parameter) for _ in range(3))]
    partly = 0
    for step in range(STEPS):
        subnetwork, rate = trainer.method.subnetwork(step), settings.learning_rate(step, STEPS)
        trainer.gradients(subnetwork)
        gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
        trainer.update(torch.zeros(()), subnetwork)
        trainer.step += 1
        for name, parameter in trainer.model.named_parameters():
            g, (p, m, v, t) = gradients[name], state[name]
            if g is None and policy == "skip":
                continue
            g = torch.zeros_like(parameter) if g is None else g
            ran, cut = torch.ones_like(parameter, dtype=torch.bool), cut_of(trainer.model, name)
            kept = None if cut is None else subnetwork.heads if cut.axis == "heads" else subnetwork.parts
            if policy == "skip" and cut is not None and kept is not None:
                ran, units = torch.zeros_like(ran), getattr(shape, cut.axis)
                for unit in kept[int(name.split(".")[1])]:
                    for part in split(ran, cut):  # views of it
                        part.tensor_split(units, cut.dim)[unit].fill_(True)
                partly += 1
            t += ran
            m[ran] = (settings.beta1 * m + (1 - settings.beta1) * g)[ran]
            v[ran] = (settings.beta2 * v + (1 - settings.beta2) * g * g)[ran]
            m_hat, v_hat = m / (1 - settings.beta1**t), v / (1 - settings.beta2**t)
            p[ran] *= 1 - rate * settings.weight_decay * (id(parameter) in decayed)
            p[ran] -= (rate * m_hat / (v_hat.sqrt() + settings.epsilon))[ran]
            torch.testing.assert_close(parameter.detach(), p, rtol=1e-10, atol=1e-13, msg=f"{name} in step {step}")
    assert (partly > 100) == (policy == "skip")


@pytest.mark.parametrize("family", FAMILIES)
def test_zero_lets_momentum_and_decay_go_on(family: str, stores: dict[str, TokenStore], tmp_path: Path) -> None:
    moved, idle_names = _one_step(stores[family], tmp_path, "zero", family)
    assert moved == idle_names


def test_zero_moves_no_weight_under_adafactor_which_has_no_momentum(store: TokenStore, tmp_path: Path) -> None:
    moved, idle_names = _one_step(store, tmp_path, "zero", name="adafactor")
    assert moved == {name for name in idle_names if not name.startswith("model.")}


def test_micro_batches_share_one_subnetwork_and_add_up(store: TokenStore, tmp_path: Path) -> None:
    ends = []
    for accumulate in (1, 2, 4):
        run = tmp_path / str(accumulate)
        leg(config(train={"accumulate": accumulate}), run, store, until=1)
        ends.append(next(record for record in records(run) if record["kind"] == "train"))
    assert len({record["flops"] for record in ends}) == 1
    for record in ends[1:]:
        assert record["loss"] == pytest.approx(ends[0]["loss"], rel=1e-5)
        assert record["grad_norm"] == pytest.approx(ends[0]["grad_norm"], rel=1e-4)


def test_evaluation_reads_no_more_sequences_at_once_than_training(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def seen(*given: Any, batch: int, **others: Any) -> Evaluation:
        read.append(batch)
        return evaluate(*given, batch=batch, **others)

    monkeypatch.setattr(loop, "evaluate", seen)
    losses = [
        leg(config(train={"accumulate": count}), tmp_path / str(count), store, until=1)[0].eval_loss
        for count in (1, 2, 4)
    ]
    assert sorted(set(read)) == [1, 2, 4]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_what_a_run_records(store: TokenStore, tmp_path: Path) -> None:
    chosen = config(train={"eval_every": 7, "eval_sizes": [2, 6]})
    result, _ = leg(chosen, tmp_path, store)
    seen = records(tmp_path)
    evals = [record for record in seen if record["kind"] == "eval"]
    trains = [record for record in seen if record["kind"] == "train"]
    assert [record["step"] for record in evals] == [0, 4, 7, 8, 12, 14, 16]  # every stage's end, and every 7
    assert evals[-1]["loss"] == result.eval_loss
    assert evals[-1]["sizes"]["6"] == evals[-1]["loss"]
    assert evals[-1]["sizes"]["2"] != evals[-1]["loss"]
    assert [record["size"] for record in trains] == [3] * 4 + [4] * 4 + [5] * 4 + [6] * 4
    assert [record["stage"] for record in trains] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert trains[-1]["tokens"] == 16 * 4 * 24
    assert trains[-1]["flops_layers"] == pytest.approx(trains[3]["flops_layers"] * 18 / 3)
    assert trains[2]["lr"] == 0.01
    assert trains[-1]["loss"] < trains[0]["loss"]
    assert (tmp_path / "environment.json").exists()


@pytest.mark.parametrize(
    ("family", "name", "peak"),
    [("bert", "adamw", 0.01), ("bert", "muon", 0.01), ("bert", "adafactor", 0.03), ("decoder", "adamw", 0.01)],
)
def test_training_learns_and_beats_chance(
    family: str, name: str, peak: float, stores: dict[str, TokenStore], tmp_path: Path
) -> None:
    train, optimizer = {"steps": 300, "batch": 16, "log_every": 50}, {"name": name, "peak": peak}
    chosen = config(train=train, optimizer=optimizer, model={"family": family})
    result, _ = leg(chosen, tmp_path, stores[family], until=300)
    first = records(tmp_path)[0]
    assert result.eval_loss is not None
    assert result.eval_loss < 0.75 * first["loss"]


def test_a_changed_setting_is_refused_with_the_difference(store: TokenStore, tmp_path: Path) -> None:
    leg(config(), tmp_path, store, until=2)
    with pytest.raises(ValueError, match=r"train\.seed.*0.*1"):
        leg(config(train={"seed": 1}), tmp_path, store)
    with pytest.raises(ValueError, match=r"method\.schedule.*3-4-5-6.*2-6.*optimizer\.peak.*0\.01.*0\.02"):
        leg(config({"name": "raptr", "schedule": "2-6"}, optimizer={"peak": 0.02}), tmp_path, store)
    result, _ = leg(config(train={"keep": 5, "log_every": 3}), tmp_path, store)  # changes nothing in the result
    assert result.step == STEPS


def test_other_data_is_refused(store: TokenStore, tmp_path: Path) -> None:
    leg(config(), tmp_path / "run", store, until=2)
    documents = [Document(f"{i}.txt", f"to be or not to be that is question {i} " * 20) for i in range(40)]
    other = prepare(tmp_path / "other", lambda: documents, 600)
    with pytest.raises(ValueError, match=f"{store.fingerprint}.*{other.fingerprint}"):
        leg(config(), tmp_path / "run", other)


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_damaged_checkpoint_is_passed_over(damage: str, store: TokenStore, tmp_path: Path) -> None:
    chosen = config(train={"checkpoint_every": 4})
    _, weights = leg(chosen, tmp_path / "whole", store)
    leg(chosen, tmp_path / "run", store, until=8)
    file = next((tmp_path / "run" / "checkpoints" / "step-8").glob("*.safetensors"))
    if damage == "missing":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.warns(UserWarning, match=r"step-8 .*damaged.*step-4"):
        _, resumed = leg(chosen, tmp_path / "run", store)
    assert differing(weights, resumed) == []
