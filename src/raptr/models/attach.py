"""Subnetworks inside models whose `forward` takes no subnetwork: of layers, and where blocks are known also of heads
and MLP parts.

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
and so is what they pass on to the next block besides the hidden states (T5's position bias, for example): a bypassed
block passes on what it was given, and a scale leaves it as it is. Where a bypassed block comes before any has run,
that block runs once, without gradients and with random numbers and buffers put back: one such probe per list and
combination of call flags.

Heads and MLP parts are available where `narrowing` knows the blocks: `routed.shape` counts them. Elsewhere a subnetwork
that selects some of them is refused. While such a block runs, its linear maps are stand-ins for their kept slices. The
first time that a layer runs in part, it also runs whole, without gradients, to see that the kept slices give what they
should.

A scale multiplies the whole block, y = x + s·(block(x) - x): the paper's definition. `output_hidden_states` of
`transformers` has its entry for every layer; a bypassed one repeats its input. A checkpoint around several blocks
needs its backward pass inside `running` too; checkpointing within each block (as in `transformers`) does not.

Refused, since the result would silently be wrong: a context in which none of the blocks is called (a copy of the
model ran), a block list replaced after `attach`, a bypassed block that computes what the others receive or read, a list
of parts of layers (XLM's attentions), a filled key-value cache with anything idle (`generate` needs use_cache=False),
`nn.DataParallel` on several GPUs, and `load_state_dict` or pickling inside `running`.
"""

import copy
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
    """A model with the lists of its residual blocks; made by `attach`, used by `running`."""

    def __init__(self, model: nn.Module, lists: tuple[BlockList, ...], mlp_parts: int | None = None) -> None:
        self.model, self.lists = model, lists
        # How the blocks are cut into heads and MLP parts; empty where only depth is available.
        self.anatomies: tuple[Anatomy, ...] = anatomies([original(block) for block in self.blocks], mlp_parts)
        # The length of the last sequences of which some heads or MLP parts ran.
        self.length = 0
        # Whether a block was called since `running` was entered.
        self.called = False
        # The layers whose heads or MLP parts were found to give what they should.
        self._checked: set[tuple[Width, int]] = set()

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

    @property
    def shape(self) -> Shape:
        """What a method is made for: heads (groups of them that share keys and values) and parts are 1 if unknown."""
        first = next(iter(self.anatomies), None)
        return Shape(self.layers) if first is None else Shape(self.layers, first.heads, first.parts)

    def layers_run(self, subnetwork: Subnetwork, length: int | None = None) -> float:
        """How many layers run; one of which some heads or MLP parts run counts by its FLOPs, relative to the whole.

        They depend on the length of the sequences; None: that of the last batch of which a part ran.
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
        """Refuse an axis along which the blocks cannot run in part."""
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
    """Takes a block's place in the list for one context: runs it plainly, scaled, or not at all."""

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
        # What the block was given, if there is a mapping among it.
        self._given: tuple[Tensor, tuple[Any, ...], dict[str, Any]] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        routed, blocks, block, scale = self._routed, self._blocks, self.block, self._scale
        routed.called = True
        x = hidden_states(block, args, kwargs)
        given: dict[Key, Any] = dict([*enumerate(args), *kwargs.items()])
        if self._uncached:
            check_caches(blocks, given.values())
        blocks.follow(self._layer, x)
        given = blocks.receive(given)
        args, kwargs = tuple(given[place] for place in range(len(args))), {name: given[name] for name in kwargs}
        # Where the backward pass does not need it, what running layers were given is not kept in memory.
        keep = scale == 0 or torch.is_grad_enabled()
        if keep and any(isinstance(value, MutableMapping) for value in given.values()):
            self._given = x, args, kwargs
        flags = (block.training, *(entry for entry in given.items() if isinstance(entry[1], bool)))
        if scale == 0:
            probed = None if flags in blocks.returns else probe(block, x, args, kwargs)
            bypassed = blocks.bypass(self._layer, x, flags, given, probed)
            for record in recorders_of(block).values():
                record(block, (x,), bypassed)
            blocks.precede(self._layer, x)
            return bypassed
        # Inference tensors do not count their in-place changes.
        version = 0 if x.is_inference() else x._version
        if scale == 1:
            output, recorders = self._run(x, args, kwargs), []
        else:
            with unrecorded(block) as recorders:
                output = self._run(x, args, kwargs)
        check_output(output, x)
        blocks.learn(flags, given, output)
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
        """Refuse the subnetwork if a bypassed block would have stored what this one looks for in a mapping."""
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


def attach(
    model: nn.Module, blocks: str | Blocks | Sequence[str | Blocks] | None = None, *, mlp_parts: int | None = None
) -> Routed:
    """Find the model's list of residual blocks (or take those named or given), changing nothing in it.

    `mlp_parts` is the number of parts that MLPs are cut into: 4 unless given, or 1 where their width is not a multiple
    of 4.
    """
    _check_uncompiled("attach", model)
    lists = find_lists(model, blocks)
    for one in lists:
        names = one.path.split(".")
        for depth in range(len(names)):  # a module of the model, such as the one inside a LightningModule
            _check_uncompiled("attach", model.get_submodule(".".join(names[:depth])))
        if any(isinstance(block, _StandIn) for block in one.module):
            raise RuntimeError(f"attach: the blocks at {one.path!r} are inside `running`; attach outside of it")
    return Routed(model, lists, mlp_parts)


@contextmanager
def running(routed: Routed, subnetwork: Subnetwork) -> Iterator[None]:
    """Let the model run this subnetwork inside the context; the whole model is back on exit."""
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
    """What runs of each layer that runs, where that is not the whole."""
    if not _axes(subnetwork):
        return {}
    like = next(routed.model.parameters())
    parts: dict[int, Part] = {}
    inputs = unpack(pack(subnetwork, like.dtype).to(like.device), signature(subnetwork))
    for layer, given in zip(subnetwork.kept, inputs, strict=True):
        index: dict[Width, Tensor | None] = {"heads": given.heads_H, "parts": given.parts_P}
        scales: dict[Width, Tensor | None] = {"heads": given.head_scale, "parts": given.part_scale}
        parts[layer] = Part(original(routed.blocks[layer]), routed.anatomies[layer], index, scales)
    return parts


def _axes(subnetwork: Subnetwork) -> dict[Width, Kept | None]:
    """The axes besides depth on which a subnetwork is not the whole."""
    axes: dict[Width, tuple[Kept | None, float]] = {
        "heads": (subnetwork.heads, subnetwork.head_scale),
        "parts": (subnetwork.parts, subnetwork.part_scale),
    }
    return {axis: kept for axis, (kept, scale) in axes.items() if kept is not None or scale != 1}


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
        found = "is 1 block" if routed.layers == 1 else f"are {routed.layers} blocks"
        raise ValueError(
            f"running: the subnetwork has {subnetwork.layers} layers, and there {found} at {routed.path!r}. Layers "
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
