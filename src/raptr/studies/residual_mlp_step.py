"""A training step of many residual MLPs with Adam, in two forms that are equal up to rounding.

`PlainStep` is faster on the CPU. `FusedStep` is for a GPU, where a plain step is many small kernels. It needs fewer:
the elementwise operations between two matrix products are compiled into one kernel; the weight gradients of all layers
are computed together after the backward pass through the layers, which also fills the GPU better; Adam updates all runs
together.
"""

from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar, final

import torch
from torch import Tensor, nn

from raptr.studies.residual_mlp import Networks

MOMENTS = ("exp_avg", "exp_avg_sq")
BETAS, EPSILON = (0.9, 0.999), 1e-8
LAYER = ("w1", "b1", "w2", "b2")

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile the function, so that its elementwise operations become few kernels; for tensors of one shape."""
    return torch.compile(function, fullgraph=True, dynamic=False)


@final
class PlainStep:
    """A step on the CPU: `Networks.gradients` and torch's Adam."""

    def __init__(self, networks: Networks, rates_TR: Tensor) -> None:
        self.networks, self._rates_TR = networks, rates_TR.to(networks.flat_RP)
        self._rates_R = self._rates_TR[0].clone()
        self._parameters = [nn.Parameter(row) for row in networks.flat_RP]
        for parameter, gradient in zip(self._parameters, networks.grad_RP, strict=True):
            parameter.grad = gradient
        # One group for each run, whose learning rate is a view of a tensor that every step overwrites.
        groups = [{"params": [p], "lr": rate} for p, rate in zip(self._parameters, self._rates_R, strict=True)]
        self._optimizer = torch.optim.Adam(groups, fused=True)

    def load(self, state: Mapping[str, Tensor], done: int) -> None:
        """Load Adam's moments as they were after `done` steps."""
        for run, parameter in enumerate(self._parameters):
            moments = {name: state[name][run].to(parameter) for name in MOMENTS}
            self._optimizer.state[parameter] = {"step": torch.tensor(float(done)), **moments}

    def moments(self) -> dict[str, Tensor]:
        """Return Adam's moments, (R, P) each. They exist only after the first step."""
        state = [self._optimizer.state[parameter] for parameter in self._parameters]
        return {name: torch.stack([entry[name] for entry in state]) for name in MOMENTS}

    def __call__(self, step: Tensor, x_RBD: Tensor, target_RB: Tensor, scales_RL: Tensor) -> None:
        """Do one training step; `step` is its number, from 0 on, as a tensor of one element."""
        self._rates_R.copy_(self._rates_TR.index_select(0, step)[0])
        self.networks.gradients(x_RBD, target_RB, scales_RL)
        self._optimizer.step()


@final
class FusedStep:
    """A step in few kernels, which are compiled if the networks are on a GPU."""

    def __init__(self, networks: Networks, rates_TR: Tensor) -> None:
        self.networks, flat, layers = networks, networks.flat_RP, networks.size.layers
        numbers_T = torch.arange(1, len(rates_TR) + 1, dtype=torch.float64)
        first_T, second_T = (1 - beta**numbers_T for beta in BETAS)  # Adam's bias corrections
        self._sizes_TR = (rates_TR / first_T[:, None]).to(flat)
        self._roots_T = second_T.sqrt().to(flat)
        self._moments = {name: torch.zeros_like(flat) for name in MOMENTS}
        # The layers have equally long pieces of a run's row. Their gradients are stored elsewhere, by layer and run, so
        # that one batched product gives those of all w1, and another those of all w2.
        end, flats = networks.weights["readout.w"].storage_offset(), (flat, *self._moments.values())
        self._layers = [tensor[:, :end].view(len(flat), layers, -1).transpose(0, 1) for tensor in flats]
        self._readout = [tensor[:, end:] for tensor in (flat, *self._moments.values(), networks.grad_RP)]
        self._grads_LRK = torch.zeros_like(self._layers[0], memory_format=torch.contiguous_format)
        self._grads = {}
        for name in LAYER:
            first = networks.weights[f"layers.0.{name}"]
            start, count = first.storage_offset(), first[0].numel()
            self._grads[name] = self._grads_LRK[:, :, start : start + count].view(layers, *first.shape)
        self._activate, self._add, self._adam = _activate, _add, _adam
        if flat.is_cuda:
            self._activate, self._add, self._adam = compiled(_activate), compiled(_add), compiled(_adam)

    def load(self, state: Mapping[str, Tensor], _: int) -> None:
        for name, moment in self._moments.items():
            moment.copy_(state[name])

    def moments(self) -> dict[str, Tensor]:
        return self._moments

    @torch.no_grad()
    def __call__(self, step: Tensor, x_RBD: Tensor, target_RB: Tensor, scales_RL: Tensor) -> None:
        self._gradients(x_RBD, target_RB, scales_RL)
        sizes_R, root = self._sizes_TR.index_select(0, step)[0], self._roots_T.index_select(0, step)
        weights, means, squares = self._layers
        self._adam(weights, means, squares, self._grads_LRK, sizes_R[:, None], root)
        weights, means, squares, grads = self._readout
        self._adam(weights, means, squares, grads, sizes_R[:, None], root)

    def _gradients(self, x_RBD: Tensor, target_RB: Tensor, scales_RL: Tensor) -> None:
        weights, size = self.networks.weights, self.networks.size
        x_LRBD = x_RBD.new_empty(size.layers + 1, *x_RBD.shape)  # the inputs of every layer and of the read-out
        h_LRBF = x_RBD.new_empty(size.layers, *x_RBD.shape[:2], size.hidden)
        dy_LRBD, dh_LRBF = torch.empty_like(x_LRBD[1:]), torch.empty_like(h_LRBF)  # gradients of the updates and of h
        x_LRBD[0] = x_RBD
        for layer in range(size.layers):
            w1, b1, w2, b2 = (weights[f"layers.{layer}.{name}"] for name in LAYER)
            torch.bmm(x_LRBD[layer], w1, out=h_LRBF[layer])
            self._activate(h_LRBF[layer], b1)
            self._add(x_LRBD[layer], h_LRBF[layer] @ w2, b2, scales_RL[:, layer], x_LRBD[layer + 1])
        dx_RBD = self.networks.read_out_gradients(x_LRBD[size.layers], target_RB)
        for layer in reversed(range(size.layers)):
            dy_RBD, dh_RBF = dy_LRBD[layer], dh_LRBF[layer]
            torch.mul(dx_RBD, scales_RL[:, layer, None, None], out=dy_RBD)
            torch.bmm(dy_RBD, weights[f"layers.{layer}.w2"].transpose(1, 2), out=dh_RBF)
            torch.ops.aten.threshold_backward.grad_input(dh_RBF, h_LRBF[layer], 0, grad_input=dh_RBF)
            dx_RBD.baddbmm_(dh_RBF, weights[f"layers.{layer}.w1"].transpose(1, 2))
        torch.sum(dy_LRBD, 2, out=self._grads["b2"])
        torch.sum(dh_LRBF, 2, out=self._grads["b1"])
        for name, a_LRBI, b_LRBJ in (("w2", h_LRBF, dy_LRBD), ("w1", x_LRBD[:-1], dh_LRBF)):
            a, b, out = (tensor.flatten(0, 1) for tensor in (a_LRBI, b_LRBJ, self._grads[name]))
            torch.bmm(a.transpose(1, 2), b, out=out)


def _activate(z_RBF: Tensor, b_RF: Tensor) -> None:
    z_RBF.add_(b_RF.unsqueeze(1)).relu_()


def _add(x_RBD: Tensor, update_RBD: Tensor, b_RD: Tensor, scale_R: Tensor, out_RBD: Tensor) -> None:
    out_RBD.copy_(x_RBD + (update_RBD + b_RD.unsqueeze(1)) * scale_R[:, None, None])


def _adam(weights: Tensor, means: Tensor, squares: Tensor, grads: Tensor, sizes: Tensor, root: Tensor) -> None:
    """Do a step of Adam. `sizes`: learning rate / bias correction of the means; `root`: the root of the squares'."""
    means.lerp_(grads, 1 - BETAS[0])
    squares.mul_(BETAS[1]).addcmul_(grads, grads, value=1 - BETAS[1])
    weights.sub_(sizes * means / (squares.sqrt() / root + EPSILON))
