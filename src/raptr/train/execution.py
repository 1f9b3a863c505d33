"""How a step's forward and backward pass run on the device: in forms that give the same up to rounding.

`skip` calls the layers that run, one after the other, and leaves the others out. `gather` copies the weights of the
k layers that run into k slots and runs those, so that every subset of one size is one and the same chain of
operations: on a GPU it is captured once as a CUDA graph and replayed, and a step no longer waits for Python to
launch its kernels. The gradients of the slots are the gradients of the layers (slots.py). `shared`, the paper's own
form, makes the k layers by linear combinations of all.

Where not all heads or MLP parts run, blocks choose their weights by index, so that the matrix products are as small as
what runs. Slots do it too, inside the graph: they hold whole layers, whatever runs of them.

The way through the layers is the model's own (models/model.py); here it is compiled, recomputed and captured.

The order of wrapping, from the inside: a block, compiled by itself (never the whole model: each subset would be
another graph); the gathering of its weights, where they lie on several processes; the recomputation of activations
around it; the CUDA graph around everything.

Compiled code is the same for all steps of a stage: a scale that any running layer has is handed to all of them. All
blocks share one compiled code, in every model of the process.
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

WARM_UP = 2  # runs of each block before a graph is captured: compilation, and what libraries set up on first use
VERSIONS = 64  # of a compiled block at most: one for each kind of subnetwork in a plan (torch's own limit is 8)


class Execution(ABC):
    """Runs the forward and the backward pass of micro-batches."""

    @abstractmethod
    def backward(self, batch: Batch, subnetwork: Subnetwork) -> Tensor:
        """Add the gradients of a micro-batch's share of the loss to the parameters; returns that share."""


def build_model(dimensions: ModelConfig, settings: TrainSettings, device: torch.device, processes: Processes) -> Model:
    """The model with its initial weights; where they lie on several processes, each makes its own part only.

    For `gather` and `shared` every process has plain weights: a graph of all kernels can send nothing, and a sum over
    all layers needs all of them.
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
    """Give a model the weights that `load` writes into a whole one; on a mesh, each process keeps its part."""
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
    """The form that the settings ask for; `sharded`: no process has the whole of the weights.

    `groups` is the number of groups of layers from which a method draws equally many.
    """
    forward = _Forward(model, settings, device)
    forward.compile(*model.ends(), *model.blocks)
    form = settings.form(device, sharded=sharded)
    if form == "shared":
        return Shared(forward, groups)
    return Gather(forward) if form == "gather" else Skip(forward)


@final
class _Forward:
    """The loss of a micro-batch, with the precision and the recomputation that are asked for."""

    def __init__(self, model: Model, settings: TrainSettings, device: torch.device) -> None:
        self.model, self.device, self.settings = model, device, settings
        self.stream, self.dtype = settings.stream(device), next(model.parameters()).dtype

    def compile(self, *modules: nn.Module) -> None:
        """Compile each module by itself, if that is asked for."""
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
        """The subnetwork's numbers for this model, on the CPU."""
        return pack(subnetwork, self.dtype, self.model.config)


@final
class Skip(Execution):
    """The layers that run, called one after the other."""

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
    """The paper's own form: k layers whose weights are linear combinations of all layers', or of their group's.

    Coefficients are 1 for the layer that runs in a place and 0 for the others, so losses and gradients are those of
    `skip`; what it costs more are the products of coefficients and weights. It is here to be measured.
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
            blocks[layer].zero_grad()  # zeros; the idle policy says what becomes of them
        return loss.detach()

    def _combined(self, subnetwork: Subnetwork) -> list[dict[str, Tensor]]:
        """The weights of each place, by name."""
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
    """A block, run with other weights than its own."""
    result: Tensor = functional_call(block, weights, given)
    return result


@final
class Gather(Execution):
    """The layers that run, copied into slots; one CUDA graph for each kind of subnetwork."""

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
            with torch.no_grad():  # a list of one precision is copied by one kernel
                torch._foreach_copy_(program.parameters.matrices, matrices)
                torch._foreach_copy_(program.parameters.vectors, vectors)
        loss, gradients = program(batch, self._forward.pack(subnetwork))
        alone = self._forward.settings.accumulate == 1
        for parameter, gradient in zip([*self._shared, *matrices, *vectors], gradients, strict=True):
            if parameter.grad is not None:
                assert not alone  # it would be the memory that this gradient was written to
                parameter.grad += gradient
            else:
                parameter.grad = gradient if alone else gradient.clone()  # the next call writes over it
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
        except RuntimeError:  # out of memory, or what the end of a capture makes of it
            if not self._programs:
                raise
        # Graphs of earlier stages hold memory that nothing else can use; what was tried is let go of by now.
        self._programs.clear()
        self._memory = None
        torch.cuda.empty_cache()
        self._memory = _GraphMemory(self._forward.device)
        return _Graph(program, batch, packed, self._memory)


@final
class _Program:
    """The forward and backward pass through given blocks, for subnetworks of one signature.

    Where the blocks' matrices are in half precision, their gradients are copied into the tensors `float32`.
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
        """The loss and the gradients: of the shared parameters, the blocks' matrices, their vectors."""
        return self._run(batch, self._blocks, list(unpack(packed, self._sign)), self.parameters)

    def warm_up(self, batch: Batch, packed: Packed) -> None:
        """Compile, load and set up all that a call needs, in little memory: one block at a time."""
        inputs = list(unpack(packed, self._sign))
        alone = [slice(place, place + 1) for place in range(len(inputs))] or [slice(0)]
        for here in WARM_UP * alone:
            self._run(batch, self._blocks[here], inputs[here], parameters_of(self._blocks[here]))

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
    """What an execution's graphs share, as only one runs at a time: memory, and the stream that they are made on."""

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@final
class _Graph:
    """A program captured as a CUDA graph; its inputs are copied to where it reads them."""

    def __init__(self, program: _Program, batch: Batch, packed: Packed, memory: _GraphMemory) -> None:
        device, self.parameters = program.forward.device, program.parameters
        self._batch, self._packed = batch.to(device), packed.to(device)
        random = torch.cuda.get_rng_state(device)  # the first replay draws what any other would
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
        """The loss and the gradients, which the next call writes over."""
        refill(self._batch, batch)
        refill(self._packed, packed)
        self._graph.replay()
        return self._loss.clone(), self._gradients
