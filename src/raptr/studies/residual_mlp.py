"""Many residual MLPs computed as one batch: the network of the paper's section 3, the runs stacked on one tensor axis.

    y_0 = x,  y_l = y_(l-1) + s_l · (W2_l · relu(W1_l · y_(l-1) + b1_l) + b2_l),  F(x) = v · y_L + a

Every run has its own weights, data, learning rate and layer scales; s_l = 0 bypasses layer l. All layers are computed,
and the updates of bypassed ones are multiplied by 0, so that runs with different layers remain one batched product of
fixed shape; `benchmarks/polynomial_speed.py` compares this with skipping. FLOPs are therefore not counted here, but
reported from a method's phases. Gathering only the kept layers would save little, since every run would be padded to
the run that keeps most: 24 runs that keep each of 20 layers with probability 0.6 keep up to about 16. A bypassed layer
has zero gradients, and Adam's momentum goes on: the paper's policy for idle layers.

`gradients` does without autograd and works in place where it can. `residual_mlp_step` has the training step, in one
form for the CPU and one for a GPU; `residual_mlp_training` has the training loop.

Deviations: the paper names no read-in, read-out or initialisation. Here x is the first state and the read-out is
linear. Weights and biases are hashed normal numbers with the variance of those of `nn.Linear`, 1 / (3 · fan-in).

Shape suffixes: R runs, B batch, D model, F hidden, L layers, T steps, P all parameters of a run.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from raptr.models.init import normal

ALIGNED = 32  # tensors start at multiples of this many numbers; products with unaligned ones are slow


@dataclass(frozen=True)
class Size:
    """The dimensions of each network."""

    inputs: int
    hidden: int
    layers: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Yield name, shape and fan-in of every tensor of one network, in the order of storage."""
        for layer in range(self.layers):
            yield f"layers.{layer}.w1", (self.inputs, self.hidden), self.inputs
            yield f"layers.{layer}.b1", (self.hidden,), self.inputs
            yield f"layers.{layer}.w2", (self.hidden, self.inputs), self.hidden
            yield f"layers.{layer}.b2", (self.inputs,), self.hidden
        yield "readout.w", (self.inputs,), self.inputs
        yield "readout.b", (1,), self.inputs


@final
class Networks:
    """R residual MLPs: one flat tensor of all parameters, one of all gradients, and named views of both."""

    def __init__(self, size: Size, seeds: Sequence[int], *, device: str, dtype: torch.dtype) -> None:
        self.size = size
        by_seed = {seed: self._initial(seed) for seed in sorted(set(seeds))}
        self.flat_RP = torch.stack([by_seed[seed] for seed in seeds]).to(device, dtype)
        self.grad_RP = torch.zeros_like(self.flat_RP)
        self.weights, self.grads = self.views(self.flat_RP), self.views(self.grad_RP)

    def _initial(self, seed: int) -> Tensor:
        parts = []
        for name, shape, fan_in in self.size.tensors():
            values = torch.from_numpy(normal(seed, name, math.prod(shape))).double() / (3 * fan_in) ** 0.5
            parts += [values, torch.zeros(-len(values) % ALIGNED, dtype=values.dtype)]
        return torch.cat(parts)

    def views(self, flat_RP: Tensor) -> dict[str, Tensor]:
        """Return views of a flat tensor (R, P): the tensors of all networks by name, (R, ...)."""
        views, start = {}, 0
        for name, shape, _ in self.size.tensors():
            count = math.prod(shape)
            views[name] = flat_RP[:, start : start + count].view(-1, *shape)
            start += count + -count % ALIGNED
        return views

    @torch.no_grad()
    def forward(self, x_RBD: Tensor, scales_RL: Tensor) -> Tensor:
        """Return F of every run, (R, B)."""
        for layer in range(self.size.layers):
            x_RBD, _ = self._layer(layer, x_RBD, scales_RL)
        return self._read_out(x_RBD)

    @torch.no_grad()
    def gradients(self, x_RBD: Tensor, target_RB: Tensor, scales_RL: Tensor) -> None:
        """Write the gradients of the mean squared loss into `grads`."""
        weights, grads = self.weights, self.grads
        states, hidden = [x_RBD], []
        for layer in range(self.size.layers):
            x_RBD, h_RBF = self._layer(layer, x_RBD, scales_RL)
            states.append(x_RBD)
            hidden.append(h_RBF)
        dy_RBD = self.read_out_gradients(states.pop(), target_RB)
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

    def _layer(self, layer: int, x_RBD: Tensor, scales_RL: Tensor) -> tuple[Tensor, Tensor]:
        w1, b1, w2, b2 = (self.weights[f"layers.{layer}.{name}"] for name in ("w1", "b1", "w2", "b2"))
        h_RBF = torch.baddbmm(b1.unsqueeze(1), x_RBD, w1).relu_()
        update_RBD = torch.baddbmm(b2.unsqueeze(1), h_RBF, w2)
        return torch.addcmul(x_RBD, update_RBD, scales_RL[:, layer, None, None]), h_RBF

    def _read_out(self, x_RBD: Tensor) -> Tensor:
        return torch.baddbmm(
            self.weights["readout.b"].unsqueeze(2), x_RBD, self.weights["readout.w"].unsqueeze(2)
        ).squeeze(2)

    def read_out_gradients(self, x_RBD: Tensor, target_RB: Tensor) -> Tensor:
        """Write the read-out's gradients into `grads`; return the gradient of the last state, (R, B, D)."""
        error_RB = self._read_out(x_RBD) - target_RB
        slope_RB1 = (2 / error_RB.shape[1] * error_RB).unsqueeze(2)
        self.grads["readout.w"].copy_((slope_RB1.transpose(1, 2) @ x_RBD).squeeze(1))
        self.grads["readout.b"].copy_(slope_RB1.sum(1))
        return slope_RB1 * self.weights["readout.w"].unsqueeze(1)
