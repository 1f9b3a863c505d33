"""Depth subnetworks inside models whose `forward` takes no subnetwork.

    routed = attach(model)
    with running(routed, subnetwork):
        loss = model(**batch).loss
    loss.backward()

Inside `running` every entry of the model's block list is a stand-in that calls the real block, scales it or
leaves it out; on exit the real blocks are back. Nothing else is touched: no `forward` is rebound, no hook is
registered, parameter and state-dict names are the same inside and outside. The choice is made outside the
blocks, so blocks compiled one by one are never recompiled for it. A model compiled as a whole is refused: its
one graph would be compiled anew for every subset (as it is, unseen, when `torch.compile` wraps the model later).

An encoder-decoder has two lists. `attach(model, ["encoder.block", "decoder.block"])` takes their blocks as the layers
of one subnetwork, in this order; nested `running` of one `Routed` per list gives each a subnetwork of its own.

What a block returns (a tensor, or a tuple or list that begins with the hidden states) is learnt from blocks that run,
and so is what they pass on to the next block beside the hidden states (T5's position bias, for example): a bypassed
block passes on what it was given, and a scale leaves it as it is. Where a bypassed block comes before any has run,
that block runs once, without gradients and with random numbers and buffers put back: one such probe per list and
combination of call flags.

A scale multiplies the whole block, y = x + s·(block(x) - x): the paper's definition. `output_hidden_states` of
`transformers` has its entry for every layer; a bypassed one repeats its input. A checkpoint around several blocks
needs its backward pass inside `running` too; checkpointing within each block (as in `transformers`) does not.

Refused, since the result would be wrong without a word: a context in which none of the blocks is called (a copy of
the model ran), a block list replaced after `attach`, a bypassed block that computes what the others receive, a filled
key-value cache with a layer bypassed (`generate` needs use_cache=False), `nn.DataParallel` on several GPUs, and
`load_state_dict` or pickling inside `running`.
"""

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex, final

import torch
from torch import Tensor, nn

from raptr.models.blocklists import BlockList, Blocks, Key, find_lists
from raptr.subnetworks.value import Subnetwork

# Where `transformers` defines the hooks that collect hidden states from the blocks.
RECORDERS = "transformers.utils.output_capturing"


@final
class Routed:
    """A model with the lists of its residual blocks; made by `attach`, used by `running`."""

    def __init__(self, model: nn.Module, lists: tuple[BlockList, ...]) -> None:
        self.model, self.lists = model, lists
        # Whether a block was called since `running` was entered.
        self._called = False

    @property
    def path(self) -> str:
        """Where the blocks are in the model; several lists are separated by commas."""
        return ", ".join(blocks.path for blocks in self.lists)

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of all lists, in order."""
        return [block for blocks in self.lists for block in blocks.module]

    @property
    def layers(self) -> int:
        """How many blocks there are."""
        return sum(len(blocks.module) for blocks in self.lists)


@final
class _StandIn(nn.Module):
    """Takes a block's place in the list for one context: runs it plainly, scaled, or not at all."""

    block: nn.Module

    def __init__(
        self, routed: Routed, blocks: BlockList, block: nn.Module, layer: int, scale: float, uncached: bool
    ) -> None:
        super().__init__()
        self.block = block
        self.training = block.training
        self._routed, self._blocks, self._layer = routed, blocks, layer
        self._scale, self._uncached = scale, uncached

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        routed, blocks, block, scale = self._routed, self._blocks, self.block, self._scale
        routed._called = True
        x = _hidden(block, args, kwargs)
        given: dict[Key, Any] = dict([*enumerate(args), *kwargs.items()])
        if self._uncached:
            _check_caches(blocks, given.values())
        given = blocks.receive(given)
        args, kwargs = tuple(given[place] for place in range(len(args))), {name: given[name] for name in kwargs}
        flags = (block.training, *(entry for entry in given.items() if isinstance(entry[1], bool)))
        if scale == 0:
            probed = None if flags in blocks.returns else _probe(block, x, args, kwargs)
            bypassed = blocks.bypass(self._layer, x, flags, given, probed)
            for record in _recorders(block).values():
                record(block, (x,), bypassed)
            return bypassed
        # Inference tensors do not count their in-place changes.
        version = 0 if x.is_inference() else x._version
        if scale == 1:
            output, recorders = block(*args, **kwargs), []
        else:
            with _unrecorded(block) as recorders:
                output = block(*args, **kwargs)
        _check_output(output, x)
        blocks.learn(flags, given, output)
        if scale == 1:
            return output
        if not x.is_inference() and x._version != version:
            raise ValueError(
                f"running: the blocks at {blocks.path!r} change their input in place, so that "
                "x + s·(block(x) - x) cannot be formed; scales of 0 and 1 are allowed"
            )
        first, *rest = [output] if isinstance(output, Tensor) else output
        y = x + scale * (first - x)
        scaled = y if isinstance(output, Tensor) else type(output)((y, *rest))
        for record in recorders:
            record(block, (x,), scaled)
        return scaled

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

    # Loading would find no weights here, and a saved model would run this subnetwork for ever.
    def _load_from_state_dict(self, *_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError(
            f"load_state_dict was called inside `running`, where the blocks at {self._blocks.path!r} are stand-ins. "
            "Load the weights outside of it."
        )

    def __reduce_ex__(self, _protocol: SupportsIndex) -> Any:
        raise RuntimeError(
            f"a model was pickled inside `running`, where the blocks at {self._blocks.path!r} are stand-ins. "
            "Save it outside, or save its state_dict."
        )


def attach(model: nn.Module, blocks: str | Blocks | Sequence[str | Blocks] | None = None) -> Routed:
    """Find the model's list of residual blocks (or take those named or given), changing nothing in it."""
    _check_uncompiled("attach", model)
    lists = find_lists(model, blocks)
    for one in lists:
        names = one.path.split(".")
        for depth in range(len(names)):  # a module of the model, such as the one inside a LightningModule
            _check_uncompiled("attach", model.get_submodule(".".join(names[:depth])))
        if any(isinstance(block, _StandIn) for block in one.module):
            raise RuntimeError(f"attach: the blocks at {one.path!r} are inside `running`; attach outside of it")
    return Routed(model, lists)


@contextmanager
def running(routed: Routed, subnetwork: Subnetwork) -> Iterator[None]:
    """Let the model run this subnetwork inside the context; the whole model is back on exit."""
    _check(routed, subnetwork)
    routed._called = False
    real = [(blocks, name, block) for blocks in routed.lists for name, block in blocks.entries().items()]
    partial = {blocks for (blocks, _, _), scale in zip(real, subnetwork.scales, strict=True) if scale == 0}
    try:
        for layer, (blocks, name, block) in enumerate(real):
            first = layer == 0 or real[layer - 1][0] is not blocks
            stand_in = _StandIn(routed, blocks, block, layer, subnetwork.scales[layer], first and blocks in partial)
            blocks.module._modules[name] = stand_in
        yield
        if not routed._called:
            raise RuntimeError(
                f"running: no block at {routed.path!r} was called, so the subnetwork did not run. Call the model that "
                "was attached; a copy of it needs `attach` of its own."
            )
    except KeyError as error:
        # `nn.DataParallel` looks up the copy of every module that it finds in the block list.
        if any(isinstance(key, _StandIn) for key in error.args):
            raise RuntimeError(
                "running: nn.DataParallel copies the model to each GPU, and the copies cannot run a subnetwork. "
                "Use nn.parallel.DistributedDataParallel, or one GPU."
            ) from None
        raise
    finally:
        for blocks, name, block in real:
            blocks.module._modules[name] = block
            blocks.forget()


def _check(routed: Routed, subnetwork: Subnetwork) -> None:
    _check_uncompiled("running", routed.model)
    for blocks in routed.lists:
        try:
            there = routed.model.get_submodule(blocks.path)
        except AttributeError:
            there = None
        if there is not blocks.module:
            raise RuntimeError(
                f"running: the block list at {blocks.path!r} was replaced after `attach`, so the model would run "
                "without the subnetwork. Attach the model again."
            )
    if any(isinstance(block, _StandIn) for block in routed.blocks):
        raise RuntimeError(f"running: the blocks at {routed.path!r} run a subnetwork already; leave it first")
    if subnetwork.layers != routed.layers:
        raise ValueError(
            f"running: the subnetwork has {subnetwork.layers} layers, and there are {routed.layers} blocks at "
            f"{routed.path!r}. Make the method for shape=Shape(layers={routed.layers}); a method that grows the model "
            "needs one with method.shape(step).layers blocks, attached again after each growth. Layers that share one "
            "block cannot be chosen one by one."
        )
    if subnetwork.heads is not None or subnetwork.parts is not None:
        raise ValueError(
            "running: the subnetwork selects heads or MLP parts, and attached models run whole layers. "
            "Make the method without the settings heads and parts."
        )
    if subnetwork.scaled == "branches" and any(scale not in (0, 1) for scale in subnetwork.scales):
        raise ValueError(
            "running: the subnetwork scales residual branches (scaled is 'branches'), which cannot be seen inside an "
            "attached block. Make the method with scaled='layer', so that it scales whole layers."
        )
    if (subnetwork.head_gates, subnetwork.part_gates) != (None, None):
        raise ValueError(
            "running: the subnetwork has gates of heads or MLP parts, which attached blocks do not take. Make the "
            "method without the settings heads and parts."
        )


def _check_uncompiled(function: str, model: nn.Module) -> None:
    if _original(model) is not model or model._compiled_call_impl is not None:
        raise ValueError(f"{function}: the model is compiled as a whole; compile each of its blocks instead")


def _check_caches(blocks: BlockList, values: Iterable[object]) -> None:
    """Refuse caches of an earlier call: models read how long they are from a layer that may be bypassed."""
    for value in values:
        if any(_filled(value, layer) for layer in range(len(blocks.module))):
            raise ValueError(
                f"running: the blocks at {blocks.path!r} got a filled key-value cache, which bypassed layers do not "
                "keep up with. Use use_cache=False, in `generate` too."
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


def _recorders(block: nn.Module) -> dict[int, Any]:
    """The hooks with which `transformers` collects what a block returns: they must see what the stand-in returns."""
    hooks = _original(block)._forward_hooks
    return {key: hook for key, hook in hooks.items() if getattr(hook, "__module__", "") == RECORDERS}


@contextmanager
def _unrecorded(block: nn.Module) -> Iterator[list[Any]]:
    """Keep the recorders of a block from what it returns; gives them to be called with something else."""
    hooks, recorders = _original(block)._forward_hooks, _recorders(block)
    before = dict(hooks)
    for key in recorders:
        del hooks[key]
    try:
        yield list(recorders.values())
    finally:
        if recorders:
            hooks.clear()
            hooks.update(before)


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


def _check_output(output: Any, x: Tensor) -> None:
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


def _probe(block: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a block returns, from one run that leaves no trace."""
    device = [] if x.device.type == "cpu" else [x.device]
    kind = "cuda" if x.device.type == "cpu" else x.device.type
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    with torch.no_grad(), torch.random.fork_rng(device, device_type=kind):
        # Compiled blocks run uncompiled here: a graph without gradients would be made for this one run.
        with torch.compiler.set_stance("force_eager"), _unrecorded(block):
            output = block(*args, **kwargs)
        _check_output(output, x)
        for buffer, before in buffers:
            buffer.copy_(before)
    return output
