"""AdamW in which the rows of one tensor may have taken different numbers of steps.

A tensor that got new rows (or columns) when the model was widened holds rows of different ages. Adam's bias correction
divides the moments by 1 - β^t, where t is the number of steps that they average over. With one t for the whole tensor,
the first updates of new rows would have the wrong size: with β2 = 0.999, 3 times the right one, rising to 6.5 times. So
the state `step` of such a tensor has one count for each row: it has the parameter's dimensions, all 1 but that of the
rows. All other parameters are updated by `torch.optim.AdamW` itself.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, optim

from raptr.distributed.sharding import as_shard, is_sharded, local, mine, rows


@final
class AdamW(optim.AdamW):
    """`torch.optim.AdamW` (without amsgrad) for parameters with one step count or with one for each row."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        hidden: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            ran = [parameter for parameter in group["params"] if parameter.grad is not None]
            mixed = [parameter for parameter in ran if parameter in self.state and self.state[parameter]["step"].dim()]
            if mixed:
                _update(mixed, [self.state[parameter] for parameter in mixed], group)
                hidden += [(parameter, parameter.grad) for parameter in mixed]
        for parameter, _ in hidden:
            parameter.grad = None  # torch's step then leaves it alone
        with self._plain():
            super().step()
        for parameter, gradient in hidden:
            parameter.grad = gradient

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


def _update(parameters: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any]) -> None:
    """One step of parameters whose rows have counts of their own; all at once, to launch few kernels."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    gradients = [rows(parameter.grad) for parameter in parameters if parameter.grad is not None]
    averages, squares = ([rows(state[kind]) for state in states] for kind in ("exp_avg", "exp_avg_sq"))
    torch._foreach_add_([rows(state["step"]) for state in states], 1)
    counts = [_rows(state["step"], parameter) for state, parameter in zip(states, parameters, strict=True)]
    parameters = [rows(parameter) for parameter in parameters]
    torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
    torch._foreach_lerp_(averages, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    t = torch.cat([count.flatten() for count in counts]).double()  # 1 - β^t loses digits in float32 where t is small
    divisors = torch._foreach_sqrt(squares)
    torch._foreach_div_(divisors, _like(counts, (1 - beta2**t).sqrt().to(squares[0].dtype)))
    torch._foreach_add_(divisors, group["eps"])
    updates = torch._foreach_mul(averages, _like(counts, (rate / (1 - beta1**t)).to(averages[0].dtype)))
    torch._foreach_div_(updates, divisors)
    torch._foreach_sub_(parameters, updates)


def _rows(counts: Tensor, parameter: Tensor) -> Tensor:
    """The counts of the rows that this process has of a parameter."""
    if not is_sharded(parameter) or is_sharded(counts) or counts.shape[0] == 1:
        return rows(counts)
    own, first = local(parameter)
    row = first // math.prod(parameter.shape[1:])
    return counts[row : row + len(own)]


def _like(counts: list[Tensor], values: Tensor) -> list[Tensor]:
    """The values, one for each count, in the shapes of the counts."""
    parts = torch.split(values, [count.numel() for count in counts])
    return [part.view_as(count) for part, count in zip(parts, counts, strict=True)]
