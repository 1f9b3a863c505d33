"""How a step's forward and backward pass run on the device, in three forms that are equal up to rounding.

`skip` calls the running layers one after the other. `gather` copies the weights of the k running layers into k slots
and runs those, so that every subset of k layers is the same chain of operations: on a GPU it is captured once as a CUDA
graph and replayed, and a step no longer waits for Python to launch its kernels. The gradients of the slots are handed
to the layers (slots.py). `shared`, the paper's own form, computes k layers as linear combinations of all layers.

If only some heads or MLP parts run, blocks select their weights by index, so that the matrix products are only as large
as what runs. Slots do this too, inside the graph: a slot always holds a whole layer.

The pass through the layers belongs to the model (models/model.py); here it is compiled, recomputed and captured.

The order of wrapping, from the inside: a block, compiled by itself (never the whole model: each subset would be
another graph); the all-gather of its weights, if they are sharded; the recomputation of activations around it; the
CUDA graph around everything.

All steps of a stage run the same compiled code: a scale that any running layer has is passed to all of them. All blocks
share this code, in every model of the process.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from raptr.data.batch import Batch, refill
from raptr.distributed.processes import Processes
from raptr.distributed.sharding import is_sharded, part, rows, shard
from raptr.models.contract import ModelConfig
from raptr.models.inputs import BlockInputs, Inputs, Packed, Signature, pack, signature, unpack
from raptr.models.model import Model
from raptr.subnetworks import Subnetwork
from raptr.train.capture import captured
from raptr.train.config import TrainSettings
from raptr.train.slots import Parameters, Slots, parameters_of

WARM_UP = 2  # runs of each block before a graph is captured, for compilation and for what libraries set up on first use
VERSIONS = 64  # the most versions of a compiled block: one for each kind of subnetwork in a plan (torch's limit is 8)


class Execution(ABC):
    """Runs the forward and the backward pass of micro-batches."""

    @abstractmethod
    def backward(self, batch: Batch, subnetwork: Subnetwork) -> Tensor:
        """Add the gradients of a micro-batch's share of the loss to the parameters; return that share."""


def build_model(dimensions: ModelConfig, settings: TrainSettings, device: torch.device, processes: Processes) -> Model:
    """Return the model with its initial weights; on a mesh of processes, each makes only its own shard.

    Under `gather` and `shared` every process has plain weights instead: a CUDA graph of the whole pass cannot
    communicate, and a linear combination of all layers needs all of them.
    """
    seed, mesh = settings.seed, processes.mesh
    if mesh is None or settings.form(device, sharded=processes.sharded) != "skip":
        return dimensions.build(seed).to(device)
    with torch.device("meta"):
        model = dimensions.build(seed)
    assert not list(model.buffers()), "to_empty would leave them without values"
    shard(model, model.blocks, mesh, "losses", reduce=settings.reduced)
    model.to_empty(device=device)
    model.initialise(seed)
    return model


def fill_whole(model: Model, load: Callable[[Model], None]) -> None:
    """Give a model the weights that `load` writes into an unsharded model; on a mesh, each process keeps its shard."""
    if not is_sharded(next(model.parameters())):
        load(model)
        return
    with torch.device("cpu"):
        whole = model.config.build(0)
    load(whole)
    with torch.no_grad():
        for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
            rows(mine).copy_(part(other, mine))


def make_execution(
    model: Model, settings: TrainSettings, device: torch.device, *, sharded: bool = False, groups: int = 1
) -> Execution:
    """Return the form of execution that the settings ask for; `sharded` says that no process has all of the weights.

    `groups` is the number of groups of layers, from each of which a method draws the same number.
    """
    forward = _Forward(model, settings, device)
    forward.compile(*model.ends(), *model.blocks)
    form = settings.form(device, sharded=sharded)
    if form == "shared":
        return Shared(forward, groups)
    return Gather(forward) if form == "gather" else Skip(forward)


@final
class _Forward:
    """Computes the loss of a micro-batch, with the precision and the recomputation that the settings ask for."""

    def __init__(self, model: Model, settings: TrainSettings, device: torch.device) -> None:
        self.model, self.device, self.settings = model, device, settings
        self.stream, self.dtype = settings.stream(device), next(model.parameters()).dtype

    def compile(self, *modules: nn.Module) -> None:
        """Compile each module by itself, if the settings ask for it."""
        if self.settings.compiled(self.device):
            torch._dynamo.config.recompile_limit = max(VERSIONS, torch._dynamo.config.recompile_limit)
            for module in modules:
                module.compile(fullgraph=True, dynamic=False)

    def __call__(self, batch: Batch, blocks: Sequence[Callable[..., Tensor]], given: Sequence[BlockInputs]) -> Tensor:
        inputs = Inputs(tuple(range(len(given))), given, self.stream)
        run: list[Callable[..., Tensor]] = list(blocks)
        if self.settings.recompute:
            run = [partial(checkpoint, block, use_reentrant=False) for block in run]
        with self.settings.autocast(self.device):
            loss: Tensor = self.model(batch, inputs, run)
        return loss / self.settings.accumulate

    def pack(self, subnetwork: Subnetwork) -> Packed:
        """Return the subnetwork as tensors on the CPU, in this model's precision."""
        return pack(subnetwork, self.dtype, self.model.config)


@final
class Skip(Execution):
    """Calls the running layers one after the other."""

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward

    def backward(self, batch: Batch, subnetwork: Subnetwork) -> Tensor:
        forward = self._forward
        blocks = [forward.model.blocks[layer] for layer in subnetwork.kept]
        loss = forward(batch.to(forward.device), blocks, forward.model.inputs(subnetwork).blocks)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


@final
class Shared(Execution):
    """The paper's own form: k layers whose weights are linear combinations of those of all layers, or of their group.

    The coefficients are 1 for the layer that runs in a place and 0 for all others, so losses and gradients equal those
    of `skip`. The extra cost is the product of coefficients and weights. This form is kept to be measured.
    """

    def __init__(self, forward: _Forward, groups: int) -> None:
        self._forward, self._groups = forward, groups
        with torch.device("meta"):
            self._form = forward.model.new_block().train(forward.model.training)

    def backward(self, batch: Batch, subnetwork: Subnetwork) -> Tensor:
        forward, blocks = self._forward, self._forward.model.blocks
        shared = self._combined(subnetwork)
        run = [partial(_called_with, self._form, weights) for weights in shared]
        loss = forward(batch.to(forward.device), run, forward.model.inputs(subnetwork).blocks)
        loss.backward()  # type: ignore[no-untyped-call]
        for layer in set(range(subnetwork.layers)) - set(subnetwork.kept):
            blocks[layer].zero_grad()  # drop these zeros: the idle policy decides what idle layers get
        return loss.detach()

    def _combined(self, subnetwork: Subnetwork) -> list[dict[str, Tensor]]:
        """Return the weights of each of the k places, by name."""
        layers, kept = subnetwork.layers, subnetwork.kept
        groups = self._groups if layers % self._groups == 0 and len(kept) % self._groups == 0 else 1
        members, places = layers // groups, len(kept) // groups
        result: list[dict[str, Tensor]] = [{} for _ in kept]
        every = [dict(block.named_parameters()) for block in self._forward.model.blocks]
        for name, like in every[0].items():
            for group in range(groups):
                first = group * members
                running = kept[group * places : (group + 1) * places]
                assert all(first <= layer < first + members for layer in running), "a layer runs outside its group"
                chosen = torch.tensor([layer - first for layer in running], dtype=torch.int64, device=like.device)
                coefficients_KL = F.one_hot(chosen, members).to(like.dtype)
                stacked = torch.stack([every[layer][name] for layer in range(first, first + members)])
                combined = (coefficients_KL @ stacked.flatten(1)).view(len(running), *like.shape)
                for place, weight in enumerate(combined, start=group * places):
                    result[place][name] = weight
        return result


def _called_with(block: nn.Module, weights: dict[str, Tensor], *given: Any) -> Tensor:
    """Call a block with these weights instead of its own."""
    result: Tensor = functional_call(block, weights, given)
    return result


@final
class Gather(Execution):
    """Runs copies of the running layers in slots; on a GPU, one CUDA graph for each kind of subnetwork."""

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward
        half = forward.settings.half(forward.device)
        self._slots = Slots(forward.model, forward.device, half=half, ready=forward.compile)
        self._programs: dict[object, _Program | _Graph] = {}
        self._memory: _GraphMemory | None = None
        inside = {id(parameter) for parameter in forward.model.blocks.parameters()}
        self._shared = [p for p in forward.model.parameters() if id(p) not in inside]
        self._layers = [parameters_of([block]) for block in forward.model.blocks]
        assert all(parameter.requires_grad for parameter in forward.model.parameters())

    def backward(self, batch: Batch, subnetwork: Subnetwork) -> Tensor:
        matrices = [matrix for layer in subnetwork.kept for matrix in self._layers[layer].matrices]
        vectors = [vector for layer in subnetwork.kept for vector in self._layers[layer].vectors]
        program = self._program(batch, subnetwork)
        if 0 < subnetwork.size < subnetwork.layers:
            with torch.no_grad():  # one kernel copies a whole list, if all of it has one precision
                torch._foreach_copy_(program.parameters.matrices, matrices)
                torch._foreach_copy_(program.parameters.vectors, vectors)
        loss, gradients = program(batch, self._forward.pack(subnetwork))
        alone = self._forward.settings.accumulate == 1
        for parameter, gradient in zip([*self._shared, *matrices, *vectors], gradients, strict=True):
            if parameter.grad is not None:
                assert not alone  # otherwise both would be the same memory
                parameter.grad += gradient
            else:
                parameter.grad = gradient if alone else gradient.clone()  # the next call overwrites it
        return loss

    def _program(self, batch: Batch, subnetwork: Subnetwork) -> "_Program | _Graph":
        sign = signature(subnetwork, self._forward.model.config)
        key = (sign, tuple(None if tensor is None else tensor.shape for tensor in batch))
        if key not in self._programs:
            if subnetwork.size < subnetwork.layers:
                slots = self._slots.first(subnetwork.size)
                float32 = [gradient for slot in slots for gradient in slot.gradients]
                program = _Program(self._forward, sign, [slot.block for slot in slots], self._shared, float32)
            else:
                program = _Program(self._forward, sign, list(self._forward.model.blocks), self._shared, [])
            on_gpu = self._forward.device.type == "cuda"
            self._programs[key] = self._captured(program, batch, subnetwork) if on_gpu else program
        return self._programs[key]

    def _captured(self, program: "_Program", batch: Batch, subnetwork: Subnetwork) -> "_Graph":
        packed = self._forward.pack(subnetwork)
        self._memory = self._memory or _GraphMemory(self._forward.device)
        try:
            return _Graph(program, batch, packed, self._memory)
        except RuntimeError:  # out of memory, or the error that a capture raises because of it
            if not self._programs:
                raise
        # Graphs of earlier stages hold memory that nothing else can use; the failed attempt has released its own.
        self._programs.clear()
        self._memory = None
        torch.cuda.empty_cache()
        self._memory = _GraphMemory(self._forward.device)
        return _Graph(program, batch, packed, self._memory)


@final
class _Program:
    """The forward and backward pass through some blocks, for subnetworks of one signature.

    If the blocks' matrices are in half precision, their gradients are copied into the tensors `float32`.
    """

    def __init__(
        self,
        forward: _Forward,
        sign: Signature,
        blocks: Sequence[nn.Module],
        shared: Sequence[Tensor],
        float32: Sequence[Tensor],
    ) -> None:
        self.forward, self.parameters = forward, parameters_of(blocks)
        self._sign, self._blocks, self._shared, self._float32 = sign, blocks, shared, list(float32)

    def __call__(self, batch: Batch, packed: Packed) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the gradients: for parameters outside blocks, then the blocks' matrices and vectors."""
        return self._run(batch, self._blocks, list(unpack(packed, self._sign)), self.parameters)

    def warm_up(self, batch: Batch, packed: Packed) -> None:
        """Compile, load and set up all that a call needs, one block at a time to use little memory."""
        inputs = list(unpack(packed, self._sign))
        single_blocks = [slice(place, place + 1) for place in range(len(inputs))] or [slice(0)]
        for block in WARM_UP * single_blocks:
            self._run(batch, self._blocks[block], inputs[block], parameters_of(self._blocks[block]))

    def _run(
        self, batch: Batch, blocks: Sequence[nn.Module], given: Sequence[BlockInputs], parameters: Parameters
    ) -> tuple[Tensor, list[Tensor]]:
        loss = self.forward(batch, blocks, given)
        matrices, vectors = parameters
        gradients = list(torch.autograd.grad(loss, [*self._shared, *matrices, *vectors]))
        if self._float32:
            first, count = len(self._shared), len(matrices)
            torch._foreach_copy_(self._float32[:count], gradients[first : first + count])
            gradients[first : first + count] = self._float32[:count]
        return loss.detach(), gradients


@final
class _GraphMemory:
    """The memory that an execution's graphs share, as only one runs at a time, and the stream that captures them."""

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@final
class _Graph:
    """A program captured as a CUDA graph; inputs are copied into the memory that the graph reads."""

    def __init__(self, program: _Program, batch: Batch, packed: Packed, memory: _GraphMemory) -> None:
        device, self.parameters = program.forward.device, program.parameters
        self._batch, self._packed = batch.to(device), packed.to(device)
        random = torch.cuda.get_rng_state(device)  # restored below: a capture must not change what dropout draws
        try:
            memory.stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(memory.stream):
                program.warm_up(self._batch, self._packed)
            torch.cuda.current_stream(device).wait_stream(memory.stream)
            self._graph = torch.cuda.CUDAGraph()
            with captured(self._graph, memory.pool, memory.stream):
                self._loss, self._gradients = program(self._batch, self._packed)
        finally:
            torch.cuda.set_rng_state(random, device)

    def __call__(self, batch: Batch, packed: Packed) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the gradients; the next call overwrites the gradients."""
        refill(self._batch, batch)
        refill(self._packed, packed)
        self._graph.replay()
        return self._loss.clone(), self._gradients
