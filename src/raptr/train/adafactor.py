"""Adafactor (Shazeer and Stern 2018) with the settings of T5 and UL2, on which the paper's decoder runs build.

Let g be a gradient, p its weight, and t the number of this parameter's steps, from 1 on:

    v = β·v + (1 - β)·(g² + 1e-30)  with β = 1 - t^-0.8
    u = g / √v, divided by its RMS where that is above 1
    p = p - lr · max(RMS(p), 1e-3) · u

Where a matrix has at least 128 rows and columns, only the row and column means of v are kept, and v is their product
divided by their common mean. There is no momentum, no bias correction and no weight decay. A parameter that holds
several maps (a fused query, key and value) is a batch of them: each has its own means and its own RMS.

Where parameters lie on several processes, weights and gradients are gathered one by one, every process computes the
same update and keeps the same averages, and each moves its own rows.

The idle policies: an idle weight moves under neither, since there is no momentum. `skip` leaves v and t alone as well.
Under `zero` both go on, so v shrinks, and the first update afterwards is larger, up to its RMS of 1. T5's t is that of
the run: the same under `zero` and wherever no layer is idle. A t of its own gives a layer that runs for the first time
at step 1,000 a β of 0, and not an average with zeros.

`torch.optim.Adafactor` is another algorithm: its rate falls by itself, and it treats small gradients otherwise.
"""

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from raptr.distributed.sharding import local, part, whole

FACTORED = 128  # the least number of rows and columns of a matrix whose second moments are factored
POWER = 0.8
SMALLEST = 1e-30  # added to squared gradients
LEAST_SCALE = 1e-3  # of a weight: those that begin at zero could not leave it otherwise


@final
class Adafactor(Optimizer):
    """A group's `parts` is the number of equal maps that each of its parameters holds in its first dimension."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, *, factored: int = FACTORED) -> None:
        super().__init__(groups, {"lr": lr, "parts": 1, "factored": factored})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    cut = (group["parts"], -1, *parameter.shape[1:])
                    u = _update(self.state[parameter], whole(parameter.grad).reshape(cut), group["factored"])
                    scale = _rms(whole(parameter).reshape(cut)).clamp(min=LEAST_SCALE)
                    step = (group["lr"] * scale * u).view(parameter.shape)
                    local(parameter)[0].sub_(part(step, parameter))


def _update(state: dict[str, Tensor], g: Tensor, least: int) -> Tensor:
    """The clipped update of a batch of maps, and the state after it."""
    state.setdefault("step", torch.zeros((), device="cpu"))  # so that reading it never waits for a GPU
    state["step"] += 1
    new = state["step"].item() ** -POWER  # 1 - β
    squares = g.square() + SMALLEST
    if g.ndim < 3 or min(g.shape[-2:]) < least:
        u = g * _averaged(state, "square", squares, new).rsqrt()
    else:
        row = _averaged(state, "row", squares.mean(-1), new)
        column = _averaged(state, "column", squares.mean(-2), new)
        row = row / row.mean(-1, keepdim=True)
        u = g * row.rsqrt().unsqueeze(-1) * column.rsqrt().unsqueeze(-2)
    return u / _rms(u).clamp(min=1)


def _averaged(state: dict[str, Tensor], kind: str, value: Tensor, new: float) -> Tensor:
    """The moving average `kind` after `value` has entered with the weight `new`, which is 1 the first time."""
    if kind not in state:
        state[kind] = torch.zeros_like(value)
    return state[kind].lerp_(value, new)


def _rms(x: Tensor) -> Tensor:
    """The root mean square of each map of a batch."""
    return x.square().mean(tuple(range(1, x.ndim)), keepdim=True).sqrt()
