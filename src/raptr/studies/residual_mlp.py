"""Many residual MLPs trained at once: the paper's section 3 network, with the runs stacked on one tensor axis.

    y_0 = x,  y_l = y_(l-1) + s_l · (W2_l · relu(W1_l · y_(l-1) + b1_l) + b2_l),  F(x) = v · y_L + a

Every run has its own weights, data, learning rate and layer scales; s_l = 0 bypasses layer l. All layers are
computed, the bypassed ones times 0, so that runs that keep different layers stay one batched product of fixed
shape; `benchmarks/polynomial_speed.py` measures this against skipping. FLOPs are therefore reported from a method's
phases. Gathering the kept layers would pad every run to the largest draw among them and save little: 24 draws of 20
coins at 0.6 have a largest of about 16. A bypassed layer has zero gradients, and Adam's momentum goes on: the paper's
policy for idle layers.

A step is written without autograd, in place where it can be, and reads its number, learning rates and scales from
tensors on the device. So it is captured once as a CUDA graph and replayed; on the CPU it runs as it is. On CUDA
training multiplies in TF32; evaluation is plain float32.

Deviations: the paper names no read-in, read-out or initialisation. Here x is the first state and the read-out is
linear; weights and biases are hashed normal numbers with the variance of `nn.Linear`'s, 1 / (3 · fan-in).

Letters of shapes: R runs, B batch, D model, F hidden, L layers, T steps, P all parameters of a run.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from raptr.models.init import normal

ALIGNED = 32  # every tensor starts at a multiple of so many numbers; products with unaligned ones are slow
EAGER_STEPS = 3  # real steps of training before the capture; they warm up the libraries and the optimizer
MOMENTS = ("exp_avg", "exp_avg_sq")
AHEAD = 500  # steps whose scales are made and uploaded at once, while the device trains the ones before


@dataclass(frozen=True)
class Size:
    """How large each network is."""

    inputs: int
    hidden: int
    layers: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Name, shape and fan-in of every tensor of one network, in the order of storage."""
        for layer in range(self.layers):
            yield f"layers.{layer}.w1", (self.inputs, self.hidden), self.inputs
            yield f"layers.{layer}.b1", (self.hidden,), self.inputs
            yield f"layers.{layer}.w2", (self.hidden, self.inputs), self.hidden
            yield f"layers.{layer}.b2", (self.inputs,), self.hidden
        yield "readout.w", (self.inputs,), self.inputs
        yield "readout.b", (1,), self.inputs


@final
class Networks:
    """R residual MLPs: one flat tensor of parameters and one of gradients, and their views by name."""

    def __init__(self, size: Size, seeds: Sequence[int], *, device: str, dtype: torch.dtype) -> None:
        self.size = size
        made = {seed: self._initial(seed) for seed in sorted(set(seeds))}
        self.flat_RP = torch.stack([made[seed] for seed in seeds]).to(device, dtype)
        self.grad_RP = torch.zeros_like(self.flat_RP)
        self.weights, self.grads = self._views(self.flat_RP), self._views(self.grad_RP)

    def _initial(self, seed: int) -> Tensor:
        parts = []
        for name, shape, fan_in in self.size.tensors():
            values = torch.from_numpy(normal(seed, name, math.prod(shape))).double() / (3 * fan_in) ** 0.5
            parts += [values, torch.zeros(-len(values) % ALIGNED, dtype=values.dtype)]
        return torch.cat(parts)

    def _views(self, flat_RP: Tensor) -> dict[str, Tensor]:
        views, start = {}, 0
        for name, shape, _ in self.size.tensors():
            count = math.prod(shape)
            views[name] = flat_RP[:, start : start + count].view(-1, *shape)
            start += count + -count % ALIGNED
        return views

    @torch.no_grad()
    def forward(self, x_RBD: Tensor, scales_RL: Tensor) -> Tensor:
        """F of every run, (R, B)."""
        for layer in range(self.size.layers):
            x_RBD, _ = self._layer(layer, x_RBD, scales_RL)
        return self._read_out(x_RBD)

    @torch.no_grad()
    def gradients(self, x_RBD: Tensor, target_RB: Tensor, scales_RL: Tensor) -> Tensor:
        """Set the gradients of the mean square loss; returns the loss of every run, (R,)."""
        weights, grads = self.weights, self.grads
        states, hidden = [x_RBD], []
        for layer in range(self.size.layers):
            x_RBD, h_RBF = self._layer(layer, x_RBD, scales_RL)
            states.append(x_RBD)
            hidden.append(h_RBF)
        error_RB = self._read_out(states.pop()) - target_RB
        slope_RB1 = (2 / error_RB.shape[1] * error_RB).unsqueeze(2)
        grads["readout.w"].copy_((slope_RB1.transpose(1, 2) @ x_RBD).squeeze(1))
        grads["readout.b"].copy_(slope_RB1.sum(1))
        dy_RBD = slope_RB1 * weights["readout.w"].unsqueeze(1)
        for layer in reversed(range(self.size.layers)):
            x_RBD, h_RBF = states.pop(), hidden.pop()
            scaled_RBD = dy_RBD * scales_RL[:, layer, None, None]
            torch.bmm(h_RBF.transpose(1, 2), scaled_RBD, out=grads[f"layers.{layer}.w2"])
            torch.sum(scaled_RBD, 1, out=grads[f"layers.{layer}.b2"])
            dh_RBF = scaled_RBD @ weights[f"layers.{layer}.w2"].transpose(1, 2)
            dh_RBF = torch.ops.aten.threshold_backward(dh_RBF, h_RBF, 0)
            torch.bmm(x_RBD.transpose(1, 2), dh_RBF, out=grads[f"layers.{layer}.w1"])
            torch.sum(dh_RBF, 1, out=grads[f"layers.{layer}.b1"])
            dy_RBD.baddbmm_(dh_RBF, weights[f"layers.{layer}.w1"].transpose(1, 2))
        return error_RB.square().mean(1)

    def _layer(self, layer: int, x_RBD: Tensor, scales_RL: Tensor) -> tuple[Tensor, Tensor]:
        w1, b1, w2, b2 = (self.weights[f"layers.{layer}.{name}"] for name in ("w1", "b1", "w2", "b2"))
        h_RBF = torch.baddbmm(b1.unsqueeze(1), x_RBD, w1).relu_()
        update_RBD = torch.baddbmm(b2.unsqueeze(1), h_RBF, w2)
        return torch.addcmul(x_RBD, update_RBD, scales_RL[:, layer, None, None]), h_RBF

    def _read_out(self, x_RBD: Tensor) -> Tensor:
        return torch.baddbmm(
            self.weights["readout.b"].unsqueeze(2), x_RBD, self.weights["readout.w"].unsqueeze(2)
        ).squeeze(2)


@final
class Training:
    """The joint training of all networks with Adam, each step a function of its number.

    `batch` gives inputs (R, B, D) and targets (R, B) from the step's number, a tensor of one element on the device,
    and `scales` the layer scales (stop - start, R, L) of steps `start` to `stop`; `rates_TR` are learning rates.
    `state` is what `state()` gave after `done` steps; the weights are then taken from it.
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
        self.networks, self._batch, self._make_scales = networks, batch, scales
        flat, (self.steps, runs) = networks.flat_RP, rates_TR.shape
        self._cuda = flat.is_cuda
        self._rates_TR = rates_TR.to(flat)
        self._rates_R = self._rates_TR[0].clone()
        self._scales_TRL = torch.zeros(self.steps, runs, networks.size.layers, dtype=flat.dtype, device=flat.device)
        self._step = torch.full((1,), done, dtype=torch.int64, device=flat.device)
        if state is not None:
            flat.copy_(state["weights"])
        self._parameters = [nn.Parameter(row) for row in flat]
        for parameter, gradient in zip(self._parameters, networks.grad_RP, strict=True):
            parameter.grad = gradient
        # One group a run, so that each has its learning rate: a view of a tensor that every step overwrites.
        groups = [{"params": [p], "lr": rate} for p, rate in zip(self._parameters, self._rates_R, strict=True)]
        self._optimizer = torch.optim.Adam(groups, fused=True, capturable=self._cuda)
        for run, parameter in enumerate(self._parameters if state is not None else ()):
            assert state is not None
            moments = {name: state[name][run].to(flat) for name in MOMENTS}
            step = torch.tensor(float(done), device=flat.device)
            self._optimizer.state[parameter] = {"step": step, **moments}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream() if self._cuda else None  # type: ignore[no-untyped-call]
        self._worker = ThreadPoolExecutor(1)
        self._coming = self._worker.submit(scales, done, min(done + AHEAD, self.steps))
        self.done = self._uploaded = done
        self._eager = EAGER_STEPS

    def state(self) -> dict[str, Tensor]:
        """Everything that later steps depend on."""
        assert self.done
        moments = {
            name: torch.stack([self._optimizer.state[parameter][name] for parameter in self._parameters])
            for name in MOMENTS
        }
        return {"weights": self.networks.flat_RP, **moments}

    def advance(self, stop: int) -> None:
        """Train until `stop` steps have been done."""
        assert self.done <= stop <= self.steps
        if self._stream is not None:  # the weights may still be read by an evaluation
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
        """Take the next scales, which the worker has made, and let it make those after them."""
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
        """One training step, from nothing but tensors on the device."""
        self._rates_R.copy_(self._rates_TR.index_select(0, self._step)[0])
        scales_RL = self._scales_TRL.index_select(0, self._step)[0]
        inputs_RBD, target_RB = self._batch(self._step)
        self.networks.gradients(inputs_RBD, target_RB, scales_RL)
        self._optimizer.step()
        self._step.add_(1)


@contextmanager
def _tensor_cores(cuda: bool) -> Iterator[None]:
    """Float32 products in TF32 on CUDA, for the time of a `with`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if cuda else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
