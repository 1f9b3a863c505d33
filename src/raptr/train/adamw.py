"""AdamW in which the rows of one tensor may take different numbers of steps.

Adam's bias correction divides the moments by 1 - β^t, where t is the number of steps that they average over. With one t
for a tensor whose rows (or columns) have taken different numbers of steps, updates would have the wrong size: with
β2 = 0.999 the first ones of rows that are added to a trained tensor 3 times the right one, rising to 6.5 times. So the
state `step` of such a tensor has one count for each row: it has the parameter's dimensions, all 1 but that of the rows.
There are two kinds of such tensors:

- the model was widened, so some rows are new;
- heads or MLP parts that did not run are left alone (`ran`): no moment, no count and no weight of their rows changes.

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

SHAPES = 64  # of parameters at most, for which the update is compiled


@final
class AdamW(optim.AdamW):
    """`torch.optim.AdamW` (without amsgrad) for parameters with one step count or with one for each row.

    `ran` has the parameters of which only some rows take part in the next step: 1 for these, 0 for the others, in the
    shape of the counts. With `compiled`, the update of rows is: on a GPU each of its operations would be a pass over
    memory.
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
            parameter.grad = None  # torch's step then leaves it alone
        with self._plain():
            super().step()
        for parameter, gradient in hidden:
            parameter.grad = gradient
        self.ran = {}

    def _count_rows(self, parameter: Tensor, ran: Tensor) -> None:
        """Give a parameter one step count for each row, where it has one for all or none yet."""
        state = self.state[parameter]
        if not state:
            state |= {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.zeros_like(ran)
        elif state["step"].dim() == 0:
            state["step"] = state["step"].to(ran.device).expand_as(ran).contiguous()

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """One step of parameters whose rows have counts of their own."""
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
        """Show this process' rows, as plain tensors in the same memory, in place of sharded parameters and state."""
        shown = []
        for group in self.param_groups:
            parameters = group["params"]
            group["params"] = plain = [p if p.grad is None else mine(p) for p in parameters]
            shown.append((group, parameters, plain))
            for parameter, own in zip(parameters, plain, strict=True):
                if own is not parameter and parameter in self.state:
                    self.state[own] = {kind: rows(value) for kind, value in self.state[parameter].items()}
        try:
            yield
        finally:
            for group, parameters, plain in shown:
                group["params"] = parameters
                for parameter, own in zip(parameters, plain, strict=True):
                    made = self.state.pop(own) if own is not parameter and own in self.state else {}
                    if made and parameter not in self.state:
                        self.state[parameter] = {
                            kind: as_shard(value, parameter) if value.dim() else value for kind, value in made.items()
                        }


Move = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], None]


def move(p: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: Tensor, epsilon: float) -> None:
    """One step of a parameter p with gradient g and averages m and v; factors of 1, 0, 0 and 0 leave all as it is."""
    decay, new_m, new_v, rate, root = factors.unbind(-1)
    m.lerp_(g, new_m)
    v.lerp_(g.square(), new_v)
    p.mul_(decay).sub_(rate * m / (v.sqrt() / root + epsilon))


@cache
def compiled_move(backend: Any = "inductor") -> Move:
    """The same, compiled once for each shape."""
    torch._dynamo.config.recompile_limit = max(SHAPES, torch._dynamo.config.recompile_limit)
    made: Move = torch.compile(move, fullgraph=True, dynamic=False, backend=backend)
    return made


def _factors(
    counts: Sequence[Tensor], running: Sequence[Tensor], group: dict[str, Any], dtype: torch.dtype
) -> list[Tensor]:
    """What `move` multiplies by, for each parameter in the shape of its counts; made for all rows at once.

    The factors of a row lie side by side, so that strides, which compiled code depends on, do not depend on the others.
    """
    rate, (beta1, beta2) = group["lr"], group["betas"]
    # In double precision, since 1 - β^t loses digits in float32 where t is small.
    t, ran = (torch.cat([one.flatten() for one in some]).double() for some in (counts, running))
    t = t.clamp(min=1)  # of rows that have not run yet
    factors = [1 - rate * group["weight_decay"] * ran, (1 - beta1) * ran, (1 - beta2) * ran]
    factors += [rate * ran / (1 - beta1**t), (1 - beta2**t).sqrt()]
    parts = torch.split(torch.stack(factors, dim=-1).to(dtype), [count.numel() for count in counts])
    return [part.view(*count.shape, len(factors)) for part, count in zip(parts, counts, strict=True)]


def _rows(counts: Tensor, parameter: Tensor) -> Tensor:
    """Of one number for each row of a parameter those of the rows that this process has."""
    if not is_sharded(parameter) or is_sharded(counts) or counts.shape[0] == 1:
        return rows(counts)
    own, first = local(parameter)
    row = first // math.prod(parameter.shape[1:])
    return counts[row : row + len(own)]
