"""The steps of one fine-tuning, with nothing in them that waits for the GPU.

A step of a small model is hundreds of small kernels, and launching them one by one takes longer than running them. So
on a GPU a whole step (the batch cut from the table, both passes, clipping, AdamW) is captured once for each shape of
batches and replayed. The weights are bfloat16 copies of float32 ones, which AdamW updates: with autocast a third of
the kernels would convert weights and gradients, one tensor at a time.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from raptr.evaluation.coding import Coded
from raptr.train.capture import captured

WARM_UP = 3  # steps of a shape before it is captured: libraries and the optimizer set things up in them

Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]  # makes the call that replays another call


@final
class Steps:
    """AdamW on a model, one batch of examples at a time.

    `capture` is how a step becomes a replay: a CUDA graph on a GPU, None to run each step as it is. With `half` the
    model computes in bfloat16, unless it cannot: `precision` says which it is.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Coded,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        weight_decay: float,
        clip: float,
        half: bool,
        capture: Capture | None,
    ) -> None:
        self._model, self._examples, self._criterion = model, examples, loss
        self._clip, self._capture = clip, capture
        self._weights: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [weight.detach().clone() for weight in self._weights]
        self._gradients = [torch.zeros_like(master) for master in self._masters]
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient
        device = examples.targets_N.device
        first = examples.batch(torch.zeros(1, dtype=torch.long, device=device), int(examples.lengths_N[0]))
        self.precision = "bfloat16" if half and _halved(model, first) else "float32"
        self._rate = torch.zeros((), device=device)
        groups = [
            {"params": [one for one in self._masters if one.ndim > 1], "weight_decay": weight_decay},
            {"params": [one for one in self._masters if one.ndim <= 1], "weight_decay": 0.0},
        ]
        on_gpu = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(groups, lr=self._rate, eps=1e-6, fused=True, capturable=on_gpu)
        self._count, self._first_bad = (torch.full((), value, device=device) for value in (0, -1))
        self._loss = torch.zeros((), device=device)
        self._seen: Counter[tuple[int, int]] = Counter()
        self._replays: dict[tuple[int, int], tuple[Tensor, Callable[[], None]]] = {}

    def __call__(self, places_B: Tensor, width: int, rate: float) -> None:
        """Do a step on these examples at this learning rate."""
        self._rate.fill_(rate)
        key = (len(places_B), width)
        self._seen[key] += 1
        if self._capture is not None and key not in self._replays and self._seen[key] > WARM_UP:
            own_B = places_B.clone()
            try:
                self._replays[key] = (own_B, self._capture(lambda: self._step(own_B, width)))
            except RuntimeError:  # a model that looks at its inputs, or no memory for another graph
                self._capture = None
        if key in self._replays:
            own_B, replay = self._replays[key]
            own_B.copy_(places_B)
            replay()
        else:
            self._step(places_B, width)

    @property
    def captured(self) -> int:
        """How many shapes of batches are replayed."""
        return len(self._replays)

    def diverged(self) -> int | None:
        """The first step whose loss or gradient was not finite; waits for the GPU."""
        first = int(self._first_bad)
        return None if first < 0 else first

    @property
    def loss(self) -> float:
        """That of the last batch; waits for the GPU."""
        return float(self._loss)

    def _step(self, places_B: Tensor, width: int) -> None:
        outputs_BC = scores(self._model, self._examples.batch(places_B, width))
        loss = self._criterion(outputs_BC, self._examples.targets_N.index_select(0, places_B))
        gradients = torch.autograd.grad(loss, self._weights, materialize_grads=True)
        torch._foreach_copy_(self._gradients, gradients)
        norm = nn.utils.clip_grad_norm_(self._masters, self._clip)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)
            bad = ~(loss.isfinite() & norm.isfinite()) & (self._first_bad < 0)
            self._first_bad.copy_(torch.where(bad, self._count, self._first_bad))
            self._count += 1
            self._loss.copy_(loss)


def _halved(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Give a model bfloat16 weights, if it can compute with them: a batch is tried, without dropout.

    FNet cannot, for one: there is no bfloat16 Fourier transform.
    """
    training, parameters = model.training, list(model.parameters())
    before = [parameter.data for parameter in parameters]
    for parameter in parameters:  # those that are not trained, too: layers mix no precisions
        parameter.data = parameter.data.bfloat16()
    model.eval()
    try:
        with torch.no_grad():
            scores(model, batch)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        for parameter, data in zip(parameters, before, strict=True):
            parameter.data = data
        return False
    finally:
        model.train(training)
    return True


def scores(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """What a classifier gives for each example, in float32."""
    outputs: Tensor = model(**batch).logits
    return outputs.float()


@contextmanager
def on_stream(device: torch.device) -> Iterator[Capture | None]:
    """Run on a stream on which steps can be captured as CUDA graphs; gives how, or None where there is no GPU.

    The graphs share their memory, as only one runs at a time.
    """
    if device.type != "cuda":
        yield None
        return
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with captured(graph, pool, stream):  # this does not run the step
            step()
        return graph.replay

    with torch.cuda.stream(stream):
        yield capture
    torch.cuda.current_stream(device).wait_stream(stream)
