"""How a step's forward and backward pass run on the device: the same numbers, in two forms.

`skip` calls the layers that run, one after the other, and leaves the others out. `gather` copies the weights of the
k layers that run into k slots and runs those, so that every subset of one size is one and the same chain of
operations: on a GPU it is captured once as a CUDA graph and replayed, and a step no longer waits for Python to
launch its kernels. The gradients of the slots are the gradients of the layers.

The order of wrapping, from the inside: a block, compiled by itself (never the whole model: each subset would be
another graph); the recomputation of activations around it; the CUDA graph around everything.

Compiled code is the same for all steps of a stage: a scale that any running layer has is handed to all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raptr.data.batch import Batch, refill, uploaded
from raptr.models.attention import make_segments
from raptr.models.bert import Bert, Block
from raptr.models.inputs import BlockInputs, Packed, Signature, pack, signature, unpack
from raptr.subnetworks import Subnetwork
from raptr.train.config import TrainSettings

WARM_UP = 2  # runs before a graph is captured: compilation, and what libraries set up on first use
VERSIONS = 64  # of a compiled block at most: one for each kind of subnetwork in a plan (torch's own limit is 8)


PIECES: tuple[Callable[..., Any], ...] = (Bert.embed, Block.forward, Bert.loss)


class Execution(ABC):
    """Runs the forward and the backward pass of micro-batches."""

    @abstractmethod
    def backward(self, batch: Batch, subnetwork: Subnetwork) -> Tensor:
        """Add the gradients of a micro-batch's share of the loss to the parameters; returns that share."""


def make_execution(model: Bert, settings: TrainSettings, device: torch.device, *, segments: bool = False) -> Execution:
    """The form that the settings ask for; `segments`: attention stays inside documents."""
    model.stream = settings.stream(device)
    forward = _Forward(model, settings, device)
    return Gather(forward) if settings.form(device, segments) == "gather" else Skip(forward)


@cache
def _compiled() -> tuple[Callable[..., Any], ...]:
    """The pieces compiled, once for all models of the process."""
    torch._dynamo.config.recompile_limit = max(VERSIONS, torch._dynamo.config.recompile_limit)
    return tuple(torch.compile(piece, fullgraph=True, dynamic=False) for piece in PIECES)


@final
class _Forward:
    """The loss of a batch through given blocks, compiled piece by piece where that is asked for."""

    def __init__(self, model: Bert, settings: TrainSettings, device: torch.device) -> None:
        self.model, self.device, self.settings = model, device, settings
        self._embed, self._block, self._loss = _compiled() if settings.compiled(device) else PIECES

    def __call__(self, batch: Batch, blocks: Iterable[nn.Module], inputs: Iterable[BlockInputs]) -> Tensor:
        with self.settings.autocast(self.device):
            x_BSD, segments = self._embed(self.model, batch.tokens_BS), make_segments(batch.segments_BS)
            for block, given in zip(blocks, inputs, strict=True):
                if self.settings.recompute:
                    x_BSD = checkpoint(self._block, block, x_BSD, given, segments, use_reentrant=False)
                else:
                    x_BSD = self._block(block, x_BSD, given, segments)
            loss: Tensor = self._loss(self.model, x_BSD, batch.positions_BM, batch.labels_BM)
        return loss / self.settings.accumulate

    def pack(self, subnetwork: Subnetwork) -> Packed:
        """The subnetwork's numbers for this model, on the CPU."""
        return pack(subnetwork, self.model.head_bias.dtype)


@final
class Skip(Execution):
    """The layers that run, called one after the other."""

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward

    def backward(self, batch: Batch, subnetwork: Subnetwork) -> Tensor:
        """Add the gradients of a micro-batch's share of the loss to the parameters; returns that share."""
        forward = self._forward
        packed = Packed(*uploaded(forward.pack(subnetwork), forward.device))  # type: ignore[arg-type]
        blocks = [forward.model.blocks[layer] for layer in subnetwork.kept]
        loss = forward(batch.to(forward.device), blocks, unpack(packed, signature(subnetwork)))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


@final
class Gather(Execution):
    """The layers that run, copied into slots; one CUDA graph for each kind of subnetwork."""

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward
        self._slots: list[Block] = []
        self._programs: dict[object, _Program | _Graph] = {}
        self._pool: Any = None  # of the graphs' memory: only one of them runs at a time
        inside = {id(parameter) for parameter in forward.model.blocks.parameters()}
        self._shared = [p for p in forward.model.parameters() if id(p) not in inside]
        self._layers = [list(block.parameters()) for block in forward.model.blocks]

    def backward(self, batch: Batch, subnetwork: Subnetwork) -> Tensor:
        """Add the gradients of a micro-batch's share of the loss to the parameters; returns that share."""
        chosen = [parameter for layer in subnetwork.kept for parameter in self._layers[layer]]
        blocks: Sequence[nn.Module] = list(self._forward.model.blocks)
        if subnetwork.size < subnetwork.layers:
            blocks = self._filled(subnetwork.size, chosen)
        loss, gradients = self._program(batch, subnetwork, blocks)(batch, self._forward.pack(subnetwork))
        for parameter, gradient in zip([*self._shared, *chosen], gradients, strict=True):
            if parameter.grad is not None:
                parameter.grad += gradient
            else:  # a graph writes over its gradients when it is replayed
                parameter.grad = gradient if self._forward.settings.accumulate == 1 else gradient.clone()
        return loss

    def _filled(self, size: int, chosen: Sequence[Tensor]) -> list[Block]:
        """The first `size` slots, holding the chosen layers' weights."""
        model = self._forward.model
        while len(self._slots) < size:
            with torch.device("meta"):
                slot = Block(model.config)
            self._slots.append(self._cast(slot.to_empty(device=self._forward.device)))
        slots = self._slots[:size]
        pairs = list(zip((p for slot in slots for p in slot.parameters()), chosen, strict=True))
        with torch.no_grad():
            for matrices in (True, False):  # a list of one precision is copied by one kernel
                mine, theirs = zip(*(pair for pair in pairs if (pair[0].ndim >= 2) == matrices), strict=True)
                torch._foreach_copy_(mine, theirs)
        return slots

    def _cast(self, slot: Block) -> Block:
        """Matrices in the precision of their products: copying them is then the rounding that a layer does anyway."""
        half = self._forward.settings.half(self._forward.device)
        for parameter in slot.parameters():
            matrix = half and parameter.ndim >= 2
            parameter.data = parameter.data.to(torch.bfloat16 if matrix else self._forward.model.head_bias.dtype)
        return slot

    def _program(self, batch: Batch, subnetwork: Subnetwork, blocks: Sequence[nn.Module]) -> "_Program | _Graph":
        sign = signature(subnetwork)
        key = (sign, tuple(None if tensor is None else tensor.shape for tensor in batch))
        if key not in self._programs:
            parameters = [*self._shared, *(p for block in blocks for p in block.parameters())]
            program = _Program(self._forward, sign, blocks, parameters)
            on_gpu = self._forward.device.type == "cuda"
            if on_gpu and self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            self._programs[key] = (
                _Graph(program, batch, self._forward.pack(subnetwork), self._pool) if on_gpu else program
            )
        return self._programs[key]


@final
class _Program:
    """The forward and backward pass through given blocks, for subnetworks of one signature."""

    def __init__(self, forward: _Forward, sign: Signature, blocks: Sequence[nn.Module], parameters: Sequence[Tensor]):
        self.forward, self._sign, self._blocks, self._parameters = forward, sign, blocks, parameters

    def __call__(self, batch: Batch, packed: Packed) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss and the gradients of the parameters."""
        loss = self.forward(batch, self._blocks, unpack(packed, self._sign))
        gradients = torch.autograd.grad(loss, list(self._parameters))
        wide = self.forward.model.head_bias.dtype
        return loss.detach(), tuple(gradient.to(wide) for gradient in gradients)


@final
class _Graph:
    """A program captured as a CUDA graph; its inputs are copied to where it reads them."""

    def __init__(self, program: _Program, batch: Batch, packed: Packed, pool: Any) -> None:
        device = program.forward.device
        self._batch = batch.to(device)
        self._packed = Packed(*uploaded(packed, device))  # type: ignore[arg-type]
        random = torch.cuda.get_rng_state(device)  # the first replay draws what any other would
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                program(self._batch, self._packed)
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._loss, self._gradients = program(self._batch, self._packed)
        torch.cuda.set_rng_state(random, device)

    def __call__(self, batch: Batch, packed: Packed) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss and the gradients of the parameters, which the next call writes over."""
        refill(self._batch, batch)
        refill(self._packed, packed)
        self._graph.replay()
        return self._loss.clone(), self._gradients
