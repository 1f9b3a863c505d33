"""AdamW that can count steps separately for each row of a parameter.

Adam's bias correction divides the moments by 1 - β^t, where t is the number of steps that they average over. If a
tensor's rows (or columns) have taken different numbers of steps, a single t gives updates of the wrong size: with
β2 = 0.999, the first updates of rows added to a trained tensor would have 3 times the right size, rising to 6.5 times.
So the state `step` of such a tensor has one count for each row: it has as many dimensions as the parameter, all of size
1 except that of the rows. Rows take different numbers of steps in two cases:

- The model was widened, so some rows are new.
- Heads or MLP parts that did not run are left alone (`ran`): the weights, moments and counts of their rows stay.

All other parameters are updated by `torch.optim.AdamW` itself.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import torch
from torch import Tensor, optim

from raptr.distributed.sharding import as_shard, is_sharded, local, mine, rows

SHAPES = 256  # the most shapes of parameters for which the update is compiled, over all models of a process


@final
class AdamW(optim.AdamW):
    """`torch.optim.AdamW` (without amsgrad) for parameters with one step count, or with one for each row.

    `ran` holds a mask for each parameter of which only some rows take part in the next step: 1 for these rows, 0 for
    the others, in the shape of the step counts. `compiled` compiles the update of parameters with counts for each row,
    since on a GPU each of its operations would otherwise be a pass over memory.
    """

    def __init__(self, *arguments: Any, compiled: bool = False, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.ran: Mapping[Tensor, Tensor] = {}
        self._move = compiled_move() if compiled else move

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        hidden: list[tuple[Tensor, Tensor]] = []
        for parameter, ran in self.ran.items():
            self._count_rows(parameter, ran)
        for group in self.param_groups:
            begun = [parameter for parameter in group["params"] if parameter in self.state]
            mixed = [each for each in begun if each.grad is not None and self.state[each]["step"].dim()]
            if mixed:
                self._update(mixed, group)
                hidden += [(parameter, parameter.grad) for parameter in mixed]
        for parameter, _ in hidden:
            parameter.grad = None  # so that torch's own step skips it
        with self._plain():
            super().step()
        for parameter, gradient in hidden:
            parameter.grad = gradient
        self.ran = {}

    def _count_rows(self, parameter: Tensor, ran: Tensor) -> None:
        """Give a parameter one step count for each row: create its state, or expand its single count."""
        state = self.state[parameter]
        if not state:
            state |= {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.zeros_like(ran)
        elif state["step"].dim() == 0:
            state["step"] = state["step"].to(ran.device).expand_as(ran).contiguous()

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Apply one step to parameters that have a step count for each row."""
        counts, running = [], []
        for parameter in parameters:
            count, ran = self.state[parameter]["step"], self.ran.get(parameter)
            ran = torch.ones_like(count) if ran is None else ran
            running.append(_rows(ran, parameter))
            rows(count).add_(running[-1] if is_sharded(count) else ran)
            counts.append(_rows(count, parameter))
        factors = _factors(counts, running, group, parameters[0].dtype)
        for parameter, factor in zip(parameters, factors, strict=True):
            assert parameter.grad is not None
            m, v = (rows(self.state[parameter][kind]) for kind in ("exp_avg", "exp_avg_sq"))
            self._move(rows(parameter), rows(parameter.grad), m, v, factor, group["eps"])

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """For a while, replace sharded parameters and state by plain tensors of this process' rows, sharing memory."""
        replaced = []
        for group in self.param_groups:
            parameters = group["params"]
            group["params"] = plain = [p if p.grad is None else mine(p) for p in parameters]
            replaced.append((group, parameters, plain))
            for parameter, shard in zip(parameters, plain, strict=True):
                if shard is not parameter and parameter in self.state:
                    self.state[shard] = {kind: rows(value) for kind, value in self.state[parameter].items()}
        try:
            yield
        finally:
            for group, parameters, plain in replaced:
                group["params"] = parameters
                for parameter, shard in zip(parameters, plain, strict=True):
                    state = self.state.pop(shard) if shard is not parameter and shard in self.state else {}
                    if state and parameter not in self.state:
                        self.state[parameter] = {
                            kind: as_shard(value, parameter) if value.dim() else value for kind, value in state.items()
                        }


Move = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], None]


def move(p: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: Tensor, epsilon: float) -> None:
    """Apply one step to a parameter p with gradient g and moments m and v.

    The last dimension of `factors` holds the five factors below; 1, 0, 0, 0 and any root leave p, m and v unchanged.
    """
    decay, new_m, new_v, rate, root = factors.unbind(-1)
    m.lerp_(g, new_m)
    v.lerp_(g.square(), new_v)
    p.mul_(decay).sub_(rate * m / (v.sqrt() / root + epsilon))


@cache
def compiled_move(backend: Any = "inductor") -> Move:
    """Return `move`, compiled once for each shape of parameters."""
    torch._dynamo.config.recompile_limit = max(SHAPES, torch._dynamo.config.recompile_limit)
    compiled: Move = torch.compile(move, fullgraph=True, dynamic=False, backend=backend)
    return compiled


def _factors(
    counts: Sequence[Tensor], running: Sequence[Tensor], group: dict[str, Any], dtype: torch.dtype
) -> list[Tensor]:
    """Return the factors of `move` for each parameter, in the shape of its counts and a last dimension of 5.

    They are computed for all parameters at once. The factors of one row are adjacent in memory, so that strides, on
    which compiled code depends, do not depend on the other parameters.
    """
    rate, (beta1, beta2) = group["lr"], group["betas"]
    # In double precision, since 1 - β^t loses digits in float32 if t is small.
    t, ran = (torch.cat([tensor.flatten() for tensor in tensors]).double() for tensors in (counts, running))
    t = t.clamp(min=1)  # rows that have not run yet have t = 0, and 1 - β^0 is 0
    factors = [1 - rate * group["weight_decay"] * ran, (1 - beta1) * ran, (1 - beta2) * ran]
    factors += [rate * ran / (1 - beta1**t), (1 - beta2**t).sqrt()]
    parts = torch.split(torch.stack(factors, dim=-1).to(dtype), [count.numel() for count in counts])
    return [part.view(*count.shape, len(factors)) for part, count in zip(parts, counts, strict=True)]


def _rows(counts: Tensor, parameter: Tensor) -> Tensor:
    """Return the entries of `counts`, one for each row or column of a parameter, that belong to this process' rows."""
    if not is_sharded(parameter) or is_sharded(counts) or counts.shape[0] == 1:
        return rows(counts)
    local_rows, first = local(parameter)
    row = first // math.prod(parameter.shape[1:])
    return counts[row : row + len(local_rows)]
