"""Many residual MLPs trained at once: the paper's section 3 network, with the runs stacked on one tensor axis.

    y_0 = x,  y_l = y_(l-1) + s_l · (W2_l · relu(W1_l · y_(l-1) + b1_l) + b2_l),  F(x) = v · y_L + a

Every run has its own weights, data, learning rate and layer scales; s_l = 0 bypasses layer l. All layers are
computed, the bypassed ones times 0, so that runs that keep different layers stay one batched product of fixed
shape; `benchmarks/polynomial_speed.py` measures this against skipping. FLOPs are therefore reported from a method's
phases. Gathering the kept layers would pad every run to the largest draw among them and save little: 24 draws of 20
coins at 0.6 have a largest of about 16. A bypassed layer has zero gradients, and Adam's momentum goes on: the paper's
policy for idle layers.

`gradients` is written without autograd, in place where it can be; `residual_mlp_step` has a step of training,
arranged for the CPU and for a GPU, and `residual_mlp_training` the training.

Deviations: the paper names no read-in, read-out or initialisation. Here x is the first state and the read-out is
linear; weights and biases are hashed normal numbers with the variance of `nn.Linear`'s, 1 / (3 · fan-in).

Letters of shapes: R runs, B batch, D model, F hidden, L layers, T steps, P all parameters of a run.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from raptr.models.init import normal

ALIGNED = 32  # every tensor starts at a multiple of so many numbers; products with unaligned ones are slow


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
        self.weights, self.grads = self.views(self.flat_RP), self.views(self.grad_RP)

    def _initial(self, seed: int) -> Tensor:
        parts = []
        for name, shape, fan_in in self.size.tensors():
            values = torch.from_numpy(normal(seed, name, math.prod(shape))).double() / (3 * fan_in) ** 0.5
            parts += [values, torch.zeros(-len(values) % ALIGNED, dtype=values.dtype)]
        return torch.cat(parts)

    def views(self, flat_RP: Tensor) -> dict[str, Tensor]:
        """The tensors of all networks by name, (R, ...), in a flat one."""
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
    def gradients(self, x_RBD: Tensor, target_RB: Tensor, scales_RL: Tensor) -> None:
        """Set the gradients of the mean square loss."""
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
        """Set the read-out's gradients; returns those of the last state, (R, B, D)."""
        error_RB = self._read_out(x_RBD) - target_RB
        slope_RB1 = (2 / error_RB.shape[1] * error_RB).unsqueeze(2)
        self.grads["readout.w"].copy_((slope_RB1.transpose(1, 2) @ x_RBD).squeeze(1))
        self.grads["readout.b"].copy_(slope_RB1.sum(1))
        return slope_RB1 * self.weights["readout.w"].unsqueeze(1)
