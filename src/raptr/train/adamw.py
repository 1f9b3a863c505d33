"""AdamW in which the rows of one tensor may have taken different numbers of steps.

A tensor that got new rows (or columns) when the model was widened holds rows of different ages. Adam's bias correction
divides the moments by 1 - β^t, where t is the number of steps that they average over. With one t for the whole tensor,
the first updates of new rows would have the wrong size: with β2 = 0.999, 3 times the right one, rising to 6.5 times. So
the state `step` of such a tensor has one count for each row: it has the parameter's dimensions, all 1 but that of the
rows. All other parameters are updated by `torch.optim.AdamW` itself.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, optim


@final
class AdamW(optim.AdamW):
    """`torch.optim.AdamW` (without amsgrad) for parameters with one step count or with one for each row."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        gradients: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if parameter.grad is not None and state and state["step"].dim():
                    _update(parameter, parameter.grad, state, group)
                    gradients[parameter], parameter.grad = parameter.grad, None  # hidden from torch's step
        super().step()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _update(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """One step of a parameter whose rows have counts of their own."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    count, average, square = state["step"], state["exp_avg"], state["exp_avg_sq"]
    count += 1
    parameter.mul_(1 - rate * group["weight_decay"])
    average.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    t = count.double()  # 1 - β^t loses digits in float32 where t is small
    size, root = rate / (1 - beta1**t), (1 - beta2**t).sqrt()
    divisor = (square.sqrt() / root.to(square.dtype)).add_(group["eps"])
    parameter.sub_(average * size.to(average.dtype) / divisor)
