"""Run subnetworks inside models whose `forward` takes no subnetwork. A subnetwork may leave out layers and, in blocks
whose structure is recognised, also heads and MLP parts.

    routed = attach(model)
    with running(routed, subnetwork):
        loss = model(**batch).loss
    loss.backward()

Inside `running` every entry of the model's block list is a stand-in, which calls the real block, scales its update or
bypasses it; on exit the real blocks are put back. Nothing else is touched: no `forward` is rebound, no hook stays
behind, and the names of parameters and state-dict keys are the same inside and outside. The choice is made outside
the blocks, so blocks that are compiled one by one are not recompiled for another subnetwork. A model that is compiled
as a whole is refused, because its single graph would be recompiled for every subset. (A wrapper that `torch.compile`
puts around the model later cannot be detected, and does recompile.)

An encoder-decoder has two lists. `attach(model, ["encoder.block", "decoder.block"])` takes the blocks of both, in this
order, as the layers of one subnetwork. To run a separate subnetwork in each list, attach each list by itself and nest
the two `running`.

The stand-ins learn from the blocks that run what a block returns (a tensor, or a tuple or list that begins with the
hidden states), and what it passes to the next block besides the hidden states, such as T5's position bias. A bypassed
block passes on such a value as it received it, and scales do not apply to it. If a block is bypassed before any block
of its list has run, it runs once as a probe, without gradients; random-number state and buffers are restored
afterwards. There is one probe for each list and combination of call flags.

Heads and MLP parts can be selected in blocks that `narrowing` recognises; `routed.shape` counts them. In other blocks
a subnetwork that selects some of them is refused. While a block runs in part, stand-ins for its linear layers use only
the kept slices of their weights. The first time that a layer runs in part, it also runs whole, without gradients, to
check that the kept slices compute the same as within the whole block.

A scale multiplies the update of the whole block, y = x + s·(block(x) - x), which is the paper's definition.
`output_hidden_states` of `transformers` still has one entry for each layer; a bypassed layer repeats its input.
Activation checkpointing around several blocks needs the backward pass inside `running` too; checkpointing within each
block, as in `transformers`, does not.

Some uses would silently give wrong results and are refused: a context in which no block is called (a copy of the model
ran), a block list that was replaced after `attach`, bypassing a block that computes what other blocks receive or read,
a list whose entries are only parts of layers (XLM's attentions), a filled key-value cache in a subnetwork that leaves
anything out (`generate` needs use_cache=False), `nn.DataParallel` on several GPUs, and `load_state_dict` or pickling
inside `running`.
"""

import copy
import reprlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, SupportsIndex, final

import torch
from torch import Tensor, nn

from raptr.models.blockcalls import (
    aside,
    call_uncached,
    check_caches,
    check_output,
    hidden_states,
    original,
    probe,
    recorders_of,
    stored,
    unrecorded,
)
from raptr.models.blocklists import BlockList, Blocks, Key, find_lists
from raptr.models.inputs import pack, signature, unpack
from raptr.models.narrowing import Anatomy, Part, anatomies, only_depth
from raptr.subnetworks.value import Kept, Shape, Subnetwork, Width


@final
class Routed:
    """A model and the lists of its residual blocks, as `attach` returns it for `running`."""

    def __init__(self, model: nn.Module, lists: tuple[BlockList, ...], mlp_parts: int | None = None) -> None:
        self.model, self.lists = model, lists
        # How each block divides into heads and MLP parts; empty if subnetworks can only leave out whole layers.
        self.anatomies: tuple[Anatomy, ...] = anatomies([original(block) for block in self.blocks], mlp_parts)
        # The sequence length of the last batch for which a layer ran in part.
        self.length = 0
        # Whether a block was called since `running` was entered.
        self.called = False
        # The (axis, layer) pairs that have passed `Part.check`.
        self._checked: set[tuple[Width, int]] = set()

    @property
    def path(self) -> str:
        """The path of the block list in the model; the paths of several lists are separated by commas."""
        return ", ".join(blocks.path for blocks in self.lists)

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of all lists, in order."""
        return [block for blocks in self.lists for block in blocks.module]

    @property
    def layers(self) -> int:
        """The number of blocks in all lists."""
        return sum(len(blocks.module) for blocks in self.lists)

    @property
    def shape(self) -> Shape:
        """The shape to make a method for. Heads that share keys and values count as one; unknown counts are 1."""
        first = next(iter(self.anatomies), None)
        return Shape(self.layers) if first is None else Shape(self.layers, first.heads, first.parts)

    def layers_run(self, subnetwork: Subnetwork, length: int | None = None) -> float:
        """Return how many layers run; a layer that runs in part counts as its share of the whole layer's FLOPs.

        This share depends on the sequence length; None: the length of the last batch for which a layer ran in part.
        """
        if not _axes(subnetwork):
            return subnetwork.size
        _check_axes(self, subnetwork)
        length = self.length if length is None else length
        total = 0.0
        for layer in subnetwork.kept:
            whole = self.anatomies[layer]
            heads = whole.heads if subnetwork.heads is None else len(subnetwork.heads[layer])
            parts = whole.parts if subnetwork.parts is None else len(subnetwork.parts[layer])
            total += whole.flops(heads, parts, length) / whole.flops(whole.heads, whole.parts, length)
        return total

    def need(self, axis: Width, problem: str) -> None:
        """Raise a ValueError that begins with `problem` if the blocks cannot run in part along this axis."""
        if not self.anatomies:
            raise only_depth(problem, [original(block) for block in self.blocks], axis)
        if self.anatomies[0].units(axis) == 1:
            raise ValueError(
                f"{problem}; all heads of a layer share one key and value. Leave out the setting heads."
                if axis == "heads"
                else f"{problem}; MLPs of width {self.anatomies[0].mlp} are one part. Set mlp_parts to a divisor."
            )


@final
class _StandIn(nn.Module):
    """Takes a block's place in its list inside one `running`: runs the block unscaled, scaled, or not at all."""

    block: nn.Module

    def __init__(
        self,
        routed: Routed,
        blocks: BlockList,
        block: nn.Module,
        layer: int,
        scale: float,
        part: Part | None,
        uncached: bool,
    ) -> None:
        super().__init__()
        self.block = block
        self.training = block.training
        self._routed, self._blocks, self._layer = routed, blocks, layer
        self._scale, self._part, self._uncached = scale, part, uncached
        # The hidden states and arguments of the last call, if one of them is a mapping that blocks may write to.
        self._given: tuple[Tensor, tuple[Any, ...], dict[str, Any]] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        routed, blocks, block, scale = self._routed, self._blocks, self.block, self._scale
        routed.called = True
        x = hidden_states(block, args, kwargs)
        arguments: dict[Key, Any] = dict([*enumerate(args), *kwargs.items()])
        if self._uncached:
            check_caches(blocks, arguments.values())
        blocks.follow(self._layer, x)
        arguments = blocks.receive(arguments)
        args, kwargs = tuple(arguments[place] for place in range(len(args))), {name: arguments[name] for name in kwargs}
        # Without gradients, autograd does not hold the arguments of a running block, so they should not be kept here.
        keep = scale == 0 or torch.is_grad_enabled()
        if keep and any(isinstance(value, MutableMapping) for value in arguments.values()):
            self._given = x, args, kwargs
        flags = (block.training, *(entry for entry in arguments.items() if isinstance(entry[1], bool)))
        if scale == 0:
            probed = None if flags in blocks.returns else probe(block, x, args, kwargs)
            bypassed = blocks.bypass(self._layer, x, flags, arguments, probed)
            for record in recorders_of(block).values():
                record(block, (x,), bypassed)
            blocks.precede(self._layer, x)
            return bypassed
        # Inference tensors have no version counter.
        version = 0 if x.is_inference() else x._version
        if scale == 1:
            output, recorders = self._run(x, args, kwargs), []
        else:
            with unrecorded(block) as recorders:
                output = self._run(x, args, kwargs)
        check_output(output, x)
        blocks.learn(flags, arguments, output)
        first, *rest = [output] if isinstance(output, Tensor) else output
        if scale == 1:
            blocks.precede(self._layer, first)
            return output
        if not x.is_inference() and x._version != version:
            raise ValueError(
                f"running: the blocks at {blocks.path!r} change their input in place, so that "
                "x + s·(block(x) - x) cannot be formed; scales of 0 and 1 are allowed"
            )
        y = x + scale * (first - x)
        blocks.precede(self._layer, y)
        scaled = y if isinstance(output, Tensor) else type(output)((y, *rest))
        for record in recorders:
            record(block, (x,), scaled)
        return scaled

    def _run(self, x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        routed, block, part, layer = self._routed, self.block, self._part, self._layer
        call: Callable[..., Any] = block
        if part is not None:
            routed.length = x.shape[-2]
            if unchecked := {(axis, layer) for axis in part.axes} - routed._checked:
                with aside(block, x):
                    axis = part.check(lambda: call_uncached(block, args, kwargs))
                if axis is not None:
                    problem = f"running: the {axis} of the blocks at {self._blocks.path!r} depend on each other"
                    raise only_depth(problem, [original(block)], axis)
                routed._checked |= unchecked
            call = partial(part.run, block)
        try:
            return call(*args, **kwargs)
        except KeyError as error:
            self._check_stored(error)
            raise

    def _check_stored(self, missing: KeyError) -> None:
        """Refuse the subnetwork if a bypassed block would have stored the key that this block looks up in a mapping."""
        before = [entry for entry in self._blocks.module if isinstance(entry, _StandIn) and entry._layer < self._layer]
        storing = {entry: stored(entry.block, *entry._given) for entry in before if entry._given is not None}
        needed = [entry._layer + 1 for entry, keys in storing.items() if entry._scale == 0 and missing.args[0] in keys]
        if needed:
            layers = ", ".join(str(entry._layer + 1) for entry, keys in storing.items() if keys)
            raise ValueError(
                f"running: layer {needed[-1]} cannot be bypassed, since it stores what layer {self._layer + 1} of the "
                f"blocks at {self._blocks.path!r} reads (such as shared keys and values). Keep the layers that store "
                f"in every subnetwork: with raptr, name {layers} in the setting fixed."
            ) from None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Models read plain attributes of their blocks. Special methods must not resolve to the block's.
            if name.startswith("__") or name == "block":
                raise
            return getattr(self.block, name)

    # The next three methods answer for the real block, so that names, state-dict keys and copies are as outside.
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.block.named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.block.state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.block, memo)

    # A stand-in has no weights to load into, and a pickled one would run this subnetwork for ever.
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


def attach(
    model: nn.Module, blocks: str | Blocks | Sequence[str | Blocks] | None = None, *, mlp_parts: int | None = None
) -> Routed:
    """Find the model's list of residual blocks, or take the lists in `blocks`; the model is not changed.

    `blocks` is a list of blocks or its path in the model, or a sequence of these. `mlp_parts` is the number of parts
    that each MLP is cut into; None: 4, or 1 if an MLP's width is not a multiple of 4.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"attach: model is {reprlib.repr(model)}; a torch.nn.Module is allowed")
    _check_uncompiled("attach", model)
    lists = find_lists(model, blocks)
    for block_list in lists:
        names = block_list.path.split(".")
        for depth in range(len(names)):  # an inner model may be compiled, such as the one in a LightningModule
            _check_uncompiled("attach", model.get_submodule(".".join(names[:depth])))
        if any(isinstance(block, _StandIn) for block in block_list.module):
            raise RuntimeError(f"attach: the blocks at {block_list.path!r} are inside `running`; attach outside of it")
    return Routed(model, lists, mlp_parts)


@contextmanager
def running(routed: Routed, subnetwork: Subnetwork) -> Iterator[None]:
    """Let the model run this subnetwork inside the context, and restore the whole model on exit."""
    _check(routed, subnetwork)
    routed.called = False
    real = [(blocks, name, block) for blocks in routed.lists for name, block in blocks.entries().items()]
    incomplete = {
        blocks for (blocks, _, _), scale in zip(real, subnetwork.scales, strict=True) if scale == 0 or _axes(subnetwork)
    }
    parts = _parts(routed, subnetwork)
    try:
        for layer, (blocks, name, block) in enumerate(real):
            first = layer == 0 or real[layer - 1][0] is not blocks
            scale, uncached = subnetwork.scales[layer], first and blocks in incomplete
            blocks.module._modules[name] = _StandIn(routed, blocks, block, layer, scale, parts.get(layer), uncached)
        yield
        if not routed.called:
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


def _parts(routed: Routed, subnetwork: Subnetwork) -> dict[int, Part]:
    """The kept heads and MLP parts of each running layer; empty if all layers run whole."""
    if not _axes(subnetwork):
        return {}
    like = next(routed.model.parameters())
    parts: dict[int, Part] = {}
    inputs = unpack(pack(subnetwork, like.dtype).to(like.device), signature(subnetwork))
    for layer, layer_inputs in zip(subnetwork.kept, inputs, strict=True):
        index: dict[Width, Tensor | None] = {"heads": layer_inputs.heads_H, "parts": layer_inputs.parts_P}
        scales: dict[Width, Tensor | None] = {"heads": layer_inputs.head_scale, "parts": layer_inputs.part_scale}
        parts[layer] = Part(original(routed.blocks[layer]), routed.anatomies[layer], index, scales)
    return parts


def _axes(subnetwork: Subnetwork) -> dict[Width, Kept | None]:
    """The axes other than depth that a subnetwork reduces or scales, with the kept units (None: all of them)."""
    axes: dict[Width, tuple[Kept | None, float]] = {
        "heads": (subnetwork.heads, subnetwork.head_scale),
        "parts": (subnetwork.parts, subnetwork.part_scale),
    }
    return {axis: kept for axis, (kept, scale) in axes.items() if kept is not None or scale != 1}


def _check(routed: Routed, subnetwork: Subnetwork) -> None:
    _check_uncompiled("running", routed.model)
    for blocks in routed.lists:
        try:
            current = routed.model.get_submodule(blocks.path)
        except AttributeError:
            current = None
        if current is not blocks.module:
            raise RuntimeError(
                f"running: the block list at {blocks.path!r} was replaced after `attach`, so the model would run "
                "without the subnetwork. Attach the model again."
            )
    if any(isinstance(block, _StandIn) for block in routed.blocks):
        raise RuntimeError(f"running: the blocks at {routed.path!r} run a subnetwork already; leave it first")
    if subnetwork.layers != routed.layers:
        count = "is 1 block" if routed.layers == 1 else f"are {routed.layers} blocks"
        raise ValueError(
            f"running: the subnetwork has {subnetwork.layers} layers, and there {count} at {routed.path!r}. Layers "
            "that share one block cannot be left out one by one. Otherwise make the method for "
            f"shape=Shape(layers={routed.layers}); a method that grows the model needs one with "
            "method.shape(step).layers blocks, attached again after each growth."
        )
    _check_axes(routed, subnetwork)
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


def _check_axes(routed: Routed, subnetwork: Subnetwork) -> None:
    for axis, kept in _axes(subnetwork).items():
        routed.need(axis, f"running: the subnetwork selects {axis}")
        units = routed.anatomies[0].units(axis)
        if any(unit >= units for layer in kept or () for unit in layer):
            raise ValueError(
                f"running: the subnetwork is made for more than the {units} {axis} of the blocks at {routed.path!r}. "
                "Make the method for the shape of what `attach` returns."
            )


def _check_uncompiled(function: str, model: nn.Module) -> None:
    if original(model) is not model or model._compiled_call_impl is not None:
        raise ValueError(f"{function}: the model is compiled as a whole; compile each of its blocks instead")
