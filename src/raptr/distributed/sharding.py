"""A model laid out on the processes by FSDP2 (`fully_shard`), layer by layer, so that a skipped layer is neither
gathered nor reduced.

One engine serves all: on a mesh (N, 1) the weights are whole everywhere and gradients are all-reduced (ddp), on (N,)
both are in N shards (fsdp), on (R, S) in S shards, R times (hsdp). All processes must run the same layers in the same
order: `fully_shard` would otherwise add up gradients of different layers silently.

Between two steps the parameters are `DTensor`s, for growth, checkpoints and optimizers that need whole matrices;
clipping and AdamW work on this process' rows (`mine`). Inside a forward pass they are plain tensors.
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
    """Lay out a model, each block by itself; `methods` are ways to call it besides `forward`.

    Gradients are added up in the precision `reduce`, by default their own.
    """
    policy = MixedPrecisionPolicy(reduce_dtype=reduce)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=mesh.size(mesh.ndim - 1) > 1, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for method in methods:
        register_fsdp_forward_method(model, method)


def reduce_now(model: nn.Module, now: bool) -> None:
    """Say whether the next backward pass sums gradients over replicas, or leaves that to a later one for all so far.

    Sums over shards are made in every pass.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(now)


def reduce_rest(model: nn.Module, processes: Processes, reduce: torch.dtype | None = None) -> None:
    """Average the gradients of a model that is not laid out, after all its backward passes."""
    if not isinstance(model, FSDPModule):
        processes.average([parameter.grad for parameter in model.parameters() if parameter.grad is not None], reduce)


def reshard(model: nn.Module) -> None:
    """Give up the whole weights that a forward pass without a backward pass leaves behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def mine(parameter: nn.Parameter) -> nn.Parameter:
    """This process' rows of a parameter and of its gradient as a plain parameter, in the same memory.

    Arithmetic on plain tensors is spared the bookkeeping of `DTensor`s, which takes a GPU's step milliseconds.
    """
    if not is_sharded(parameter):
        return parameter
    with torch.no_grad():
        plain = nn.Parameter(rows(parameter))
        plain.grad = None if parameter.grad is None else rows(parameter.grad)
    return plain


def rows(tensor: Tensor) -> Tensor:
    """This process' rows of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def local(tensor: Tensor) -> tuple[Tensor, int]:
    """The same, and the place of their first element in the whole, row by row."""
    if not is_sharded(tensor):
        return tensor, 0
    _, (row, *_) = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), row * math.prod(tensor.shape[1:])


def as_shard(own: Tensor, like: DTensor) -> DTensor:
    """This process' rows as a part of a tensor that is laid out like another."""
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def over_shards(squares: Tensor, like: DTensor) -> Tensor:
    """The sum over the shards of a tensor like this one, of what each process has for its own."""
    parts = [Partial() if isinstance(placement, Shard) else Replicate() for placement in like.placements]
    return DTensor.from_local(squares, like.device_mesh, parts, run_check=False).full_tensor()


def part(whole: Tensor, like: Tensor) -> Tensor:
    """The rows of a whole tensor that this process has of one like it."""
    own, first = local(like)
    return whole.flatten()[first : first + own.numel()].view_as(own) if is_sharded(like) else whole


def laid_out(whole: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every process has, laid out as one of the same shape."""
    if not is_sharded(like) or whole.shape != like.shape:
        return whole
    return as_shard(part(whole, like).contiguous(), like)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, which all processes have to ask for."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor lies on several processes."""
    return isinstance(tensor, DTensor)
