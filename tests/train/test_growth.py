"""Growth in the training loop: what is preserved, what the optimizer does next, and that no kill is noticed."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raptr.data import TokenStore
from raptr.growth import apply as growth_apply
from raptr.growth.plan import Growth
from raptr.methods import METHODS
from raptr.methods.growing import Growing
from raptr.models.model import Model
from raptr.models.registry import FAMILIES
from raptr.subnetworks import Shape, Subnetwork
from raptr.train import checkpoint, loop
from raptr.train.config import Config
from raptr.train.exporting import export
from raptr.train.flops import planned_flops
from raptr.train.loop import Trainer, pretrain
from raptr.train.plan import plan
from raptr.train.run import RunFolder
from tests.train.legs import QUIET, differing, leg, records, snapshot
from tests.walks import scores

CPU = torch.device("cpu")
STEPS, GROWTHS = 16, (4, 8, 12)  # 3-4-5-6 in four equal stages

WIDE = {"width": 128, "head_size": 32, "mlp": 128}  # matrices whose second moments Adafactor factors
GROWING = [name for name in METHODS if issubclass(METHODS[name], Growing)]
CASES: list[tuple[dict[str, Any], dict[str, dict[str, Any]]]] = [
    *(({"name": name}, {}) for name in GROWING),
    ({"name": "stacking", "moments": "zero"}, {"optimizer": {"idle": "zero"}}),
    ({"name": "progressive-stacking", "schedule": "1-2-6", "moments": "reset"}, {"model": {"dropout": 0.1}}),
    ({"name": "lemon", "init": "zero"}, {"train": {"accumulate": 2}}),
    ({"name": "msg", "mask_steps": 3}, {}),
    ({"name": "msg-interpolation", "schedule": "2-6", "mask_steps": 7}, {"optimizer": {"idle": "zero"}}),
    ({"name": "lemon", "init": "zero"}, {"optimizer": {"name": "muon"}}),
    ({"name": "stacking", "moments": "zero"}, {"optimizer": {"name": "adafactor"}, "model": WIDE}),
    ({"name": "msg", "heads": "2-3-3-4", "mask_steps": 3}, {}),
    ({"name": "msg", "parts": "1-1-2-4"}, {"optimizer": {"idle": "zero"}, "train": {"execution": "gather"}}),
    ({"name": "msg", "schedule": "2-4-6", "heads": "1-3-4", "parts": "1-3-4", "mask_steps": 2}, {}),
    (
        {"name": "msg-interpolation", "schedule": "5-6", "heads": "2-4", "parts": "2-4", "moments": "copy"},
        {"optimizer": {"name": "muon"}, "train": {"accumulate": 2}},
    ),
]


def config(store: TokenStore, method: dict[str, Any], sections: dict[str, dict[str, Any]] | None = None) -> Config:
    given = sections or {}
    family = next(name for name in FAMILIES if store.manifest.objective in FAMILIES[name].objectives)
    model = {"family": family, "size": "tiny", "width": 16, "heads": 4, "head_size": 4, "mlp": 16}
    train = {"steps": STEPS, "batch": 4, "eval_samples": 8, "log_every": 1, "checkpoint_every": 100, "device": "cpu"}
    return Config.read(
        {
            "model": {**model, **given.get("model", {})},
            "method": method,
            "data": {"source": str(store.path), "length": 24, "vocabulary": 600},
            "optimizer": {"peak": 0.01, "warmup": 3, **given.get("optimizer", {})},
            "train": {**train, **given.get("train", {})},
        }
    )


def before_growth(chosen: Config, store: TokenStore, run: Path) -> Trainer:
    """A trainer that has trained up to its first growth and not grown yet."""
    folder = RunFolder(run)
    with folder.opened(chosen):
        trainer = Trainer(chosen, folder, store, CPU)
        trainer.train(trainer.method.phases()[0].stop, QUIET)
    assert trainer.shape != trainer.method.shape(trainer.step)
    return trainer


def check_cost(chosen: Config, run: Path, store: TokenStore) -> None:
    """A finished run cost what was planned, and ended full."""
    dimensions = chosen.model.build(store.vocabulary.size, chosen.data.length)
    made = chosen.make_method()
    cost: dict[str, Any] = {"sequences": 4, "length": 24, "targets": chosen.objective.targets(24)}
    last, planned = records(run)[-1], planned_flops(dimensions, made, **cost)
    assert (last["flops"], last["flops_layers"]) == pytest.approx((planned.total, planned.layers), rel=1e-12)
    shown = plan(made, dimensions, **cost)
    assert shown.flops == planned.total
    if all((row.heads, row.parts) == (4, 4) for row in shown.rows):
        assert shown.relative_layers == pytest.approx(shown.average / 6)
    else:
        assert shown.relative_layers < shown.average / 6
    found = checkpoint.load_latest(run / "checkpoints")
    assert found is not None
    assert found.shape(Shape(1)) == dimensions.shape


@pytest.mark.parametrize(("method", "sections"), CASES)
def test_a_run_costs_what_was_planned_and_stopped_after_every_step_ends_bit_for_bit_as_never_stopped(
    method: dict[str, Any], sections: dict[str, dict[str, Any]], store: TokenStore, tmp_path: Path
) -> None:
    chosen = config(store, method, sections)
    whole, weights = leg(chosen, tmp_path / "whole", store)
    check_cost(chosen, tmp_path / "whole", store)
    for until in range(1, STEPS + 1):
        result, resumed = leg(chosen, tmp_path / "legs", store, until)
    assert differing(weights, resumed) == []
    assert result.eval_loss == whole.eval_loss
    assert records(tmp_path / "legs") == records(tmp_path / "whole")


class Killed(BaseException):
    """What a kill leaves: nothing after it runs."""


@pytest.mark.parametrize(
    "method",
    [
        {"name": "lemon", "init": "zero"},
        {"name": "msg", "mask_steps": 3},
        {"name": "msg", "heads": "1-2-3-4", "parts": "1-2-3-4", "mask_steps": 3},
    ],
)
@pytest.mark.parametrize("saved", [1, 4])
def test_a_kill_around_a_growth_is_not_noticed(
    method: dict[str, Any], saved: int, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints fall on the growth or not; the kill comes before it, halfway through its tensors, or a step later."""
    chosen = config(store, method, {"train": {"checkpoint_every": saved, "keep": 1}})
    _, weights = leg(chosen, tmp_path / "whole", store)
    leg(chosen, tmp_path / "begun", store, GROWTHS[1] - 1)
    for moment in ("before", "inside", "after"):
        run = shutil.copytree(tmp_path / "begun", tmp_path / moment)
        with monkeypatch.context() as patched:
            patched.setattr(loop, "grow", partial(growing, moment))
            patched.setattr(Trainer, "save", saving)
            with pytest.raises(Killed):
                leg(chosen, run, store)
        assert checkpoint.steps(run / "checkpoints") == [GROWTHS[1]]
        _, resumed = leg(chosen, run, store)
        assert differing(weights, resumed) == [], moment


def growing(
    moment: str, plan: Growth, old: Mapping[str, Tensor], into: Mapping[str, Tensor], model: Model
) -> dict[str, Tensor]:
    """Grow, with a kill at this moment of it; `after` grows and is killed by the next save."""
    if moment == "inside":
        into = dict(list(into.items())[: len(into) // 2])
    state = {} if moment == "before" else growth_apply.grow(plan, old, into, model)
    if moment != "after":
        raise Killed
    return state


def saving(trainer: Trainer, save: Callable[[Trainer], None] = Trainer.save) -> None:
    if trainer.step > GROWTHS[1]:
        raise Killed
    save(trainer)


@pytest.mark.parametrize(("method", "sections"), CASES)
def test_a_decoder_costs_what_was_planned_and_ends_full(
    method: dict[str, Any], sections: dict[str, dict[str, Any]], stores: dict[str, TokenStore], tmp_path: Path
) -> None:
    chosen = config(stores["decoder"], method, sections)
    leg(chosen, tmp_path, stores["decoder"])
    check_cost(chosen, tmp_path, stores["decoder"])


def test_what_a_growing_run_records(store: TokenStore, tmp_path: Path) -> None:
    sections = {"train": {"checkpoint_every": 4, "keep": 9, "eval_every": 2, "eval_sizes": [2, 4]}}
    leg(config(store, {"name": "stacking"}, sections), tmp_path, store)
    seen = records(tmp_path)
    trains = [record for record in seen if record["kind"] == "train"]
    assert [record["size"] for record in trains] == [3] * 4 + [4] * 4 + [5] * 4 + [6] * 4
    assert trains[-1]["flops_layers"] == pytest.approx(trains[3]["flops_layers"] * 18 / 3)
    evals = {record["step"]: list(record["sizes"]) for record in seen if record["kind"] == "eval"}
    assert evals == {step: ["2"] if step <= 4 else ["2", "4"] for step in range(0, 17, 2)}
    found = [checkpoint.load(tmp_path / "checkpoints", step) for step in (4, 8, 12, 16)]
    assert [each.shape(Shape(1)).layers for each in found] == [3, 4, 5, 6]  # before any growth at that step
    assert replace(found[0], state={}).shape(Shape(12)) == Shape(12)


def test_the_first_layers_start_as_those_of_the_full_model(store: TokenStore, tmp_path: Path) -> None:
    small = Trainer(config(store, {"name": "stacking"}), RunFolder(tmp_path), store, CPU)
    large = Trainer(config(store, {"name": "full"}), RunFolder(tmp_path), store, CPU)
    there = large.tensors()
    assert small.shape.layers == 3
    assert [name for name, tensor in small.tensors().items() if not torch.equal(tensor, there[name])] == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "msg", "mask_steps": 0, "moments": "copy"}, {"name": "stacking"}),
        ({"name": "msg-interpolation", "mask_steps": 0, "moments": "zero"}, {"name": "lemon", "moments": "zero"}),
        ({"name": "progressive-stacking"}, {"name": "stacking", "schedule": "3-6"}),
        ({"name": "stacking", "schedule": "6"}, {"name": "full"}),
    ],
)
def test_methods_that_are_one_train_bit_for_bit_alike(
    one: dict[str, Any], other: dict[str, Any], store: TokenStore, tmp_path: Path
) -> None:
    _, first = leg(config(store, one), tmp_path / "one", store)
    _, second = leg(config(store, other), tmp_path / "other", store)
    assert differing(first, second) == []


def logits(trainer: Trainer, subnetwork: Subnetwork) -> Tensor:
    trainer.model.eval()
    with torch.no_grad():
        return scores(trainer.model, trainer.batch(0), subnetwork)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("method", "preserving"),
    [
        ({"name": "lemon", "init": "zero"}, True),
        ({"name": "lemon", "init": "zero", "schedule": "2-6"}, True),
        ({"name": "msg", "mask_steps": 3}, True),
        ({"name": "msg-interpolation", "mask_steps": 3}, True),
        ({"name": "msg", "heads": "3-4", "mask_steps": 3}, True),
        ({"name": "msg", "heads": "1-3-4", "mask_steps": 3}, True),
        ({"name": "msg", "parts": "1-4", "mask_steps": 3}, True),
        ({"name": "msg", "schedule": "3-6", "heads": "2-4", "parts": "1-4", "mask_steps": 3}, True),
        ({"name": "msg-interpolation", "schedule": "3-6", "heads": "2-4", "parts": "1-4", "mask_steps": 3}, True),
        ({"name": "msg", "heads": "3-4", "mask_steps": 0}, False),
        ({"name": "msg", "parts": "3-4", "mask_steps": 0}, False),
        ({"name": "lemon"}, False),
        ({"name": "stacking"}, False),
        ({"name": "progressive-stacking"}, False),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_growth_promises_to_leave_as_it_is(
    family: str, method: dict[str, Any], preserving: bool, stores: dict[str, TokenStore], tmp_path: Path
) -> None:
    trainer = before_growth(config(stores[family], method), stores[family], tmp_path)
    before = logits(trainer, trainer.method.evaluated(trainer.step))
    trainer.grow(trainer.method.shape(trainer.step))
    after = logits(trainer, trainer.method.subnetwork(trainer.step))
    assert after.dtype == torch.float64
    assert ((after - before).abs().max().item() <= 1e-10) == preserving


def by_hand(trainer: Trainer, sources: Sequence[int]) -> tuple[Model, torch.optim.AdamW]:
    """A model built large, given copies of the layers and of their optimizer state with torch's own means."""
    small, old = trainer.model, trainer.optimizer.state_dict()
    large = replace(small.config, layers=len(sources)).build(seed=0)
    rest = {name: value for name, value in small.state_dict().items() if not name.startswith("blocks.")}
    large.load_state_dict(rest, strict=False)
    for block, source in zip(large.blocks, sources, strict=True):
        block.load_state_dict(small.blocks[source].state_dict())
    names = [[name for name, p in m.named_parameters() if (p.ndim >= 2) == m2] for m in (small, large) for m2 in (1, 0)]
    places = {name: number for number, name in enumerate([*names[0], *names[1]])}
    state = {}
    for number, name in enumerate([*names[2], *names[3]]):
        part = name.split(".")
        if part[0] == "blocks":
            part[1] = str(sources[int(part[1])])
        state[number] = {key: value.clone() for key, value in old["state"][places[".".join(part)]].items()}
    settings = trainer.config.optimizer
    matrices, others = ([p for p in large.parameters() if (p.ndim >= 2) == wide] for wide in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return large, optimizer


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("method", [{"name": "stacking"}, {"name": "lemon"}])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_growth_the_optimizer_goes_on_as_if_the_model_had_always_been_large(
    family: str, method: dict[str, Any], stores: dict[str, TokenStore], tmp_path: Path
) -> None:
    trainer = before_growth(config(stores[family], method), stores[family], tmp_path)
    sources = (0, 1, 2, 2)
    model, optimizer = by_hand(trainer, sources)
    trainer.grow(trainer.method.shape(trainer.step))
    full = Subnetwork.full(len(sources))
    for step in range(5):
        for each, steps in ((model, optimizer), (trainer.model, trainer.optimizer)):
            for group in steps.param_groups:
                group["lr"] = 0.01
            each(trainer.batch(step), each.inputs(full)).backward()
            steps.step()
            steps.zero_grad()
    assert differing(model.state_dict(), trainer.model.state_dict()) == []


@pytest.mark.parametrize(
    ("moments", "old_is_fresh", "new_is_fresh"),
    [("zero", False, True), ("reset", True, True), ("copy", False, False)],
)
@pytest.mark.parametrize("name", ["stacking", "lemon"])
def test_whose_first_update_is_that_of_a_fresh_optimizer(
    name: str, moments: str, old_is_fresh: bool, new_is_fresh: bool, store: TokenStore, tmp_path: Path
) -> None:
    trainer = before_growth(config(store, {"name": name, "moments": moments}), store, tmp_path)
    trainer.grow(trainer.method.shape(trainer.step))
    trainer.model(trainer.batch(4), trainer.model.inputs(Subnetwork.full(4))).backward()
    updates = []
    for block in (0, 3):
        own = [parameter for parameter in trainer.model.blocks[block].parameters() if parameter.ndim >= 2]
        copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in own]
        for copied, parameter in zip(copies, own, strict=True):
            copied.grad = None if parameter.grad is None else parameter.grad.clone()
        fresh = torch.optim.AdamW(copies, **{key: trainer.optimizer.param_groups[0][key] for key in ADAM})
        fresh.step()
        updates.append((own, copies))
    trainer.optimizer.step()
    same = [
        max((a - b).abs().max().item() for a, b in zip(own, copies, strict=True)) <= 1e-7 for own, copies in updates
    ]
    assert same == [old_is_fresh, new_is_fresh]


ADAM = ("lr", "betas", "eps", "weight_decay")


@pytest.mark.parametrize(("family", "parts"), [("bert", ("weight", "bias")), ("decoder", ("weight",))])
def test_zeroed_tensors_never_have_their_sources_moments(
    family: str, parts: tuple[str, ...], stores: dict[str, TokenStore], tmp_path: Path
) -> None:
    trainer = before_growth(config(stores[family], {"name": "lemon", "init": "zero"}), stores[family], tmp_path)
    trainer.grow(trainer.method.shape(trainer.step))
    there = trainer.tensors()
    for kind in ("model", "exp_avg", "exp_avg_sq", "step"):
        for module in ("attention_out", "mlp_out"):
            for part in parts:
                if kind == "model":
                    assert not there[f"{kind}.blocks.3.{module}.{part}"].any()
                else:
                    assert f"{kind}.blocks.3.{module}.{part}" not in there  # what the optimizer begins with
                assert there[f"{kind}.blocks.2.{module}.{part}"].any()
        assert torch.equal(there[f"{kind}.blocks.3.qkv.weight"], there[f"{kind}.blocks.2.qkv.weight"])


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.parametrize("moments", ["copy", "zero", "reset"])
def test_state_of_any_kind_and_shape_follows_its_layer(
    name: str, moments: str, store: TokenStore, tmp_path: Path
) -> None:
    sections: dict[str, dict[str, Any]] = {"optimizer": {"name": name}, "model": WIDE}
    trainer = before_growth(config(store, {"name": "stacking", "moments": moments}, sections), store, tmp_path)
    before = snapshot(trainer)
    trainer.grow(trainer.method.shape(trainer.step))
    after = {full: tensor for full, tensor in trainer.tensors().items() if not full.startswith("model.")}
    old = {full: tensor for full, tensor in before.items() if not full.startswith("model.")}
    kinds = {full.partition(".")[0] for full in old if ".blocks.2.qkv.weight" in full}
    assert kinds == ({"momentum_buffer"} if name == "muon" else {"step", "row", "column"})
    new = {full.replace(".blocks.2.", ".blocks.3."): tensor for full, tensor in old.items() if ".blocks.2." in full}
    expected = {} if moments == "reset" else {**old, **new} if moments == "copy" else old
    assert differing(after, expected) == []


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("family", FAMILIES)
def test_new_parameters_are_trained_and_only_matrices_decay(
    family: str, name: str, stores: dict[str, TokenStore], tmp_path: Path
) -> None:
    trainer = before_growth(config(stores[family], {"name": name}), stores[family], tmp_path)
    trainer.grow(trainer.method.shape(trainer.step))
    decayed, plain = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0)
    assert {id(p) for p in decayed["params"]} == {id(p) for p in trainer.model.parameters() if p.ndim >= 2}
    assert {id(p) for p in plain["params"]} == {id(p) for p in trainer.model.parameters() if p.ndim < 2}
    before = snapshot(trainer)
    trainer.optimize(Subnetwork.full(trainer.shape.layers))
    after = trainer.tensors()
    assert before.keys() <= after.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    kinds = [name.partition(".")[0] for name in after]
    assert {kinds.count(kind) for kind in ("model", "exp_avg", "exp_avg_sq", "step")} == {len(trainer.parameters)}


@pytest.mark.parametrize("family", FAMILIES)
def test_export_of_a_model_that_is_still_growing(family: str, stores: dict[str, TokenStore], tmp_path: Path) -> None:
    store = stores[family]
    pretrain(config(store, {"name": "stacking"}), tmp_path / "small", until=GROWTHS[0], console=QUIET)
    folder = export(tmp_path / "small")
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
    fading = config(store, {"name": "msg", "mask_steps": 3})
    pretrain(fading, tmp_path / "fading", until=GROWTHS[0] + 2, console=QUIET)
    with pytest.raises(ValueError, match=r"msg.*0\.333.*layers from 1 to 4"):
        export(tmp_path / "fading")


GROUPS = {"kv_heads": 2}  # of four query heads
WIDER: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("bert", {"heads": "3-4"}, {}),
    ("bert", {"parts": "1-4"}, {}),
    ("bert", {"schedule": "5-6", "heads": "1-4", "parts": "3-4"}, {}),
    ("decoder", {"schedule": "5-6", "heads": "1-4", "parts": "3-4"}, {}),
    ("decoder", {"schedule": "5-6", "heads": "1-2", "parts": "3-4"}, GROUPS),
]


@pytest.mark.usefixtures("float64")
def test_whole_groups_of_queries_are_faded_in(stores: dict[str, TokenStore], tmp_path: Path) -> None:
    chosen = config(stores["decoder"], {"name": "msg", "heads": "1-2", "mask_steps": 3}, {"model": GROUPS})
    trainer = before_growth(chosen, stores["decoder"], tmp_path)
    assert trainer.model.config.heads == 2  # one group
    before = logits(trainer, trainer.method.evaluated(trainer.step))
    trainer.grow(trainer.method.shape(trainer.step))
    assert trainer.model.config == trainer.dimensions
    after = logits(trainer, trainer.method.subnetwork(trainer.step))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("family", "method", "model"), WIDER)
def test_every_row_counts_its_own_steps(
    family: str, method: dict[str, Any], model: dict[str, Any], stores: dict[str, TokenStore], tmp_path: Path
) -> None:
    """After a growth the trainer's steps are those of Adam with a moment and a step count for each element."""
    sections = {"model": {"init": "fan-in", **model}, "optimizer": {"clip": 0, "warmup": 0}}
    chosen = config(stores[family], {"name": "msg", "mask_steps": 2, **method}, sections)
    trainer = before_growth(chosen, stores[family], tmp_path)
    small, kept = trainer.shape, snapshot(trainer)
    trainer.grow(trainer.method.shape(trainer.step))
    fresh, settings = trainer.dimensions.build(seed=0), trainer.config.optimizer
    weights, state = {}, {}
    for name, parameter in trainer.model.named_parameters():
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else 0
        old = torch.ones_like(parameter, dtype=torch.bool)
        if f"model.{name}" not in kept:
            assert layer >= small.layers
            old = ~old
        elif kept[f"model.{name}"].shape != parameter.shape:
            old = parameter.detach() != fresh.get_parameter(name).detach()  # new rows have the initial weights
            assert old.sum() == kept[f"model.{name}"].numel()
        m, v = torch.zeros_like(parameter), torch.zeros_like(parameter)
        if old.any():
            m[old], v[old] = (kept[f"{kind}.{name}"].flatten() for kind in ("exp_avg", "exp_avg_sq"))
        weights[name], state[name] = parameter.detach().clone(), (m, v, old * float(trainer.step))
    decayed = {id(parameter) for parameter in trainer.optimizer.param_groups[0]["params"]}
    for _ in range(4):
        subnetwork, rate = trainer.method.subnetwork(trainer.step), settings.learning_rate(trainer.step, STEPS)
        trainer.gradients(subnetwork)
        gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
        trainer.update(torch.zeros(()), subnetwork)
        trainer.step += 1
        for name, parameter in trainer.model.named_parameters():
            if (g := gradients[name]) is not None:  # a new layer does not run in the first step
                m, v, t = state[name]
                t += 1
                m.copy_(settings.beta1 * m + (1 - settings.beta1) * g)
                v.copy_(settings.beta2 * v + (1 - settings.beta2) * g * g)
                m_hat, v_hat = m / (1 - settings.beta1**t), v / (1 - settings.beta2**t)
                weights[name] *= 1 - rate * settings.weight_decay * (id(parameter) in decayed)
                weights[name] -= rate * m_hat / (v_hat.sqrt() + settings.epsilon)
            torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize("policy", ["skip", "zero"])
def test_under_a_gate_of_0_a_new_head_only_decays(policy: str, store: TokenStore, tmp_path: Path) -> None:
    """It runs, so it is not idle under either policy: its gradient is zero, its count is that of one step."""
    sections = {"optimizer": {"idle": policy}}
    trainer = before_growth(config(store, {"name": "msg", "heads": "3-4", "mask_steps": 3}, sections), store, tmp_path)
    trainer.grow(trainer.method.shape(trainer.step))
    name = "blocks.0.attention_out.weight"
    before = trainer.model.get_parameter(name).detach().clone()
    rate = trainer.config.optimizer.learning_rate(trainer.step, STEPS) * trainer.config.optimizer.weight_decay
    trainer.optimize(trainer.method.subnetwork(trainer.step))
    after, count = trainer.model.get_parameter(name), trainer.tensors()[f"step.{name}"]
    torch.testing.assert_close(after[:, 12:], before[:, 12:] * (1 - rate))
    assert (after[:, :12] != before[:, :12]).all()
    assert count.tolist() == [[9.0] * 12 + [1.0] * 4]
    trainer.optimize(trainer.method.subnetwork(trainer.step))
    assert trainer.tensors()[f"exp_avg.{name}"][:, 12:].all()


def test_adafactor_is_refused_where_heads_or_parts_are_added(store: TokenStore) -> None:
    for axis in ("heads", "parts"):
        with pytest.raises(ValueError, match=rf"optimizer\.name is adafactor.*method\.{axis}.*msg"):
            config(store, {"name": "msg", axis: "2-4"}, {"optimizer": {"name": "adafactor"}})
        config(store, {"name": "msg", axis: "4-4"}, {"optimizer": {"name": "adafactor"}})  # nothing is added


@pytest.mark.parametrize("family", FAMILIES)
def test_a_widened_model_is_exported_once_its_gates_are_open(
    family: str, stores: dict[str, TokenStore], tmp_path: Path
) -> None:
    chosen = config(stores[family], {"name": "msg", "heads": "2-4", "parts": "1-4", "mask_steps": 3})
    pretrain(chosen, tmp_path / "run", until=8, console=QUIET)
    if family == "decoder":
        stock = json.loads((export(tmp_path / "run") / "config.json").read_text())
        assert (stock["num_hidden_layers"], stock["num_attention_heads"], stock["intermediate_size"]) == (6, 2, 4)
    else:
        with pytest.raises(ValueError, match=r"head_size is 4 .*2 heads.*width 16"):
            export(tmp_path / "run")
    pretrain(chosen, tmp_path / "run", until=10, console=QUIET)
    with pytest.raises(ValueError, match=r"msg.*heads.*0\.333.*layers from 1 to 6"):
        export(tmp_path / "run")
    pretrain(chosen, tmp_path / "run", console=QUIET)
    stock = json.loads((export(tmp_path / "run") / "config.json").read_text())
    assert (stock["num_hidden_layers"], stock["num_attention_heads"], stock["intermediate_size"]) == (6, 4, 16)
