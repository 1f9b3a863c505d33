"""AdamW with a step count for each row, against a reference written out row by row and against torch's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from raptr.distributed.sharding import local, rows
from raptr.train import adamw
from raptr.train.adamw import AdamW, compiled_move
from raptr.train.optimizer import load_state, state_tensors

ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [((6, 4), (6, 1)), ((4, 6), (1, 6)), ((6,), (6,))]  # a parameter's, and that of its step count


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    values = torch.arange(1.0, 1 + torch.Size(shape).numel())
    return torch.sin(values * (step + 1)).view(shape) * 10.0 ** (step % 3 - 2)


class One(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(gradient(shape, 100) * 10)


def with_counts(model: One, counts: Tensor, **settings: bool) -> AdamW:
    """An optimizer that has taken so many steps with each row; the moments are those of rows of that age."""
    optimizer = AdamW(model.parameters(), **ADAM, **settings)
    moment, aged = gradient(tuple(model.weight.shape), 7), (counts > 0).to(counts.dtype)
    load_state(
        optimizer,
        model,
        {"step.weight": counts, "exp_avg.weight": moment * aged, "exp_avg_sq.weight": moment**2 * aged},
    )
    return optimizer


def reference(weight: Tensor, state: dict[str, Tensor], g: Tensor) -> None:
    """Adam with decoupled decay, a step count for each element, as its paper writes it."""
    (b1, b2), m, v, t = ADAM["betas"], state["exp_avg.weight"], state["exp_avg_sq.weight"], state["step.weight"]
    t += 1
    weight -= ADAM["lr"] * ADAM["weight_decay"] * weight
    m.copy_(b1 * m + (1 - b1) * g)
    v.copy_(b2 * v + (1 - b2) * g * g)
    weight -= ADAM["lr"] * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + ADAM["eps"])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("shape", "counted"), SHAPES)
def test_each_row_is_corrected_by_its_own_count(shape: tuple[int, ...], counted: tuple[int, ...]) -> None:
    model, counts = One(shape), torch.tensor([1000.0, 1000, 40, 40, 0, 0]).view(counted)
    optimizer = with_counts(model, counts)
    expected = model.weight.detach().clone()
    state = {name: tensor.clone() for name, tensor in state_tensors(optimizer, model).items()}
    for step in range(6):
        model.weight.grad = gradient(shape, step)
        optimizer.step()
        assert model.weight.grad is not None  # whoever looks at gradients afterwards finds them
        reference(expected, state, gradient(shape, step))
        torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-13, atol=1e-15)
    assert optimizer.state[model.weight]["step"].flatten().tolist() == [1006, 1006, 46, 46, 6, 6]


@pytest.mark.parametrize(("shape", "counted"), SHAPES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("age", [0, 3, 1000])
def test_rows_of_one_age_are_those_of_torch(
    shape: tuple[int, ...], counted: tuple[int, ...], fused: bool, age: int
) -> None:
    model, plain = One(shape), One(shape)
    optimizer = with_counts(model, torch.full(counted, float(age)), fused=fused)
    other = with_counts(plain, torch.tensor(float(age)), fused=fused)
    if age == 0:
        other.state.clear()  # torch's own beginning
    for step in range(6):
        for each, steps in ((model, optimizer), (plain, other)):
            each.weight.grad = gradient(shape, step)
            steps.step()
        torch.testing.assert_close(model.weight, plain.weight, rtol=0, atol=1e-7)


def test_one_count_for_all_rows_would_be_wrong() -> None:
    """What the count of its own is for: a first update of the size of the learning rate."""
    model = One((6, 4))
    optimizer = with_counts(model, torch.tensor([1000.0] * 4 + [0.0] * 2).view(6, 1))
    before = model.weight.detach() * (1 - ADAM["lr"] * ADAM["weight_decay"])
    model.weight.grad = torch.ones(6, 4)
    optimizer.step()
    torch.testing.assert_close(before[4:] - model.weight.detach()[4:], torch.full((2, 4), ADAM["lr"]))


@pytest.mark.parametrize("taken", [(), (4.0,), (3.0, 0, 5, 5, 0, 1)], ids=["new", "one count", "counts"])
@pytest.mark.parametrize(("shape", "counted"), SHAPES)
def test_rows_that_did_not_run_are_left_alone(
    shape: tuple[int, ...], counted: tuple[int, ...], taken: tuple[float, ...]
) -> None:
    """Bit for bit; the others take Adam's steps, and later all do."""
    model, ran = One(shape), torch.tensor([1.0, 0, 1, 0, 0, 1]).view(counted)
    counts = torch.zeros(counted) + torch.tensor(taken or (0.0,)).view(counted if len(taken) == 6 else ())
    optimizer = with_counts(model, torch.tensor(taken[0]) if len(taken) == 1 else counts.clone())
    if not taken:
        optimizer.state.clear()
    begun = {"weight": model.weight.detach(), **state_tensors(optimizer, model)}
    weight = begun["weight"].clone()
    state = {f"{kind}.weight": torch.zeros(shape) for kind in ("exp_avg", "exp_avg_sq")} | {"step.weight": counts}
    state |= {name: tensor.clone() for name, tensor in begun.items() if name.startswith("exp")}
    for step, now in enumerate((ran, ran, torch.ones_like(ran))):
        model.weight.grad = gradient(shape, step)  # which would move idle rows if it were looked at
        if not now.all():
            optimizer.ran = {model.weight: now}
        optimizer.step()
        moved = weight.clone(), {name: tensor.clone() for name, tensor in state.items()}
        reference(moved[0], moved[1], gradient(shape, step))
        weight = torch.where(now > 0, moved[0], weight)
        state = {name: torch.where(now > 0, moved[1][name], tensor) for name, tensor in state.items()}
        found = {"weight": model.weight.detach(), **state_tensors(optimizer, model)}
        for name, expected in {"weight": weight, **state}.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-7)
            if not name.startswith("step"):
                idle = (now == 0).expand(shape)
                assert torch.equal(found[name][idle], expected[idle])
    assert torch.equal(optimizer.state[model.weight]["step"], state["step.weight"])


@pytest.mark.parametrize(("shape", "counted"), SHAPES)
def test_the_compiled_update_is_the_same_and_compiled_once(
    shape: tuple[int, ...], counted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    counter, results = CompileCounter(), []
    monkeypatch.setattr(adamw, "compiled_move", lambda: compiled_move(counter))
    for compiled in (False, True):
        model = One(shape)
        optimizer = with_counts(model, torch.arange(6.0).view(counted), compiled=compiled)
        for step in range(8):
            model.weight.grad = gradient(shape, step)
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.ran = {model.weight: (torch.arange(6) % (2 + step) > 0).float().view(counted)}
            optimizer.step()
            assert not optimizer.ran
        results.append([model.weight.detach(), *optimizer.state[model.weight].values()])
    torch.testing.assert_close(results[1], results[0])
    assert counter.frame_count == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, from its compiler
@pytest.mark.parametrize(("shape", "counted"), [((192, 80), (192, 1)), ((80, 192), (1, 192)), ((192,), (192,))])
def test_a_gpu_makes_the_steps_of_a_cpu(shape: tuple[int, ...], counted: tuple[int, ...]) -> None:
    results = []
    for device in ("cpu", "cuda"):
        model = One(shape).to(device)
        optimizer = AdamW(model.parameters(), **ADAM, fused=device == "cuda", compiled=device == "cuda")
        for step in range(5):
            model.weight.grad = gradient(shape, step).to(device)
            optimizer.ran = {model.weight: (torch.arange(192, device=device) % (2 + step) > 0).float().view(counted)}
            optimizer.step()
        results.append([tensor.cpu() for tensor in (model.weight.detach(), *optimizer.state[model.weight].values())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


def test_other_parameters_take_torchs_steps_bit_for_bit() -> None:
    models = [nn.Linear(4, 6) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, torchs = AdamW(models[0].parameters(), **ADAM), torch.optim.AdamW(models[1].parameters(), **ADAM)
    for step in range(5):
        for model, optimizer in zip(models, (ours, torchs), strict=True):
            model.weight.grad, model.bias.grad = gradient((6, 4), step), gradient((6,), step)
            if step == 3:
                model.bias.grad = None
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
        assert ours.state[one].keys() == torchs.state[other].keys()
        assert all(torch.equal(ours.state[one][kind], torchs.state[other][kind]) for kind in ours.state[one])


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    model = One((6, 4))
    optimizer = with_counts(model, torch.arange(6.0).view(6, 1))
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert optimizer.state[model.weight]["step"].flatten().tolist() == [0, 1, 2, 3, 4, 5]


@contextmanager
def process(rank: int, size: int) -> Iterator[DeviceMesh]:
    """One of several processes, whose messages reach nobody."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    yield init_device_mesh("cpu", (size,))
    dist.destroy_process_group()


@pytest.fixture
def second_of_two() -> Iterator[DeviceMesh]:
    with process(1, 2) as mesh:
        yield mesh


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("counted", ["rows", "rows in shards", "columns"])
def test_a_process_steps_its_own_rows_without_a_message(counted: str, some: bool, second_of_two: DeviceMesh) -> None:
    def shards(own: Tensor) -> DTensor:
        return DTensor.from_local(own, second_of_two, [Shard(0)], run_check=False)

    weight, grad = (shards(gradient((3, 4), step)) for step in (0, 1))
    counts, steps = torch.arange(4.0).view(1, 4) if counted == "columns" else torch.arange(6.0).view(6, 1), []
    own = counts if counted == "columns" else counts[3:]
    given = shards(own) if counted == "rows in shards" else counts
    for parameter, age in ((weight, given), (weight.to_local().clone(), own)):
        one = nn.Parameter(parameter)
        one.grad = grad if isinstance(parameter, DTensor) else grad.to_local()
        optimizer = AdamW([one], **ADAM)
        moments = {kind: torch.zeros_like(one) for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.state[one] = {"step": age.clone(), **moments}
        if some:  # of all processes' rows
            ran = (counts % 2).clone()
            optimizer.ran = {one: ran if isinstance(parameter, DTensor) or counted == "columns" else ran[3:]}
        with CommDebugMode() as messages:  # type: ignore[no-untyped-call]
            optimizer.step()
        assert messages.get_total_counts() == 0
        steps.append((local(one.detach())[0], rows(optimizer.state[one]["step"])))
    (mine, ages), (expected, others) = steps
    assert torch.equal(mine, expected)
    assert torch.equal(ages[3:] if counted == "rows" else ages, others)


def test_a_process_without_rows_of_a_parameter_takes_its_step() -> None:
    """Of five rows three processes have two, two and one, and the fourth has none."""
    with process(3, 4) as mesh:
        whole: dict[str, Any] = {"run_check": False, "shape": torch.Size((5, 4)), "stride": (4, 1)}
        one = nn.Parameter(DTensor.from_local(torch.empty(0, 4), mesh, [Shard(0)], **whole))
        one.grad = DTensor.from_local(torch.empty(0, 4), mesh, [Shard(0)], **whole)
        optimizer = AdamW([one], **ADAM)
        ran = torch.tensor([1.0, 0, 1, 0, 1]).view(5, 1)
        for _ in range(2):
            optimizer.ran = {one: ran}
            optimizer.step()
        assert torch.equal(optimizer.state[one]["step"], 2 * ran)
