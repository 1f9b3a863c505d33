"""Adafactor (Shazeer and Stern 2018) with the settings of T5 and UL2, on which the paper's decoder runs are based.

Let g be a gradient, p its weight, and t the number of steps that this parameter has taken, starting at 1:

    v = β·v + (1 - β)·(g² + 1e-30)  with β = 1 - t^-0.8
    u = g / √v, divided by its RMS if that is above 1
    p = p - lr · max(RMS(p), 1e-3) · u

If a matrix has at least 128 rows and 128 columns, only the row and column means of v are stored, and v is approximated
by their product divided by their common mean. There is no momentum, no bias correction and no weight decay. A parameter
that fuses several linear maps (query, key and value) is treated as a batch of them: each has its own means and RMS.

Sharded weights and gradients are gathered one at a time. Every process computes the same update, keeps the same
averages, and updates its own rows.

Idle weights move under neither idle policy, since there is no momentum. `skip` leaves v and t unchanged as well. Under
`zero` both continue, so v shrinks, and the first update afterwards is larger, up to an RMS of 1. In T5, t counts the
steps of the run; here it does so under `zero` and wherever no layer is idle. Otherwise t counts the parameter's own
steps, so a layer that first runs at step 1,000 begins with β = 0 and not with an average over zeros.

`torch.optim.Adafactor` is a different algorithm: it lowers its learning rate by itself, and it treats small gradients
differently.
"""

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from raptr.distributed.sharding import is_sharded, part, rows, whole

FACTORED = 128  # a matrix with fewer rows or columns keeps all of its second moments
POWER = 0.8
SMALLEST = 1e-30  # added to squared gradients
SHAPES = 256  # the most shapes of parameters for which the update is compiled, over all models of a process
LEAST_SCALE = 1e-3  # the least RMS(p) of an update: weights that start at zero could not move otherwise


@final
class Adafactor(Optimizer):
    """Adafactor as described above.

    A group's `maps` is the number of linear maps of equal size that each of its parameters fuses along dimension 0.
    `compiled` compiles the update, since on a GPU each of its operations would otherwise be a pass over memory.
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
    """Return the optimizer state before the first step of `p`, a parameter with its maps along dimension 0."""
    step = torch.zeros((), device="cpu")  # so that reading it never waits for a GPU
    if p.ndim < 3 or min(p.shape[-2:]) < least:
        return {"step": step, "square": torch.zeros_like(p)}
    return {"step": step, "row": torch.zeros_like(p[..., 0]), "column": torch.zeros_like(p[:, 0])}


Update = Callable[[Tensor, Tensor, list[Tensor], float, float], None]


def update(p: Tensor, g: Tensor, averages: list[Tensor], lr: float | Tensor, new: float | Tensor) -> None:
    """Apply one step to `p`, a parameter with its maps along dimension 0; `new` is 1 - β, and 1 in the first step."""
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
    """Return `update`, compiled once for each shape of parameters."""
    torch._dynamo.config.recompile_limit = max(SHAPES, torch._dynamo.config.recompile_limit)
    fused = torch.compile(update, fullgraph=True, dynamic=False, backend=backend)

    def run(p: Tensor, g: Tensor, averages: list[Tensor], lr: float, new: float) -> None:
        # The rates are passed as tensors, since code with Python numbers would be compiled again for each value.
        fused(p, g, averages, *(_number(rate, p.dtype, p.device) for rate in (lr, new)))

    return run


@lru_cache(maxsize=64)  # most parameters of a step share their values
def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def _rms(x: Tensor) -> Tensor:
    """Return the root mean square of each map along dimension 0; the other dimensions have size 1."""
    return x.square().mean(tuple(range(1, x.ndim)), keepdim=True).sqrt()
