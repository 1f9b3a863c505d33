"""Depth subnetworks inside models whose `forward` takes no subnetwork.

    routed = attach(model)
    with running(routed, subnetwork):
        loss = model(**batch).loss
    loss.backward()

Inside `running` every entry of the model's block list is a stand-in that calls the real block, scales it or
leaves it out; on exit the real blocks are back. Nothing else is touched: no `forward` is rebound, no hook is
registered, parameter and state-dict names are the same inside and outside. The choice is made outside the
blocks, so blocks compiled one by one are never recompiled for it. A model compiled as a whole is refused: its
one graph would be compiled anew for every subset.

What a block returns (a tensor, or a tuple that begins with the hidden states) is learnt from blocks that run.
Where a bypassed block comes before any has run, that block runs once, without gradients and with random
numbers and buffers put back: one such probe per `Routed` and combination of call flags.

A scale multiplies the whole block, y = x + s·(block(x) - x): the paper's definition. Key-value caches are not
supported. A checkpoint around several blocks needs its backward pass inside `running` too; checkpointing
within each block (as in `transformers`) does not.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from raptr.subnetworks.value import Subnetwork


@final
class Routed:
    """A model with the list of its residual blocks; made by `attach`, used by `running`."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList, path: str) -> None:
        self.model, self.blocks, self.path = model, blocks, path
        # How many entries follow the hidden states in what a block returns (None: a bare tensor), by call
        # flags, since flags such as `output_attentions` decide it.
        self._returns: dict[tuple[object, ...], int | None] = {}
        # What the last block returned besides the hidden states, to notice a model that hands it on.
        self._carried: tuple[Tensor, ...] = ()

    @property
    def layers(self) -> int:
        """How many blocks there are."""
        return len(self.blocks)


@final
class _StandIn(nn.Module):
    """Takes a block's place in the list for one context: runs it plainly, scaled, or not at all."""

    block: nn.Module

    def __init__(self, routed: Routed, block: nn.Module, scale: float, partial: bool) -> None:
        super().__init__()
        self.block = block
        self.training = block.training
        self._routed, self._scale, self._partial = routed, scale, partial

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        routed, block, scale = self._routed, self.block, self._scale
        x = _hidden(block, args, kwargs)
        named = (*enumerate(args), *kwargs.items())
        if self._partial and any(value is extra for _, value in named for extra in routed._carried):
            raise ValueError(
                f"running: the blocks at {routed.path!r} hand each other more than the hidden states (a "
                "shared position bias, for instance), which a bypassed block cannot pass on; run all of them"
            )
        flags = (block.training, *(entry for entry in named if isinstance(entry[1], bool)))
        if scale == 0:
            if flags not in routed._returns:
                routed._returns[flags] = _probe(block, x, args, kwargs)
            extras = routed._returns[flags]
            return x if extras is None else (x, *(None,) * extras)
        # Inference tensors do not count their in-place changes.
        version = 0 if x.is_inference() else x._version
        output = block(*args, **kwargs)
        routed._returns[flags] = _extras(output, x)
        first, *rest = [output] if isinstance(output, Tensor) else output
        routed._carried = tuple(extra for extra in rest if isinstance(extra, Tensor) and extra is not first)
        if scale == 1:
            return output
        if not x.is_inference() and x._version != version:
            raise ValueError(
                f"running: the blocks at {routed.path!r} change their input in place, so that "
                "x + s·(block(x) - x) cannot be formed; scales of 0 and 1 are allowed"
            )
        y = x + scale * (first - x)
        return y if isinstance(output, Tensor) else (y, *rest)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Python's own protocols must not find the block's methods here; models read plain settings.
            if name.startswith("__") or name == "block":
                raise
            return getattr(self.block, name)

    # The next three keep names, keys and copies made inside the context those of the real block.
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.block.named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.block.state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.block, memo)


def attach(model: nn.Module, blocks: str | nn.ModuleList | None = None) -> Routed:
    """Find the model's list of residual blocks (or take the one named or given), changing nothing in it."""
    if _original(model) is not model or model._compiled_call_impl is not None:
        raise ValueError("attach: the model is compiled as a whole; compile each of its blocks instead")
    modules = model.named_modules(remove_duplicate=False)
    lists = {path: module for path, module in modules if isinstance(module, nn.ModuleList)}
    if blocks is None:
        path = _largest(_outermost(lists))
    elif isinstance(blocks, str):
        path = blocks
    else:
        path = next((name for name, module in lists.items() if module is blocks), "(the list given)")
    if path not in lists or len(lists[path]) == 0:
        raise _refusal(f"blocks is {path!r}, which is not a filled nn.ModuleList of the model", lists)
    if any(isinstance(block, _StandIn) for block in lists[path]):
        raise RuntimeError(f"attach: the blocks at {path!r} are inside `running`; attach outside of it")
    return Routed(model, lists[path], path)


@contextmanager
def running(routed: Routed, subnetwork: Subnetwork) -> Iterator[None]:
    """Let the model run this subnetwork inside the context; the whole model is back on exit."""
    _check(routed, subnetwork)
    partial = subnetwork.size < subnetwork.layers
    entries = routed.blocks._modules
    real = {name: block for name, block in entries.items() if block is not None}
    try:
        for (name, block), scale in zip(real.items(), subnetwork.scales, strict=True):
            entries[name] = _StandIn(routed, block, scale, partial)
        yield
    finally:
        entries.update(real)
        routed._carried = ()


def _check(routed: Routed, subnetwork: Subnetwork) -> None:
    if any(isinstance(block, _StandIn) for block in routed.blocks):
        raise RuntimeError(f"running: the blocks at {routed.path!r} run a subnetwork already; leave it first")
    if subnetwork.layers != routed.layers:
        raise ValueError(
            f"running: the subnetwork has {subnetwork.layers} layers; {routed.layers} are allowed, "
            f"the blocks at {routed.path!r}"
        )
    if subnetwork.heads is not None or subnetwork.parts is not None:
        raise ValueError(
            "running: the subnetwork selects heads or MLP parts; in attached models whole layers are allowed"
        )
    if subnetwork.scaled == "branches" and any(scale not in (0, 1) for scale in subnetwork.scales):
        raise ValueError(
            "running: scaled is 'branches', and an attached block has no visible branches; "
            "use scaled='layer', or scales of 0 and 1"
        )


def _original(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile`'s wrapper, or the module itself."""
    original = module._modules.get("_orig_mod")
    return module if original is None else original


def _hidden(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states: the first positional argument, or the one named as the block's first parameter."""
    name = "" if args else next(iter(inspect.signature(_original(block).forward).parameters), "")
    x = args[0] if args else kwargs.get(name)
    if not isinstance(x, Tensor):
        raise ValueError(
            f"running: a {type(block).__name__} got no hidden states; a tensor as first argument is allowed"
        )
    return x


def _extras(output: object, x: Tensor) -> int | None:
    """What a block returned beside the hidden states; refuses what a bypass cannot imitate."""
    first = output[0] if type(output) is tuple and output else output
    if not isinstance(first, Tensor):
        raise ValueError(
            f"running: a block returned {type(output).__name__}; a tensor, or a tuple that begins with "
            "the hidden states, is allowed"
        )
    if first.shape != x.shape:
        raise ValueError(
            f"running: a block made {tuple(first.shape)} of {tuple(x.shape)}; only residual blocks, which "
            "keep the shape, are allowed"
        )
    return len(output) - 1 if type(output) is tuple else None


def _probe(block: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Run a block once for the structure of what it returns, leaving no trace."""
    device = [] if x.device.type == "cpu" else [x.device]
    kind = "cuda" if x.device.type == "cpu" else x.device.type
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    with torch.no_grad(), torch.random.fork_rng(device, device_type=kind):
        # Compiled blocks run uncompiled here: a graph without gradients would be made for this one run.
        with torch.compiler.set_stance("force_eager"):
            extras = _extras(block(*args, **kwargs), x)
        for buffer, before in buffers:
            buffer.copy_(before)
    return extras


def _outermost(lists: Mapping[str, nn.ModuleList]) -> dict[str, nn.ModuleList]:
    """The lists that are not inside an entry of another one."""
    return {
        path: blocks
        for path, blocks in lists.items()
        if not any(path != other and path.startswith(f"{other}.") for other in lists)
    }


def _largest(lists: Mapping[str, nn.ModuleList]) -> str:
    """The path of the one list that is plainly the model's blocks."""
    sizes = {
        path: (len(blocks), sum(parameter.numel() for parameter in blocks.parameters()))
        for path, blocks in lists.items()
        if len({type(block) for block in blocks}) == 1
    }
    for path, (length, numel) in sizes.items():
        rest = [size for other, size in sizes.items() if other != path]
        # Twice, so that an encoder and a decoder of equal depth stay a question for the user.
        if numel > 0 and all(length >= other[0] and numel >= 2 * other[1] for other in rest):
            return path
    raise _refusal("no single list of blocks of one type is both the longest and by far the largest", lists)


def _refusal(problem: str, lists: Mapping[str, nn.ModuleList]) -> ValueError:
    found = ", ".join(f"{path!r} ({len(blocks)} entries)" for path, blocks in _outermost(lists).items())
    return ValueError(f"attach: {problem}; pass blocks= with one of: {found or 'none found in this model'}")
