"""What the optimizer does with idle parameters: those of layers that did not run, whose gradient is None.

The choice changes the result, so it is a named policy. `zero` is the paper's: every parameter has a gradient in every
step, zeros if it is idle, so momentum and weight decay go on. `skip` leaves weight, moments and step count unchanged.
For `skip`, gradients must be dropped after each step: `optimizer.zero_grad(set_to_none=False)` keeps them as zeros, so
that idle parameters cannot be told from others, and is refused.

Idle heads and MLP parts are rows of tensors that have a gradient, which is zero there. So any optimizer treats them as
under `zero`. `skip` needs an optimizer that can leave rows alone: our AdamW, which gets the rows that ran from
`running_rows`.
"""

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from raptr.data.batch import uploaded
from raptr.distributed.sharding import rows
from raptr.methods import Method
from raptr.methods.axes import narrowed
from raptr.subnetworks import Subnetwork

if TYPE_CHECKING:
    from raptr.models.model import Model

Policy = Literal["zero", "skip"]

SEEN = "_raptr_version"  # an attribute of a gradient: its version when `idle` last saw it


def idle(optimizer: Optimizer, policy: Policy, *, check: bool = True) -> None:
    """Apply the policy to idle parameters; call it before `optimizer.step()`.

    Under `skip`, gradients that were kept as zeros raise ValueError. `check=False` turns this check off, for a loop
    that is known to drop its gradients and reuses their memory.
    """
    if policy not in get_args(Policy):
        raise ValueError(f"idle: policy is {policy!r}; 'zero' and 'skip' are allowed")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if policy == "skip":
        if check:
            _check_dropped([parameter.grad for parameter in parameters if parameter.grad is not None])
        return
    unused = [parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None]
    for parameter in unused:
        parameter.grad = torch.empty_like(parameter)
    if unused:  # one kernel zeroes all: one for each would take longer to launch than to run
        torch._foreach_zero_([rows(parameter.grad) for parameter in unused if parameter.grad is not None])


def needed(method: Method) -> Policy:
    """Return the default policy of a method: `zero` if it runs only some heads or MLP parts in a stage, else `skip`."""
    return "zero" if narrowed(method) else "skip"


def running_rows(model: "Model", subnetwork: Subnetwork) -> dict[Tensor, Tensor]:
    """Return a mask for each parameter of which only some rows (or columns) run: 1 for these, 0 for the others.

    Like AdamW's step counts, a mask has as many dimensions as its parameter, all of size 1 except that of the rows.
    """
    masks: dict[Tensor, Tensor] = {}
    shape = model.config.shape
    for axis, units, kept in (("heads", shape.heads, subnetwork.heads), ("parts", shape.parts, subnetwork.parts)):
        if kept is None or not subnetwork.kept:
            continue
        ran = torch.tensor([[float(unit in kept[layer]) for unit in range(units)] for layer in subnetwork.kept])
        (ran_KU,) = uploaded([ran], next(model.parameters()).device)
        assert ran_KU is not None
        for name, cut in model.layout.items():
            if cut.axis == axis:
                parameters = [model.blocks[layer].get_parameter(name) for layer in subnetwork.kept]
                count = parameters[0].shape[cut.dim]
                ran_KR = ran_KU.repeat_interleave(count // (cut.maps * units), dim=1).repeat(1, cut.maps)
                wide = [count if dim == cut.dim else 1 for dim in range(parameters[0].dim())]
                masks |= {parameter: ran.view(wide) for parameter, ran in zip(parameters, ran_KR, strict=True)}
    return masks


def _check_dropped(gradients: list[Tensor]) -> None:
    """Refuse gradients that were kept as zeros from an earlier step: their parameters may or may not have been idle.

    A dropped gradient is a new tensor in the next step, so one that was seen before, and has changed since, was kept.
    Only such gradients are read, since reading waits for the device. If one is not zero, its parameter was not idle.
    """
    kept = [gradient for gradient in gradients if vars(gradient).get(SEEN, gradient._version) != gradient._version]
    for gradient in gradients:
        setattr(gradient, SEEN, gradient._version)
    if not kept:
        return
    used = [(gradient.coalesce().values() if gradient.is_sparse else gradient).any() for gradient in kept]
    zeros = len(used) - sum(torch.stack([flag.to(used[0].device) for flag in used]).tolist())
    if zeros:
        raise ValueError(
            f"idle: policy is 'skip', but {zeros} gradients are zeros kept from an earlier step, so parameters that "
            "were idle cannot be told from those that were not. Use optimizer.zero_grad(set_to_none=True), "
            "or the policy 'zero'."
        )
