"""Calls of other people's blocks: their arguments and outputs, and calls without side effects."""

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from raptr.models.blocklists import BlockList

# The module of `transformers` that defines the forward hooks which collect the blocks' hidden states.
RECORDERS = "transformers.utils.output_capturing"


def check_caches(blocks: BlockList, values: Iterable[object]) -> None:
    """Refuse key-value caches filled by an earlier call: models read their length from a layer that may be bypassed."""
    for value in values:
        if any(_filled(value, layer) for layer in range(len(blocks.module))):
            raise ValueError(
                f"running: the blocks at {blocks.path!r} got a filled key-value cache, to which idle layers and "
                "heads add nothing. Use use_cache=False, in `generate` too."
            )


def _filled(cache: object, layer: int) -> bool:
    """Whether a cache of `transformers` has an entry for this layer: keys and values, or a recurrent state."""
    for question in ("get_seq_length", "has_previous_state"):
        ask = getattr(cache, question, None)
        try:
            if ask is not None and bool(ask(layer)):
                return True
        except (AttributeError, IndexError, ValueError):
            continue  # this kind of layer or cache cannot answer the question
    return False


def recorders_of(block: nn.Module) -> dict[int, Any]:
    """The block's hooks that collect its outputs for `transformers`; they must see the stand-in's output instead."""
    hooks = original(block)._forward_hooks
    return {key: hook for key, hook in hooks.items() if getattr(hook, "__module__", "") == RECORDERS}


@contextmanager
def unrecorded(block: nn.Module) -> Iterator[list[Any]]:
    """Remove the block's recorder hooks inside the context, and yield them to be called with another output."""
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
    """The module that `torch.compile` wrapped, or the module itself if it is not wrapped."""
    original = module._modules.get("_orig_mod")
    return module if original is None else original


def hidden_states(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states among a block's arguments: the first one, positional or by its keyword."""
    name = "" if args else next(iter(inspect.signature(original(block).forward).parameters), "")
    x = args[0] if args else kwargs.get(name)
    if not isinstance(x, Tensor):
        raise ValueError(
            f"running: a {type(block).__name__} got no hidden states; a tensor as first argument is allowed"
        )
    return x


def check_output(output: Any, x: Tensor) -> None:
    """Refuse an output that a bypass cannot imitate: hidden states must come alone or first, and be shaped like `x`."""
    first = output[0] if type(output) in (tuple, list) and output else output
    if not isinstance(first, Tensor):
        raise ValueError(
            f"running: a block returned {type(output).__name__}; a tensor, or a tuple or list that begins "
            "with the hidden states, is allowed"
        )
    # Nested tensors, which `nn.TransformerEncoder` makes of padded input, have no shape to compare.
    if first.is_nested != x.is_nested or (not x.is_nested and first.shape != x.shape):
        raise ValueError(
            f"running: a block made {tuple(first.shape)} of {tuple(x.shape)}; only residual blocks, which "
            "keep the shape, are allowed"
        )


def probe(block: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the block once without side effects, and return its output."""
    with aside(block, x):
        output = block(*map(_apart, args), **{name: _apart(value) for name, value in kwargs.items()})
        check_output(output, x)
    return output


def stored(block: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[object]:
    """Call the block once without side effects, and return the keys that it writes in its mapping arguments."""
    pairs = {key: (value, _apart(value)) for key, value in [*enumerate(args), *kwargs.items()]}
    with aside(block, x), suppress(KeyError):  # this block, too, may miss a key
        block(*(pairs[place][1] for place in range(len(args))), **{name: pairs[name][1] for name in kwargs})
    return [
        key
        for before, written in pairs.values()
        if isinstance(written, MutableMapping)
        for key in written
        if written[key] is not before.get(key)
    ]


@contextmanager
def aside(block: nn.Module, x: Tensor) -> Iterator[None]:
    """Make calls of a block inside the context free of side effects.

    They build no graph, reach no recorder hook, and run uncompiled. On exit random-number state and buffers are
    restored.
    """
    device = [] if x.device.type == "cpu" else [x.device]
    kind = "cuda" if x.device.type == "cpu" else x.device.type
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    with torch.no_grad(), torch.random.fork_rng(device, device_type=kind), ExitStack() as stack:
        # Otherwise compiled blocks would be compiled once more, without gradients, for this one call.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in original(block).modules():
            stack.enter_context(unrecorded(module))
        try:
            yield
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)


def call_uncached(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the block without the key-value cache of `transformers`, to which it would write."""
    return block(*map(_no_cache, args), **{name: _no_cache(value) for name, value in kwargs.items()})


def _no_cache(value: Any) -> Any:
    return _apart(value) if getattr(value, "get_seq_length", None) is None else None


def _apart(value: Any) -> Any:
    """Copy a mapping, in which blocks may store values for later blocks (Gemma 4's keys and values)."""
    return copy.copy(value) if isinstance(value, MutableMapping) else value
