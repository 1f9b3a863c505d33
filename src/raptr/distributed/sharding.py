"""Shard a model over the processes by FSDP2 (`fully_shard`), layer by layer, so that a skipped layer is neither
gathered nor reduced.

FSDP2 is the engine for all three layouts. On a mesh (N, 1) every process has the whole weights and gradients are
all-reduced (ddp); on (N,) both are split into N shards (fsdp); on (R, S) they are split into S shards, with R replicas
(hsdp). All processes must run the same layers in the same order: otherwise `fully_shard` would silently add up
gradients of different layers.

Between two steps the parameters are `DTensor`s, as growth, checkpoints and optimizers that need whole matrices require.
Clipping and AdamW work on this process's rows (`mine`). Inside a forward pass parameters are plain tensors.
"""

import math
from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from raptr.distributed.processes import Processes


def shard(
    model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, *methods: str, reduce: torch.dtype | None = None
) -> None:
    """Shard a model on `mesh`, each block by itself, in place.

    `methods` names methods that call the model besides `forward`. Gradients are summed in the precision `reduce`
    (None: their own).
    """
    policy = MixedPrecisionPolicy(reduce_dtype=reduce)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=mesh.size(mesh.ndim - 1) > 1, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for method in methods:
        register_fsdp_forward_method(model, method)


def reduce_now(model: nn.Module, now: bool) -> None:
    """Set whether the next backward pass all-reduces gradients over replicas; if not, a later pass does so for all.

    Gradients are reduced over shards in every pass.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(now)


def reduce_rest(model: nn.Module, processes: Processes, reduce: torch.dtype | None = None) -> None:
    """Average the gradients of a model that is not sharded over the processes, after all its backward passes."""
    if not isinstance(model, FSDPModule):
        processes.average([parameter.grad for parameter in model.parameters() if parameter.grad is not None], reduce)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights, which a forward pass without a backward pass leaves behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def mine(parameter: nn.Parameter) -> nn.Parameter:
    """Return this process's rows of a parameter and its gradient as a plain parameter that shares their memory.

    Arithmetic on plain tensors avoids the overhead of `DTensor`s, which costs milliseconds in a GPU's step.
    """
    if not is_sharded(parameter):
        return parameter
    with torch.no_grad():
        plain = nn.Parameter(rows(parameter))
        plain.grad = None if parameter.grad is None else rows(parameter.grad)
    return plain


def rows(tensor: Tensor) -> Tensor:
    """Return this process's rows of a tensor as a plain tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def local(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this process's rows of a tensor, and the index of their first element in the flattened whole tensor."""
    if not is_sharded(tensor):
        return tensor, 0
    _, (row, *_) = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), row * math.prod(tensor.shape[1:])


def as_shard(own: Tensor, like: DTensor) -> DTensor:
    """Return a sharded tensor with the layout of `like`, of which `own` is this process's rows."""
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def over_shards(squares: Tensor, like: DTensor) -> Tensor:
    """Return the sum of `squares` over the processes that hold different shards of `like`."""
    parts = [Partial() if isinstance(placement, Shard) else Replicate() for placement in like.placements]
    return DTensor.from_local(squares, like.device_mesh, parts, run_check=False).full_tensor()


def part(whole: Tensor, like: Tensor) -> Tensor:
    """Return the rows of a whole tensor that this process holds of `like`, a sharded tensor of the same shape."""
    local_rows, first = local(like)
    return whole.flatten()[first : first + local_rows.numel()].view_as(local_rows) if is_sharded(like) else whole


def laid_out(whole: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor, which every process has, like `like`.

    Return it unchanged if `like` is not sharded, or has another shape.
    """
    if not is_sharded(like) or whole.shape != like.shape:
        return whole
    return as_shard(part(whole, like).contiguous(), like)


def whole(tensor: Tensor) -> Tensor:
    """Gather the whole tensor; all processes must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is distributed over processes, i.e. a `DTensor`."""
    return isinstance(tensor, DTensor)
