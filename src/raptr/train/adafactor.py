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
from functools import cache, lru_cache
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from raptr.distributed.sharding import is_sharded, part, rows, whole

FACTORED = 128  # the least number of rows and columns of a matrix whose second moments are factored
POWER = 0.8
SMALLEST = 1e-30  # added to squared gradients
SHAPES = 64  # of parameters at most, for which the update is compiled
LEAST_SCALE = 1e-3  # of a weight: those that begin at zero could not leave it otherwise


@final
class Adafactor(Optimizer):
    """A group's `maps` is the number of equal maps that each of its parameters holds in its first dimension.

    With `compiled`, the update is: on a GPU each of its operations would be a pass over memory.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, *, factored: int = FACTORED, compiled: bool = False
    ) -> None:
        super().__init__(groups, {"lr": lr, "maps": 1, "factored": factored})
        self._update = compiled_update() if compiled else update

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    cut = (group["maps"], -1, *parameter.shape[1:])
                    moved, g = whole(parameter), whole(parameter.grad).reshape(cut)
                    p, state = moved.view(cut), self.state[parameter]
                    if not state:
                        state |= _initial(p, group["factored"])
                    state["step"] += 1
                    averages = [state[kind] for kind in ("square", "row", "column") if kind in state]
                    self._update(p, g, averages, group["lr"], state["step"].item() ** -POWER)
                    if is_sharded(parameter):
                        rows(parameter).copy_(part(moved, parameter))


def _initial(p: Tensor, least: int) -> dict[str, Tensor]:
    """The state of a batch of maps before their first step."""
    step = torch.zeros((), device="cpu")  # so that reading it never waits for a GPU
    if p.ndim < 3 or min(p.shape[-2:]) < least:
        return {"step": step, "square": torch.zeros_like(p)}
    return {"step": step, "row": torch.zeros_like(p[..., 0]), "column": torch.zeros_like(p[:, 0])}


Update = Callable[[Tensor, Tensor, list[Tensor], float, float], None]


def update(p: Tensor, g: Tensor, averages: list[Tensor], lr: float | Tensor, new: float | Tensor) -> None:
    """One step of a batch of maps; `new`, which is 1 in the first step, is 1 - β."""
    squares = g.square() + SMALLEST
    if len(averages) == 1:
        u = g * averages[0].lerp_(squares, new).rsqrt()
    else:
        row, column = averages[0].lerp_(squares.mean(-1), new), averages[1].lerp_(squares.mean(-2), new)
        row = row / row.mean(-1, keepdim=True)
        u = g * row.rsqrt().unsqueeze(-1) * column.rsqrt().unsqueeze(-2)
    p.sub_(lr * _rms(p).clamp(min=LEAST_SCALE) * (u / _rms(u).clamp(min=1)))


@cache
def compiled_update(backend: Any = "inductor") -> Update:
    """The update, compiled once for each shape."""
    torch._dynamo.config.recompile_limit = max(SHAPES, torch._dynamo.config.recompile_limit)
    fused = torch.compile(update, fullgraph=True, dynamic=False, backend=backend)

    def run(p: Tensor, g: Tensor, averages: list[Tensor], lr: float, new: float) -> None:
        # Numbers that change reach compiled code as tensors: it would be compiled anew for each.
        fused(p, g, averages, *(_number(rate, p.dtype, p.device) for rate in (lr, new)))

    return run


@lru_cache(maxsize=64)  # most parameters of a step have the same
def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def _rms(x: Tensor) -> Tensor:
    """The root mean square of each map of a batch."""
    return x.square().mean(tuple(range(1, x.ndim)), keepdim=True).sqrt()
