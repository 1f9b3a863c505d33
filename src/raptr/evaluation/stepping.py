"""Steps of fine-tuning that never wait for the GPU.

A step of a small model is hundreds of small kernels, and launching them one by one takes longer than running them. So
on a GPU a whole step (cutting the batch from the table, forward and backward pass, clipping, AdamW) is captured once
for each shape of batches and replayed. AdamW updates float32 weights, of which the model's weights are bfloat16 copies:
with autocast a third of the kernels would convert weights and gradients, one tensor at a time.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from raptr.evaluation.coding import Coded
from raptr.train.capture import captured

WARM_UP = 3  # steps of a shape before it is captured, in which libraries and the optimizer set things up

Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]  # turns a call into one that replays it


@final
class Steps:
    """AdamW on one model, or on several that were joined, with one batch of examples for each at a time.

    `loss` gives the loss of each example. `capture` turns a step into its replay: a CUDA graph on a GPU, or None to run
    each step eagerly; `say` is told the reason if a capture fails. With `half` the model computes in bfloat16 if it
    can; `precision` says whether it does.
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
        joined: int = 1,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._model, self._examples, self._criterion, self._say = model, examples, loss, say
        self._clip, self._capture, self._joined = clip, capture, joined
        self._weights: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [weight.detach().clone() for weight in self._weights]
        self._gradients = [torch.zeros_like(master) for master in self._masters]
        self._each = _of_each(self._masters, joined)
        for masters, gradients in zip(self._each, _of_each(self._gradients, joined), strict=True):
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient
        device = examples.targets_N.device
        first = examples.batch(torch.zeros(joined, dtype=torch.long, device=device), int(examples.lengths_N[0]))
        self.precision = "bfloat16" if half and _halved(model, first) else "float32"
        self._rates_K = torch.zeros(joined, device=device)
        groups = [
            {"params": [one for one in masters if (one.ndim > 1) == matrices], "weight_decay": decay, "lr": rate}
            for masters, rate in zip(self._each, self._rates_K.unbind(), strict=True)
            for matrices, decay in ((True, weight_decay), (False, 0.0))
        ]
        self._optimizer = torch.optim.AdamW(groups, eps=1e-6, fused=True, capturable=device.type == "cuda")
        self._count = torch.zeros((), dtype=torch.long, device=device)
        self._first_bad_K = torch.full((joined,), -1, device=device)
        self._losses_K = torch.zeros(joined, device=device)
        self._seen: Counter[tuple[int, int]] = Counter()
        self._replays: dict[tuple[int, int], tuple[Tensor, Callable[[], None]]] = {}

    def __call__(self, places_KB: Tensor, width: int, rates_K: Tensor) -> None:
        """Run a step on these examples, the first model's first, at each model's learning rate."""
        self._rates_K.copy_(rates_K)
        key = (len(places_KB), width)
        self._seen[key] += 1
        if self._capture is not None and key not in self._replays and self._seen[key] > WARM_UP:
            own_KB = places_KB.clone()
            try:
                self._replays[key] = (own_KB, self._capture(lambda: self._step(own_KB, width)))
            except RuntimeError as error:  # a model that reads its inputs back, or no memory for another graph
                if isinstance(error, torch.OutOfMemoryError) and self._joined > 1:
                    raise  # fewer models at once may fit
                self._capture = None
                self._say(f"steps are not replayed as CUDA graphs: {str(error).strip().splitlines()[0]}")
        if key in self._replays:
            own_KB, replay = self._replays[key]
            own_KB.copy_(places_KB)
            replay()
        else:
            self._step(places_KB, width)

    @property
    def captured(self) -> int:
        """The number of batch shapes that are replayed."""
        return len(self._replays)

    def diverged(self) -> list[int | None]:
        """Return each model's first step whose loss or gradient was not finite, or None; waits for the GPU."""
        return [None if first < 0 else first for first in self._first_bad_K.tolist()]

    @property
    def losses(self) -> list[float]:
        """Each model's loss on its last batch; waits for the GPU."""
        losses: list[float] = self._losses_K.tolist()
        return losses

    def _step(self, places_KB: Tensor, width: int) -> None:
        outputs = scores(self._model, self._examples.batch(places_KB, width))
        losses = self._criterion(outputs, self._examples.targets_N.index_select(0, places_KB))
        losses_K = losses.view(self._joined, -1).mean(1)
        gradients = torch.autograd.grad(losses_K.sum(), self._weights, materialize_grads=True)
        torch._foreach_copy_(self._gradients, gradients)
        norms_K = torch.stack([nn.utils.clip_grad_norm_(masters, self._clip) for masters in self._each])
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)
            bad_K = ~(losses_K.isfinite() & norms_K.isfinite()) & (self._first_bad_K < 0)
            self._first_bad_K.copy_(torch.where(bad_K, self._count, self._first_bad_K))
            self._count += 1
            self._losses_K.copy_(losses_K)


def _of_each(tensors: Sequence[Tensor], joined: int) -> list[list[Tensor]]:
    """Return the tensors of each joined model."""
    return [[tensor[k] for tensor in tensors] for k in range(joined)] if joined > 1 else [list(tensors)]


def _halved(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Give a model bfloat16 weights if it can compute with them, as tried on a batch without dropout; return whether.

    FNet cannot, for example: there is no bfloat16 Fourier transform.
    """
    training, parameters = model.training, list(model.parameters())
    before = [parameter.data for parameter in parameters]
    for parameter in parameters:  # also those that are not trained, since layers cannot mix precisions
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
    """Return a classifier's logits for each example, in float32."""
    outputs: Tensor = model(**batch).logits
    return outputs.float()


@contextmanager
def on_stream(device: torch.device) -> Iterator[Capture | None]:
    """Run on a stream on which steps can be captured as CUDA graphs; yield the capture, or None without a GPU.

    The graphs share their memory, since only one of them runs at a time.
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
