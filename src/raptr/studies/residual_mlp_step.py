"""A training step of many residual MLPs with Adam, in two arrangements that give the same numbers but for rounding.

`PlainStep` is faster on the CPU. `FusedStep` is for a GPU, where a step is many small kernels, and has fewer of them:
what lies between two products is compiled into one kernel; the gradients of all layers' weights are one product after
the last layer, which also fills the GPU better than a product for each layer; Adam is one kernel for all runs.
"""

from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar, final

import torch
from torch import Tensor, nn

from raptr.studies.residual_mlp import Networks

MOMENTS = ("exp_avg", "exp_avg_sq")
BETAS, EPSILON = (0.9, 0.999), 1e-8

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """The function with its elementwise operations in few kernels; for tensors of one shape."""
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
        # One group a run, so that each has its learning rate: a view of a tensor that every step overwrites.
        groups = [{"params": [p], "lr": rate} for p, rate in zip(self._parameters, self._rates_R, strict=True)]
        self._optimizer = torch.optim.Adam(groups, fused=True)

    def load(self, state: Mapping[str, Tensor], done: int) -> None:
        """Take the moments after `done` steps."""
        for run, parameter in enumerate(self._parameters):
            moments = {name: state[name][run].to(parameter) for name in MOMENTS}
            self._optimizer.state[parameter] = {"step": torch.tensor(float(done)), **moments}

    def moments(self) -> dict[str, Tensor]:
        """Adam's moments, (R, P) each; only after a step."""
        state = [self._optimizer.state[parameter] for parameter in self._parameters]
        return {name: torch.stack([one[name] for one in state]) for name in MOMENTS}

    def __call__(self, step: Tensor, x_RBD: Tensor, target_RB: Tensor, scales_RL: Tensor) -> None:
        """Do the step of this number, from 0 on."""
        self._rates_R.copy_(self._rates_TR.index_select(0, step)[0])
        self.networks.gradients(x_RBD, target_RB, scales_RL)
        self._optimizer.step()


@final
class FusedStep:
    """A step in few kernels; compiled if the networks are on a GPU."""

    def __init__(self, networks: Networks, rates_TR: Tensor) -> None:
        self.networks, flat = networks, networks.flat_RP
        self._moments = {name: torch.zeros_like(flat) for name in MOMENTS}
        numbers_T = torch.arange(1, len(rates_TR) + 1, dtype=torch.float64)
        first_T, second_T = (1 - beta**numbers_T for beta in BETAS)  # Adam's bias corrections
        self._sizes_TR = (rates_TR / first_T[:, None]).to(flat)
        self._roots_T = second_T.sqrt().to(flat)
        self._activate, self._add, self._adam = _activate, _add, _adam
        if flat.is_cuda:
            self._activate, self._add, self._adam = compiled(_activate), compiled(_add), compiled(_adam)

    def load(self, state: Mapping[str, Tensor], _: int) -> None:
        """Take the moments."""
        for name, moment in self._moments.items():
            moment.copy_(state[name])

    def moments(self) -> dict[str, Tensor]:
        """Adam's moments, (R, P) each."""
        return self._moments

    @torch.no_grad()
    def __call__(self, step: Tensor, x_RBD: Tensor, target_RB: Tensor, scales_RL: Tensor) -> None:
        """Do the step of this number, from 0 on."""
        self.gradients(x_RBD, target_RB, scales_RL)
        sizes_R, root = self._sizes_TR.index_select(0, step)[0], self._roots_T.index_select(0, step)
        means_RP, squares_RP = self._moments.values()
        self._adam(self.networks.flat_RP, self.networks.grad_RP, means_RP, squares_RP, sizes_R, root)

    @torch.no_grad()
    def gradients(self, x_RBD: Tensor, target_RB: Tensor, scales_RL: Tensor) -> None:
        """Set the gradients of the mean square loss."""
        weights, grads, layers = self.networks.weights, self.networks.grads, self.networks.size.layers
        x_LRBD = x_RBD.new_empty(layers + 1, *x_RBD.shape)  # what goes into every layer, and into the read-out
        h_LRBF = x_RBD.new_empty(layers, *x_RBD.shape[:2], self.networks.size.hidden)
        dy_LRBD, dh_LRBF = torch.empty_like(x_LRBD[1:]), torch.empty_like(h_LRBF)  # the slopes of updates and of h
        x_LRBD[0] = x_RBD
        for layer in range(layers):
            w1, b1, w2, b2 = (weights[f"layers.{layer}.{name}"] for name in ("w1", "b1", "w2", "b2"))
            torch.bmm(x_LRBD[layer], w1, out=h_LRBF[layer])
            self._activate(h_LRBF[layer], b1)
            self._add(x_LRBD[layer], h_LRBF[layer] @ w2, b2, scales_RL[:, layer], x_LRBD[layer + 1])
        error_RB = self.networks.read_out(x_LRBD[layers]) - target_RB
        slope_RB1 = (2 / error_RB.shape[1] * error_RB).unsqueeze(2)
        grads["readout.w"].copy_((slope_RB1.transpose(1, 2) @ x_LRBD[layers]).squeeze(1))
        grads["readout.b"].copy_(slope_RB1.sum(1))
        dx_RBD = slope_RB1 * weights["readout.w"].unsqueeze(1)
        for layer in reversed(range(layers)):
            dy_RBD, dh_RBF = dy_LRBD[layer], dh_LRBF[layer]
            torch.mul(dx_RBD, scales_RL[:, layer, None, None], out=dy_RBD)
            torch.bmm(dy_RBD, weights[f"layers.{layer}.w2"].transpose(1, 2), out=dh_RBF)
            torch.ops.aten.threshold_backward.grad_input(dh_RBF, h_LRBF[layer], 0, grad_input=dh_RBF)
            dx_RBD.baddbmm_(dh_RBF, weights[f"layers.{layer}.w1"].transpose(1, 2))
        self._of_all_layers("w2").copy_(_products(h_LRBF, dy_LRBD))
        self._of_all_layers("b2").copy_(dy_LRBD.sum(2))
        self._of_all_layers("w1").copy_(_products(x_LRBD[:-1], dh_LRBF))
        self._of_all_layers("b1").copy_(dh_LRBF.sum(2))

    def _of_all_layers(self, name: str) -> Tensor:
        """The gradients of one of the layers' tensors, (L, R, ...)."""
        grads, layers = self.networks.grads, self.networks.size.layers
        first, distance = grads[f"layers.0.{name}"], grads["readout.w"].storage_offset() // layers
        return first.as_strided((layers, *first.shape), (distance, *first.stride()))


def _products(a_LRBI: Tensor, b_LRBJ: Tensor) -> Tensor:
    """The sums over the batch of a · b, (L, R, I, J)."""
    product = torch.bmm(a_LRBI.flatten(0, 1).transpose(1, 2), b_LRBJ.flatten(0, 1))
    return product.view(*a_LRBI.shape[:2], *product.shape[1:])


def _activate(z_RBF: Tensor, b_RF: Tensor) -> None:
    z_RBF.add_(b_RF.unsqueeze(1)).relu_()


def _add(x_RBD: Tensor, update_RBD: Tensor, b_RD: Tensor, scale_R: Tensor, out_RBD: Tensor) -> None:
    out_RBD.copy_(x_RBD + (update_RBD + b_RD.unsqueeze(1)) * scale_R[:, None, None])


def _adam(
    weights_RP: Tensor, grads_RP: Tensor, means_RP: Tensor, squares_RP: Tensor, sizes_R: Tensor, root: Tensor
) -> None:
    """A step of Adam; `sizes_R` are learning rates over the means' bias correction, `root` the root of the squares'."""
    means_RP.lerp_(grads_RP, 1 - BETAS[0])
    squares_RP.mul_(BETAS[1]).addcmul_(grads_RP, grads_RP, value=1 - BETAS[1])
    weights_RP.sub_(sizes_R[:, None] * means_RP / (squares_RP.sqrt() / root + EPSILON))
