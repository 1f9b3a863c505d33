"""The joint training of many residual MLPs with Adam.

A step reads its number, learning rates and scales from tensors on the device. On a GPU it is therefore captured once as
a CUDA graph and replayed. There, training uses TF32 for matrix products; evaluation uses plain float32.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from raptr.studies.residual_mlp import Networks
from raptr.studies.residual_mlp_step import FusedStep, PlainStep, compiled

EAGER_STEPS = 3  # training steps before the capture; they compile, and warm up the libraries
AHEAD = 500  # number of steps whose scales are drawn while the device trains, and then uploaded together


@final
class Training:
    """Trains all networks together with Adam; each step is a function of its number.

    `batch` maps the step's number, a tensor of one element on the device, to inputs (R, B, D) and targets (R, B).
    `scales` returns the layer scales (stop - start, R, L) of steps `start` to `stop`. `rates_TR`: learning rates.
    `state`, if given, is what `state()` returned after `done` steps; weights and moments are loaded from it.
    """

    def __init__(
        self,
        networks: Networks,
        batch: Callable[[Tensor], tuple[Tensor, Tensor]],
        scales: Callable[[int, int], Tensor],
        rates_TR: Tensor,
        *,
        done: int = 0,
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._make_scales = scales
        flat, (self.steps, runs) = networks.flat_RP, rates_TR.shape
        self._cuda = flat.is_cuda
        self._scales_TRL = torch.zeros(self.steps, runs, networks.size.layers, dtype=flat.dtype, device=flat.device)
        self._step = torch.full((1,), done, dtype=torch.int64, device=flat.device)
        if state is not None:
            flat.copy_(state["weights"])
        self._update: PlainStep | FusedStep = (FusedStep if self._cuda else PlainStep)(networks, rates_TR)
        if state is not None:
            self._update.load(state, done)
        self._batch = compiled(batch) if self._cuda else batch
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream() if self._cuda else None  # type: ignore[no-untyped-call]
        self._worker = ThreadPoolExecutor(1)
        self._coming = self._worker.submit(scales, done, min(done + AHEAD, self.steps))
        self.done = self._uploaded = done
        self._eager = EAGER_STEPS

    def state(self) -> dict[str, Tensor]:
        """Return everything that later steps depend on: weights and moments."""
        return {"weights": self._update.networks.flat_RP, **self._update.moments()}

    def advance(self, stop: int) -> None:
        """Train until `stop` steps have been done in all."""
        assert self.done <= stop <= self.steps
        if self._stream is not None:  # an evaluation may still be reading the weights
            self._stream.wait_stream(torch.cuda.current_stream())
        with _tensor_cores(self._cuda), torch.cuda.stream(self._stream):
            while self.done < stop:
                if self.done == self._uploaded:
                    self._upload()
                self._one()
                self.done += 1
        if self._stream is not None:
            self._stream.synchronize()

    def _upload(self) -> None:
        """Upload the next scales, which the worker has drawn, and let it draw those that follow."""
        start, stop = self.done, min(self.done + AHEAD, self.steps)
        self._scales_TRL[start:stop].copy_(self._coming.result())
        self._uploaded = stop
        if stop < self.steps:
            self._coming = self._worker.submit(self._make_scales, stop, min(stop + AHEAD, self.steps))
        else:
            self._worker.shutdown()

    def _one(self) -> None:
        if not self._cuda or self._eager:
            self._eager = max(0, self._eager - 1)
            self._work()
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._work()
        self._graph.replay()

    @torch.no_grad()
    def _work(self) -> None:
        """Do one training step that reads nothing but tensors on the device."""
        scales_RL = self._scales_TRL.index_select(0, self._step)[0]
        inputs_RBD, target_RB = self._batch(self._step)
        self._update(self._step, inputs_RBD, target_RB, scales_RL)
        self._step.add_(1)


@contextmanager
def _tensor_cores(cuda: bool) -> Iterator[None]:
    """Use TF32 for float32 products on CUDA inside the `with` block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if cuda else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
