"""Muon (Jordan et al. 2024) for the matrices of the layers and AdamW for everything else, as one optimizer.

A matrix moves along its averaged gradient, with all singular values brought near 1 by five Newton-Schulz steps in
bfloat16; the algorithm and its constants are those of `torch.optim.Muon`, which a test compares. What differs:

- The maps of a fused matrix (query, key and value) are orthogonalised one by one, as in a model that has them apart.
- All matrices of one shape are one batch: a product of its own for each is too little work for a GPU.

The update is scaled by 0.2·√(the larger dimension), which gives it the RMS of AdamW's (Liu et al. 2025,
"Muon is Scalable"), so both kinds of parameters share one learning rate and one weight decay.

Where matrices lie on several processes, the updates are gathered, every process makes all of them orthogonal, and
each moves its own rows.

An update has the same size whatever the gradient's, so zero gradients would move an idle layer at full speed for as
long as its momentum is not exactly zero: the idle policy `zero` is refused (`OptimizerSettings`).
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from raptr.distributed.sharding import part, rows, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST = 1e-7  # norm to divide by
RMS = 0.2  # of AdamW's updates, nearly


@final
class Muon(Optimizer):
    """Groups with `maps` are Muon's: each of their parameters holds this many matrices, one below the other.

    The other groups are those of `others`. All are in one list with one state, so that nobody else has to know.
    """

    def __init__(self, matrices: Iterable[dict[str, Any]], others: AdamW) -> None:
        super().__init__([*matrices, *others.param_groups], {})
        self._others = others

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            if "maps" in group:
                self._step_matrices(group)
        self._others.param_groups = [group for group in self.param_groups if "maps" not in group]
        self._others.state = self.state
        self._others.step()

    def _step_matrices(self, group: dict[str, Any]) -> None:
        rate, maps, momentum = group["lr"], group["maps"], group["momentum"]
        updates: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                average = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = parameter.grad.lerp(average, momentum)  # Nesterov's
                update_MAB = whole(update).bfloat16().reshape(maps, -1, parameter.shape[1])
                updates.setdefault(update_MAB.shape, []).append((parameter, update_MAB))
        for shape, same in updates.items():
            scale = RMS * math.sqrt(max(shape[1:]))
            for (parameter, _), update_MAB in zip(same, orthogonal([u for _, u in same]), strict=True):
                mine, step = rows(parameter), part(update_MAB.reshape(parameter.shape), parameter)
                mine.mul_(1 - rate * group["weight_decay"])
                mine.sub_(step, alpha=rate * scale)


def orthogonal(updates: list[Tensor]) -> list[Tensor]:
    """The updates, batches of matrices of one shape, with every matrix nearly orthogonal."""
    x_NAB = torch.cat(updates)
    tall = x_NAB.shape[1] > x_NAB.shape[2]
    x_NAB = x_NAB.mT if tall else x_NAB  # the product with its own transpose is then the smaller one
    x_NAB = x_NAB / x_NAB.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram_NAA = x_NAB @ x_NAB.mT
        step_NAA = torch.baddbmm(gram_NAA, gram_NAA, gram_NAA, beta=b, alpha=c)
        x_NAB = torch.baddbmm(x_NAB, step_NAA, x_NAB, beta=a)
    return list(torch.split(x_NAB.mT if tall else x_NAB, [len(update) for update in updates]))
