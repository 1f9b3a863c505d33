"""Both forms compute the same, with and without kernels; compiled code is compiled once for a stage."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from raptr.data.batch import Batch, refill
from raptr.methods import make_method
from raptr.models.bert.config import BertConfig
from raptr.models.contract import ModelConfig
from raptr.models.decoder.config import DecoderConfig
from raptr.models.fused import KERNELS
from raptr.models.inputs import BlockInputs, Packed, pack
from raptr.models.model import Model
from raptr.subnetworks import Subnetwork
from raptr.train import execution
from raptr.train.config import Config, TrainSettings
from raptr.train.execution import Execution, Gather, Skip, _Program, make_execution
from tests.operations import Operations

CONFIG = BertConfig(layers=5, width=32, heads=4, head_size=8, mlp=64, vocabulary=50, positions=16, parts=4)
DECODER = DecoderConfig(
    layers=5, width=32, heads=8, kv_heads=4, head_size=8, mlp=64, vocabulary=50, positions=16, tied=False
)
CPU = torch.device("cpu")
every_family = pytest.mark.parametrize("config", [CONFIG, DECODER], ids=["bert", "decoder"])
on_gpu = pytest.mark.skipif(not (torch.cuda.is_available() and KERNELS), reason="needs an NVIDIA GPU and Triton")


def batch(number: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 50, (4, 16), generator=generator)
    positions = torch.stack([torch.randperm(16, generator=generator)[:3].sort().values for _ in range(4)])
    return Batch(tokens, positions, torch.randint(0, 50, (4, 3), generator=generator))


def build(device: torch.device = CPU, dtype: torch.dtype = torch.float64, config: ModelConfig = CONFIG) -> Model:
    model = config.build(seed=3).to(dtype)
    with torch.no_grad():  # biases and gains at their start would hide mistakes
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    return model.to(device)


def settings(**given: object) -> TrainSettings:
    return TrainSettings(steps=10, batch=4, **given)  # type: ignore[arg-type]


def gradients(
    model: nn.Module, form: Execution, subnetwork: Subnetwork, micros: int
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = torch.stack([form.backward(batch(micro), subnetwork) for micro in range(micros)]).sum()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@every_family
@pytest.mark.parametrize("form", ["skip", "gather"])
def test_a_batch_without_positions_has_targets_everywhere(form: str, config: ModelConfig) -> None:
    model, listed = build(config=config), batch()
    listed = Batch(listed.tokens_BS, torch.arange(16).expand(4, 16), listed.tokens_BS.flip(1))
    execution = make_execution(model, settings(execution=form), CPU)
    implied = listed._replace(positions_BM=None)
    losses = []
    for data in (listed, implied):
        model.zero_grad(set_to_none=True)
        losses.append(execution.backward(data, Subnetwork.full(5)))
    assert torch.equal(*losses)
    held = Batch(torch.zeros_like(listed.tokens_BS), None, torch.zeros_like(listed.labels_BM))
    refill(held, implied.to("cpu"))
    assert torch.equal(held.labels_BM, listed.labels_BM)


HEADS, PARTS = ((0, 1), (0, 1), (1, 2, 3), (0, 2), (0, 1)), ((0,), (0,), (3,), (1, 2), (0,))
SUBNETWORKS = {
    "full": Subnetwork.full(5),
    "nothing": Subnetwork((0.0,) * 5),
    "depth": Subnetwork((1.0, 0.0, 2.0**0.5, 0.0, 1.0)),
    "branches": Subnetwork((1.0, 1.5, 0.0, 0.0, 2.0), scaled="branches"),
    "heads and parts": Subnetwork(
        (1.0, 0.0, 1.0, 1.0, 0.0),
        heads=HEADS,
        parts=PARTS,
        head_scale=1.4,
        part_scale=2.0,
    ),
    "heads and parts of every layer": Subnetwork((1.0,) * 5, heads=HEADS, parts=PARTS, head_scale=1.4, part_scale=2.0),
    "parts": Subnetwork((1.0, 0.0, 1.0, 1.0, 1.0), parts=PARTS, scaled="branches"),
    "gates": Subnetwork((1.0, 0.3, 1.0, 0.0, 1.0), head_gates=(1.0, 1.0, 0.3, 0.3), part_gates=(1.0, 0.3, 0.3, 0.3)),
    "gates of all layers": Subnetwork((1.0,) * 5, head_gates=(1.0, 1.0, 0.0, 0.0), part_gates=(1.0, 0.0, 0.0, 0.0)),
}


@every_family
@pytest.mark.parametrize("name", SUBNETWORKS)
@pytest.mark.parametrize("micros", [1, 2])
def test_gather_equals_skip(name: str, micros: int, config: ModelConfig) -> None:
    model, subnetwork = build(config=config), SUBNETWORKS[name]
    given = {"accumulate": micros}
    skip = make_execution(model, settings(execution="skip", **given), CPU)
    gather = make_execution(model, settings(execution="gather", **given), CPU)
    assert isinstance(skip, Skip)
    assert isinstance(gather, Gather)
    loss, expected = gradients(model, skip, subnetwork, micros)
    for _ in range(2):  # slots and programs are used again
        other, found = gradients(model, gather, subnetwork, micros)
        torch.testing.assert_close(other, loss, rtol=1e-10, atol=1e-10)
        assert expected.keys() == found.keys()  # layers that did not run have no gradient in either form
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@every_family
@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=on_gpu)], ids=str)
@pytest.mark.parametrize("micros", [1, 2])
def test_a_program_follows_what_is_drawn(micros: int, device: torch.device, config: ModelConfig) -> None:
    model = build(device, torch.float32, config)
    plain = {"precision": "float32", "compile": False, "accumulate": micros}
    skip, gather = (make_execution(model, settings(execution=form, **plain), device) for form in ("skip", "gather"))
    assert isinstance(gather, Gather)
    method = make_method("raptr", shape=config.shape, steps=30, schedule="2-3-5", heads="1-3-4", parts="1-2-4")
    drawn = [method.subnetwork(step) for step in range(30)]
    for subnetwork in drawn:
        loss, expected = gradients(model, skip, subnetwork, micros)
        other, found = gradients(model, gather, subnetwork, micros)
        torch.testing.assert_close(other, loss)
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(gather._programs) == len(method.phases()) < len(set(drawn))  # one for a stage, whatever is drawn in it


@every_family
def test_slots_follow_the_weights(config: ModelConfig) -> None:
    model, part = build(config=config), SUBNETWORKS["depth"]
    gather = make_execution(model, settings(execution="gather"), CPU)
    first, _ = gradients(model, gather, part, 1)
    with torch.no_grad():
        for parameter in model.blocks[2].parameters():
            parameter.mul_(2.0)
    second, _ = gradients(model, gather, part, 1)
    torch.testing.assert_close(second, model(batch(), model.inputs(part)), rtol=1e-10, atol=1e-10)
    assert abs(second - first) > 1e-3


def test_graphs_of_earlier_stages_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tried = build(), []

    class Graph:
        def __init__(self, program: object, batch: Batch, packed: object, memory: object) -> None:
            tried.append(memory)
            if len(tried) == 2:
                raise torch.OutOfMemoryError

    monkeypatch.setattr(execution, "_Graph", Graph)
    monkeypatch.setattr(execution, "_GraphMemory", lambda device: object())
    gather = make_execution(model, settings(execution="gather"), CPU)
    assert isinstance(gather, Gather)
    gather._forward.device = torch.device("cuda")
    monkeypatch.setattr(gather._slots, "first", lambda size: [])
    gather._program(batch(), SUBNETWORKS["full"])
    gather._program(batch(), SUBNETWORKS["depth"])
    assert len(tried) == 3  # the third one succeeds, alone and in memory of its own
    assert len(gather._programs) == 1
    assert tried[0] is tried[1]
    assert tried[2] is not tried[0]


def test_a_graph_that_nothing_can_make_room_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def graph(*given: object) -> None:
        tried.append(given)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(execution, "_Graph", graph)
    monkeypatch.setattr(execution, "_GraphMemory", lambda device: object())
    gather = make_execution(build(), settings(execution="gather"), CPU)
    assert isinstance(gather, Gather)
    gather._forward.device = torch.device("cuda")
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        gather._program(batch(), SUBNETWORKS["full"])
    assert len(tried) == 1


@every_family
def test_recomputation_changes_nothing(config: ModelConfig) -> None:
    model, part = build(config=config), SUBNETWORKS["depth"]
    loss, expected = gradients(model, make_execution(model, settings(), CPU), part, 1)
    other, found = gradients(model, make_execution(model, settings(recompute=True), CPU), part, 1)
    assert torch.equal(other, loss)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture
def eager_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace as the compiler does, but generate no code: what is recompiled is seen all the same."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@every_family
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks at it while tracing
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch 2.11 itself uses it
@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.parametrize("form", ["skip", "gather"])
@pytest.mark.parametrize("scaling", ["sqrt", "linear", "none"])
def test_a_stage_is_compiled_once(form: str, scaling: str, config: ModelConfig) -> None:
    model = build(config=config)
    method = make_method("raptr", shape=config.shape, steps=90, schedule="2-3-5", lengths="equal", scaling=scaling)
    run = make_execution(model, settings(execution=form, compile=True), CPU)
    start = graphs = counters["stats"]["unique_graphs"]
    for phase in method.phases():
        for step in range(phase.start, phase.stop):
            gradients(model, run, method.subnetwork(step), 1)
            if step == phase.start:
                graphs = counters["stats"]["unique_graphs"]
        assert counters["stats"]["unique_graphs"] == graphs, phase
    assert graphs - start <= 4  # embeddings, head, a block with scales and one without


@every_family
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.parametrize("form", ["skip", "gather"])
@pytest.mark.parametrize("schedule", ["5-5-5", "2-3-5"])
def test_a_stage_of_narrow_layers_is_compiled_once(form: str, schedule: str, config: ModelConfig) -> None:
    model = build(config=config)
    method = make_method("raptr", shape=config.shape, steps=45, schedule=schedule, heads="1-3-4", parts="1-2-4")
    run = make_execution(model, settings(execution=form, compile=True), CPU)
    for phase in method.phases():
        gradients(model, run, method.subnetwork(phase.start), 1)
        graphs = counters["stats"]["unique_graphs"]
        for step in range(phase.start, phase.stop):
            gradients(model, run, method.subnetwork(step), 1)
        assert counters["stats"]["unique_graphs"] == graphs, phase


@every_family
@pytest.mark.parametrize("name", SUBNETWORKS)
def test_a_step_launches_two_copies_beside_the_graph(
    name: str, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, subnetwork = build(config=config), SUBNETWORKS[name]
    gather = make_execution(model, settings(execution="gather"), CPU)
    assert isinstance(gather, Gather)
    data, packed = batch(), gather._forward.pack(subnetwork)
    result = gather._program(data, subnetwork)(data, packed)
    monkeypatch.setattr(gather._forward, "pack", lambda subnetwork: packed)  # numbers on the CPU
    monkeypatch.setattr(execution._Program, "__call__", lambda self, batch, packed: result)
    with Operations() as operations:
        gather.backward(data, subnetwork)
    copies = 2 if 0 < subnetwork.size < subnetwork.layers else 0
    assert operations.called == ["aten._foreach_copy_.default"] * copies


def test_all_kinds_of_subnetworks_share_the_slots() -> None:
    gather = make_execution(build(), settings(execution="gather"), CPU)
    assert isinstance(gather, Gather)
    slots, fewer = set(), [part for part in SUBNETWORKS.values() if part.size < part.layers]
    for subnetwork in fewer:
        program = gather._program(batch(), subnetwork)
        assert isinstance(program, execution._Program)
        slots |= {id(block) for block in program._blocks}
    assert len(slots) == max(subnetwork.size for subnetwork in fewer)


@every_family
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch does it, with an autograd function
@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.parametrize("name", SUBNETWORKS)
def test_warming_up_compiles_all_that_a_graph_will_need(name: str, config: ModelConfig) -> None:
    model, subnetwork = build(config=config), SUBNETWORKS[name]
    gather = make_execution(model, settings(execution="gather", compile=True), CPU)
    assert isinstance(gather, Gather)
    program, packed = gather._program(batch(), subnetwork), pack(subnetwork, torch.float64)
    assert isinstance(program, execution._Program)
    before = counters["stats"]["unique_graphs"]
    program.warm_up(batch(), packed)
    after = counters["stats"]["unique_graphs"]
    program(batch(), packed)
    assert counters["stats"]["unique_graphs"] == after > before
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", SUBNETWORKS)
def test_warming_up_goes_through_the_blocks_one_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subnetwork = SUBNETWORKS[name]
    gather = make_execution(build(), settings(execution="gather"), CPU)
    assert isinstance(gather, Gather)
    program = gather._program(batch(), subnetwork)
    assert isinstance(program, execution._Program)
    forward, seen = program.forward, []

    def watched(batch: Batch, blocks: Sequence[nn.Module], inputs: Sequence[BlockInputs]) -> Tensor:
        seen.append(list(blocks))
        return forward(batch, blocks, inputs)

    monkeypatch.setattr(program, "forward", watched)
    program.warm_up(batch(), pack(subnetwork, torch.float64))
    assert max(map(len, seen)) == min(1, subnetwork.size)  # memory for one
    assert {id(block) for blocks in seen for block in blocks} == {id(block) for block in program._blocks}


def test_forms_that_do_not_fit_together_are_refused() -> None:
    def config(**sections: dict[str, object]) -> Config:
        return Config.read({"train": {"steps": 10, "execution": "gather", **sections.pop("train", {})}, **sections})

    with pytest.raises(ValueError, match=r"train.execution is 'gather'.*train.recompute"):
        config(train={"recompute": True})
    config(data={"isolate_documents": True})


def test_what_auto_means() -> None:
    gpu = torch.device("cuda")
    assert settings().form(gpu) == "gather"
    assert settings().compiled(gpu)
    assert settings().stream(gpu) is torch.bfloat16
    for other in (settings(deterministic=True), settings(recompute=True)):
        assert other.form(gpu) == "skip"
    assert not settings(deterministic=True).compiled(gpu)
    assert settings().form(CPU) == "skip"
    assert not settings().compiled(CPU)
    assert settings().stream(CPU) is None
    assert settings(precision="mixed").stream(gpu) is None


@every_family
@pytest.mark.parametrize("name", SUBNETWORKS)
def test_gradients_do_not_stay_where_the_next_micro_batch_is_written(
    name: str, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph writes to the same memory in every replay; here a program does."""
    run, memory = _Program.__call__, dict[_Program, list[Tensor]]()

    def replayed(program: _Program, batch: Batch, packed: Packed) -> tuple[Tensor, list[Tensor]]:
        loss, fresh = run(program, batch, packed)
        held = memory.setdefault(program, [torch.empty_like(gradient) for gradient in fresh])
        for mine, gradient in zip(held, fresh, strict=True):
            mine.copy_(gradient)
        return loss, held

    monkeypatch.setattr(_Program, "__call__", replayed)
    model = build(config=config)
    skip, gather = (make_execution(model, settings(execution=form, accumulate=2), CPU) for form in ("skip", "gather"))
    _, expected = gradients(model, skip, SUBNETWORKS[name], 2)
    _, found = gradients(model, gather, SUBNETWORKS[name], 2)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@on_gpu
@every_family
@pytest.mark.parametrize("micros", [1, 2])
def test_graphs_equal_skipping_on_a_gpu(micros: int, config: ModelConfig) -> None:
    gpu = torch.device("cuda")
    model = build(gpu, torch.float32, config)
    plain = {"precision": "float32", "compile": False, "accumulate": micros}
    skip = make_execution(model, settings(execution="skip", **plain), gpu)
    gather = make_execution(model, settings(execution="gather", **plain), gpu)
    for _ in range(3):
        for subnetwork in SUBNETWORKS.values():  # graphs of several kinds take turns in the same memory
            loss, expected = gradients(model, skip, subnetwork, micros)
            expected = {key: value.clone() for key, value in expected.items()}
            other, found = gradients(model, gather, subnetwork, micros)
            torch.testing.assert_close(other, loss)
            assert found.keys() == expected.keys()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@on_gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, from its compiler, as the next
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@every_family
def test_graphs_keep_documents_apart(config: ModelConfig) -> None:
    gpu, subnetwork = torch.device("cuda"), SUBNETWORKS["depth"]
    config = replace(config, head_size=16, positions=150)
    exact, model = build(config=config), build(gpu, torch.float32, config)
    run = make_execution(model, settings(execution="gather", precision="float32", compile=False), gpu)
    for seed in range(3):  # the first one is captured, the others are replayed with other documents
        generator = torch.Generator().manual_seed(seed)
        tokens, labels = (torch.randint(0, 50, (4, 150), generator=generator) for _ in range(2))
        starts = torch.rand(4, 150, generator=generator) < 0.02
        data = Batch(tokens, torch.arange(150).expand(4, -1).contiguous(), labels, starts.long().cumsum(1))
        results = []
        for one, form in ((exact, make_execution(exact, settings(), CPU)), (model, run)):
            one.zero_grad(set_to_none=True)
            loss = form.backward(data, subnetwork).cpu().double()
            results.append([loss, *(p.grad.cpu().double() for p in one.parameters() if p.grad is not None)])
        torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-3)


@on_gpu
@every_family
def test_dropout_in_a_graph_is_a_function_of_the_seed(config: ModelConfig) -> None:
    gpu, subnetwork = torch.device("cuda"), SUBNETWORKS["depth"]
    model = build(gpu, torch.float32, replace(config, dropout=0.2))
    run = make_execution(model, settings(execution="gather", precision="float32", compile=False), gpu)
    losses = []
    for seed in (1, 2, 1):  # the first one is captured, the last one only replayed
        torch.manual_seed(seed)
        losses.append(gradients(model, run, subnetwork, 1)[0].item())
    assert losses[0] == losses[2] != losses[1]


MULTIPLIED = [replace(config, residual_multiplier=0.3, norm_scaling=True) for config in (CONFIG, DECODER)]
NAMED = [(name, config) for config in (CONFIG, DECODER) for name in SUBNETWORKS]
NAMED += [("branches", config) for config in MULTIPLIED]
every_kind = pytest.mark.parametrize(
    ("name", "config"), NAMED, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=on_gpu)], ids=str)
@pytest.mark.parametrize("form", ["skip", "gather"])
@every_kind
def test_half_precision_stays_close_to_double(name: str, form: str, device: torch.device, config: ModelConfig) -> None:
    config, subnetwork = replace(config, width=64, head_size=16), SUBNETWORKS[name]
    exact = build(config=config)
    loss, expected = gradients(exact, make_execution(exact, settings(), CPU), subnetwork, 1)
    model = build(device, torch.float32, config)
    run = make_execution(model, settings(execution=form, precision="bfloat16"), device)
    for _ in range(2):
        found_loss, found = gradients(model, run, subnetwork, 1)
        assert abs(found_loss.item() - loss.item()) < 0.02
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            assert found[key].dtype == torch.float32
            assert (found[key].cpu() - gradient).norm() < 0.06 * gradient.norm() + 1e-4, key


@pytest.mark.skipif(
    torch.cuda.is_available() or not KERNELS, reason="needs Triton's interpreter, which a GPU turns off"
)
@every_kind
def test_models_stay_close_to_double_with_interpreted_kernels(
    name: str, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raptr.models.fused._half", lambda x: torch.is_autocast_enabled("cpu"))
    monkeypatch.setattr("raptr.models.kernels.SHORT", 0)  # the interpreter cannot multiply bfloat16
    monkeypatch.setattr(import_module("raptr.models.kernels.residual_mlp"), "WARPS", 16)  # programs one by one
    test_half_precision_stays_close_to_double(name, "skip", CPU, config)


@pytest.mark.parametrize("name", SUBNETWORKS)
def test_warming_up_works_in_half_precision(name: str) -> None:
    model, subnetwork = build(dtype=torch.float32), SUBNETWORKS[name]  # some have layers of different sizes
    gather = make_execution(model, settings(execution="gather", precision="bfloat16"), CPU)
    assert isinstance(gather, Gather)
    program = gather._program(batch(), subnetwork)
    assert isinstance(program, execution._Program)
    loss, _ = gradients(model, gather, subnetwork, 1)
    program.warm_up(batch(), pack(subnetwork))
    again, _ = gradients(model, gather, subnetwork, 1)
    assert torch.equal(again, loss)
