"""What the optimizer does with idle parameters: those of layers that did not run, whose gradient is None.

It changes the result, so it is a named policy. `zero` is the paper's: every parameter has a gradient each
step, zeros when idle, so momentum and weight decay go on. `skip` leaves weight, moments and step count alone.
`initialise` gives every parameter its optimizer state before the first step, so that a checkpoint taken early
has state for the layers not sampled yet.
"""

from typing import Literal, get_args

import torch
from torch.optim import Adam, Optimizer

Policy = Literal["zero", "skip"]


def idle(optimizer: Optimizer, policy: Policy) -> None:
    """Give idle parameters what the policy says; call it before `optimizer.step()`."""
    if policy not in get_args(Policy):
        raise ValueError(f"idle: policy is {policy!r}; 'zero' and 'skip' are allowed")
    if policy == "skip":
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def initialise(optimizer: Optimizer) -> None:
    """Create the AdamW state of every trainable parameter that has none, as its first step would."""
    if not isinstance(optimizer, Adam):
        raise ValueError(f"initialise: optimizer is {type(optimizer).__name__}; AdamW and Adam are allowed")
    if any(group["amsgrad"] for group in optimizer.param_groups):
        raise ValueError("initialise: amsgrad is True, which keeps a third moment; False is allowed")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or optimizer.state[parameter]:
                continue
            # torch counts in float64 where that is the default, except in the fused kernel, and keeps the
            # count on the CPU unless the kernel reads it on the device.
            wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
            on_device = group["capturable"] or group["fused"]
            optimizer.state[parameter] = {
                "step": torch.zeros(
                    (),
                    dtype=torch.float64 if wide else torch.float32,
                    device=parameter.device if on_device else "cpu",
                ),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
