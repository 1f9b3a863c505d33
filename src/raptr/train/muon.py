"""Muon (Jordan et al. 2024) for the matrices of the layers and AdamW for everything else, as one optimizer.

A matrix moves along its averaged gradient, whose singular values are first brought near 1 by five Newton-Schulz steps
in bfloat16. The algorithm and its constants are those of `torch.optim.Muon`, with which a test compares. Differences:

- The maps of a fused matrix (query, key and value) are orthogonalised one by one, as in a model that separates them.
- All matrices of one shape are one batch: a separate product for each is too little work for a GPU.

The update is scaled by 0.2·√(the larger dimension), which gives it the RMS of AdamW's (Liu et al. 2025,
"Muon is Scalable"), so both kinds of parameters share one learning rate and one weight decay.

The updates of sharded matrices are gathered; every process orthogonalises all of them and applies its own rows.

An update has the same size whatever the size of the gradient. So with zero gradients an idle layer would move at full
speed as long as its momentum is not exactly zero, and the idle policy `zero` is refused (`OptimizerSettings`).
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
SMALLEST = 1e-7  # the least norm to divide by
RMS = 0.2  # roughly that of AdamW's updates


@final
class Muon(Optimizer):
    """Updates groups with `maps` by Muon and the groups of `others` by AdamW.

    Each parameter of the former holds `maps` matrices, one below the other. All groups are in one list and all state is
    in one mapping, so that other code sees a single optimizer.
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
                update = parameter.grad.lerp(average, momentum)  # Nesterov momentum
                update_MAB = whole(update).bfloat16().reshape(maps, -1, parameter.shape[1])
                updates.setdefault(update_MAB.shape, []).append((parameter, update_MAB))
        for shape, same in updates.items():
            scale = RMS * math.sqrt(max(shape[1:]))
            for (parameter, _), update_MAB in zip(same, orthogonal([u for _, u in same]), strict=True):
                mine, step = rows(parameter), part(update_MAB.reshape(parameter.shape), parameter)
                mine.mul_(1 - rate * group["weight_decay"])
                mine.sub_(step, alpha=rate * scale)


def orthogonal(updates: list[Tensor]) -> list[Tensor]:
    """Return the updates, which are batches of matrices of one shape, with every matrix made nearly orthogonal."""
    x_NAB = torch.cat(updates)
    tall = x_NAB.shape[1] > x_NAB.shape[2]
    x_NAB = x_NAB.mT if tall else x_NAB  # so that the Gram matrix below is the smaller one
    x_NAB = x_NAB / x_NAB.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram_NAA = x_NAB @ x_NAB.mT
        step_NAA = torch.baddbmm(gram_NAA, gram_NAA, gram_NAA, beta=b, alpha=c)
        x_NAB = torch.baddbmm(x_NAB, step_NAA, x_NAB, beta=a)
    return list(torch.split(x_NAB.mT if tall else x_NAB, [len(update) for update in updates]))
