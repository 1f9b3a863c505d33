"""Calling other people's blocks: what they are given, what they return, and calls that leave no trace."""

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from raptr.models.blocklists import BlockList

# Where `transformers` defines the hooks that collect hidden states from the blocks.
RECORDERS = "transformers.utils.output_capturing"


def check_caches(blocks: BlockList, values: Iterable[object]) -> None:
    """Refuse caches of an earlier call: models read how long they are from a layer that may be bypassed."""
    for value in values:
        if any(_filled(value, layer) for layer in range(len(blocks.module))):
            raise ValueError(
                f"running: the blocks at {blocks.path!r} got a filled key-value cache, to which idle layers and "
                "heads add nothing. Use use_cache=False, in `generate` too."
            )


def _filled(cache: object, layer: int) -> bool:
    """Whether a cache of `transformers` holds something of a layer: keys and values, or a recurrent state."""
    for question in ("get_seq_length", "has_previous_state"):
        ask = getattr(cache, question, None)
        try:
            if ask is not None and bool(ask(layer)):
                return True
        except (AttributeError, IndexError, ValueError):
            continue  # a layer or a cache of the other kind
    return False


def recorders_of(block: nn.Module) -> dict[int, Any]:
    """The hooks with which `transformers` collects what a block returns: they must see what the stand-in returns."""
    hooks = original(block)._forward_hooks
    return {key: hook for key, hook in hooks.items() if getattr(hook, "__module__", "") == RECORDERS}


@contextmanager
def unrecorded(block: nn.Module) -> Iterator[list[Any]]:
    """Keep the recorders of a block from what it returns; gives them to be called with something else."""
    hooks, recorders = original(block)._forward_hooks, recorders_of(block)
    before = dict(hooks)
    for key in recorders:
        del hooks[key]
    try:
        yield list(recorders.values())
    finally:
        if recorders:
            hooks.clear()
            hooks.update(before)


def original(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile`'s wrapper, or the module itself."""
    original = module._modules.get("_orig_mod")
    return module if original is None else original


def hidden_states(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states: the first positional argument, or the one named as the block's first parameter."""
    name = "" if args else next(iter(inspect.signature(original(block).forward).parameters), "")
    x = args[0] if args else kwargs.get(name)
    if not isinstance(x, Tensor):
        raise ValueError(
            f"running: a {type(block).__name__} got no hidden states; a tensor as first argument is allowed"
        )
    return x


def check_output(output: Any, x: Tensor) -> None:
    """Refuse what a bypass cannot imitate."""
    first = output[0] if type(output) in (tuple, list) and output else output
    if not isinstance(first, Tensor):
        raise ValueError(
            f"running: a block returned {type(output).__name__}; a tensor, or a tuple or list that begins "
            "with the hidden states, is allowed"
        )
    # Nested tensors (`nn.TransformerEncoder` with padding makes them) have no shape to compare.
    if first.is_nested != x.is_nested or (not x.is_nested and first.shape != x.shape):
        raise ValueError(
            f"running: a block made {tuple(first.shape)} of {tuple(x.shape)}; only residual blocks, which "
            "keep the shape, are allowed"
        )


def probe(block: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a block returns, from one run that leaves no trace."""
    with aside(block, x):
        output = block(*map(_apart, args), **{name: _apart(value) for name, value in kwargs.items()})
        check_output(output, x)
    return output


def stored(block: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[object]:
    """The keys that a block writes to in mappings that it is given, from one run that leaves no trace."""
    pairs = {key: (value, _apart(value)) for key, value in [*enumerate(args), *kwargs.items()]}
    with aside(block, x), suppress(KeyError):  # a block that reads what is missing too
        block(*(pairs[place][1] for place in range(len(args))), **{name: pairs[name][1] for name in kwargs})
    return [
        key
        for given, written in pairs.values()
        if isinstance(written, MutableMapping)
        for key in written
        if written[key] is not given.get(key)
    ]


@contextmanager
def aside(block: nn.Module, x: Tensor) -> Iterator[None]:
    """Calls of a block that leave no trace: without gradients, random numbers and buffers put back."""
    device = [] if x.device.type == "cpu" else [x.device]
    kind = "cuda" if x.device.type == "cpu" else x.device.type
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    with torch.no_grad(), torch.random.fork_rng(device, device_type=kind), ExitStack() as stack:
        # Compiled blocks run uncompiled here: a graph without gradients would be made for this one run.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in original(block).modules():
            stack.enter_context(unrecorded(module))
        try:
            yield
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)


def call_uncached(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a block returns without a cache of `transformers`, which it would write to."""
    return block(*map(_no_cache, args), **{name: _no_cache(value) for name, value in kwargs.items()})


def _no_cache(value: Any) -> Any:
    return _apart(value) if getattr(value, "get_seq_length", None) is None else None


def _apart(value: Any) -> Any:
    """A copy of a mapping in which blocks may store what later ones read (Gemma 4's keys and values)."""
    return copy.copy(value) if isinstance(value, MutableMapping) else value
