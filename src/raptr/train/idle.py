"""What the optimizer does with idle parameters: those of layers that did not run, whose gradient is None.

It changes the result, so it is a named policy. `zero` is the paper's: every parameter has a gradient each
step, zeros when idle, so momentum and weight decay go on. `skip` leaves weight, moments and step count alone.
It needs gradients that are dropped after each step: `optimizer.zero_grad(set_to_none=False)` keeps them as zeros,
so that an idle parameter looks like any other, and is refused.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from raptr.methods import Method
from raptr.methods.axes import narrowed

Policy = Literal["zero", "skip"]

SEEN = "_raptr_version"  # an attribute of a gradient: its version when `idle` last saw it


def idle(optimizer: Optimizer, policy: Policy, *, check: bool = True) -> None:
    """Give idle parameters what the policy says; call it before `optimizer.step()`.

    `check=False` is for a loop that is known to drop its gradients and reuses their memory.
    """
    if policy not in get_args(Policy):
        raise ValueError(f"idle: policy is {policy!r}; 'zero' and 'skip' are allowed")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if policy == "skip":
        if check:
            _check_dropped([parameter.grad for parameter in parameters if parameter.grad is not None])
        return
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def needed(method: Method) -> Policy:
    """The policy of a method unless one is given: `zero` where only some heads or MLP parts run, else `skip`.

    Heads and parts are slices of tensors that have a gradient, so their optimizer steps cannot be skipped.
    """
    return "zero" if narrowed(method) else "skip"


def _check_dropped(gradients: list[Tensor]) -> None:
    """Refuse zeros that were kept from an earlier step: whether their parameters were idle cannot be known.

    A gradient that was dropped is a new tensor in the next step, so one that was seen before, and changed since, was
    kept. Only those are looked at, since looking waits for the device; a kept one that is not zero has been used.
    """
    kept = [gradient for gradient in gradients if vars(gradient).get(SEEN, gradient._version) != gradient._version]
    for gradient in gradients:
        setattr(gradient, SEEN, gradient._version)
    if not kept:
        return
    used = [(gradient.coalesce().values() if gradient.is_sparse else gradient).any() for gradient in kept]
    zeros = len(used) - sum(torch.stack([one.to(used[0].device) for one in used]).tolist())
    if zeros:
        raise ValueError(
            f"idle: policy is 'skip', but {zeros} gradients are zeros kept from an earlier step, so parameters that "
            "were idle cannot be told from those that were not. Use optimizer.zero_grad(set_to_none=True), "
            "or the policy 'zero'."
        )
