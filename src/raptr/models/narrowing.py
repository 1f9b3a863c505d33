"""Run other people's blocks with some of their heads and MLP parts, by using only slices of their linear layers.

A block is recognised by the names of its linear layers: somewhere in it there must be exactly one attention with four
of them and one MLP with two or three (`ATTENTION`, `MLP`). Every other parameter must be a vector of the model's width
or, inside the attention module, of a head's size. So blocks with mixtures of experts, cross-attention, fused
projections or adapters are not recognised, and their models run subnetworks of whole layers only.

While a recognised block runs in part, stand-ins replace its linear layers: each gathers the kept rows or columns of the
real weight and multiplies by these. Nothing else has to change, because the attention of these blocks derives its
number of heads from the width of its queries, keys and values. Names do not prove this, so `Part.check` compares
numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptr.models.inputs import scaled
from raptr.models.layout import Cut, Layout, chosen
from raptr.subnetworks.value import Width

# The linear layers that compute the heads (queries, keys, values) or MLP parts, and the one that reads their outputs.
Names = tuple[tuple[str, ...], str]
ATTENTION: tuple[Names, ...] = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),  # Llama, Mistral, Qwen, Gemma, ViT
    (("q_proj", "k_proj", "v_proj"), "out_proj"),  # BART, CLIP
    (("self.query", "self.key", "self.value"), "output.dense"),  # BERT, RoBERTa, ELECTRA
    (("q_lin", "k_lin", "v_lin"), "out_lin"),  # DistilBERT
    (("q_proj", "k_proj", "v_proj"), "dense"),  # Phi
)
MLP: tuple[Names, ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("intermediate.dense",), "output.dense"),
    (("fc1",), "fc2"),
    (("lin1",), "lin2"),
)
HEAD_SIZES = ("head_dim", "attention_head_size")  # the names under which attention modules keep the size of a head
PARTS = 4  # the default number of MLP parts, as in raptr's own models
CHECKPOINT = "_gradient_checkpointing_func"  # the attribute by which blocks of `transformers` checkpoint activations
TOLERANCE = 0.05  # relative to the largest value: far above the rounding of bfloat16, far below real errors


@final
@dataclass(frozen=True)
class Anatomy:
    """How a block divides into heads (groups of query heads that share keys and values) and MLP parts.

    `layout` is keyed by the paths of the linear layers, and `weights` counts their weights for each axis. `queries` is
    the width of all query heads together, `mlp` that of all parts.
    """

    heads: int
    parts: int
    layout: Layout
    weights: Mapping[Width, int]
    queries: int
    mlp: int

    def units(self, axis: Width) -> int:
        """The number of heads or parts of the whole block."""
        return self.heads if axis == "heads" else self.parts

    def flops(self, heads: int, parts: int, length: int) -> float:
        """Return the forward FLOPs for one token with this many heads and parts, counted like `ModelConfig` does."""
        attention = 2 * (self.weights["heads"] + 2 * length * self.queries) * heads / self.heads
        return attention + 2 * self.weights["parts"] * parts / self.parts


@final
class _Slice(nn.Module):
    """Stands in for a linear layer with its kept rows or columns; columns are scaled, the bias after them is not."""

    def __init__(self, linear: nn.Linear, cut: Cut, units: int, index: Tensor | None, scale: Tensor | None) -> None:
        super().__init__()
        self.linear, self.cut, self.units = linear, cut, units
        device = linear.weight.device
        self.index = None if index is None else index.to(device)
        self.scale = None if scale is None or cut.dim == 0 else scale.to(device)

    def forward(self, x: Tensor) -> Tensor:
        weight = chosen(self.linear.weight, self.cut, self.units, self.index)
        bias: Tensor | None = self.linear.bias
        if bias is not None and self.cut.dim == 0:
            bias = chosen(bias, self.cut, self.units, self.index)
        return F.linear(x, scaled(weight, self.scale), bias)


@final
class Part:
    """The kept heads and MLP parts of one block (index None: all), and the scales of their outputs (None: unscaled)."""

    def __init__(
        self,
        block: nn.Module,
        anatomy: Anatomy,
        index: Mapping[Width, Tensor | None],
        scales: Mapping[Width, Tensor | None],
    ) -> None:
        self._block, self._anatomy, self._index = block, anatomy, index
        self._slices: dict[Width, dict[str, nn.Module]] = {"heads": {}, "parts": {}}
        for path, cut in anatomy.layout.items():
            linear, kept, scale = block.get_submodule(path), index[cut.axis], scales[cut.axis]
            assert isinstance(linear, nn.Linear)
            if kept is not None or scale is not None:
                self._slices[cut.axis][path] = _Slice(linear, cut, anatomy.units(cut.axis), kept, scale)

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `call`, which runs the block, with slices for its linear layers; recomputation uses the same slices."""
        block, slices, recompute = self._block, {**self._slices["heads"], **self._slices["parts"]}, None
        if recompute := vars(block).get(CHECKPOINT):
            vars(block)[CHECKPOINT] = lambda run, *given: recompute(partial(_with, block, slices, run), *given)
        try:
            return _with(block, slices, call, *args, **kwargs)
        finally:
            if recompute:
                vars(block)[CHECKPOINT] = recompute

    @property
    def axes(self) -> set[Width]:
        """The axes along which not all units run."""
        return {axis for axis, index in self._index.items() if index is not None}

    def check(self, call: Callable[[], Any]) -> Width | None:
        """Return an axis along which the block cannot run in part, or None; `call` runs the block.

        The linear layer that reads the kept units must receive the same from them as when all units run.
        """
        outputs: dict[Width, str] = {cut.axis: path for path, cut in self._anatomy.layout.items() if cut.dim == 1}
        with _evaluating(self._block):
            whole = {axis: self._entering(path, call) for axis, path in outputs.items()}
            for axis, path in outputs.items():
                index = self._index[axis]
                if index is None:
                    continue
                expected = whole[axis].contiguous()
                cut = Cut(axis, expected.ndim - 1)
                expected = chosen(expected, cut, self._anatomy.units(axis), index.to(expected.device))
                try:
                    part = _with(self._block, self._slices[axis], self._entering, path, call)
                except torch.OutOfMemoryError:
                    raise
                except Exception:  # unexpected widths can raise anything in the block
                    return axis
                if part.shape != expected.shape or (part - expected).abs().max() > TOLERANCE * expected.abs().max():
                    return axis
        return None

    def _entering(self, path: str, call: Callable[[], Any]) -> Tensor:
        """Return the input of the linear layer at `path` during one call of the block."""
        inputs: list[Tensor] = []
        hook = self._block.get_submodule(path).register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
        try:
            call()
        finally:
            hook.remove()
        return inputs[0]


def anatomies(blocks: Sequence[nn.Module], parts: int | None) -> tuple[Anatomy, ...]:
    """Return the anatomy of each block; empty if a block is not recognised, or if their numbers of heads differ.

    Each MLP is cut into `parts`; None: into 4, or into 1 if an MLP's width is not a multiple of 4. Raise ValueError if
    `parts` cannot be applied.
    """
    known = [anatomy for block in blocks if (anatomy := _anatomy(block)) is not None]
    if len(known) < len(blocks) or len({anatomy.heads for anatomy in known}) != 1:
        if parts is not None:
            raise only_depth(f"attach: mlp_parts is {parts!r}", blocks, "mlp_parts")
        return ()
    widths = sorted({anatomy.mlp for anatomy in known})
    if parts is None:
        parts = 1 if any(width % PARTS for width in widths) else PARTS
    if type(parts) is not int or parts < 1 or any(width % parts for width in widths):
        width = " and ".join(map(str, widths))
        raise ValueError(f"attach: mlp_parts is {parts!r}; a divisor of the MLP's width, {width}, is allowed")
    return tuple(replace(anatomy, parts=parts) for anatomy in known)


def only_depth(problem: str, blocks: Sequence[nn.Module], setting: str) -> ValueError:
    """Return the error for a setting that needs blocks which can run in part."""
    kinds = " and ".join(sorted({type(block).__name__ for block in blocks}))
    return ValueError(f"{problem}; only depth is available for a model of {kinds}. Leave out the setting {setting}.")


def _anatomy(block: nn.Module) -> Anatomy | None:
    """Return the block's anatomy, with the MLP as one part, or None if the block is not recognised."""
    attentions, mlps = _matches(block, ATTENTION), _matches(block, MLP)
    if len(attentions) != 1 or len(mlps) != 1:
        return None
    axes: dict[Width, dict[str, nn.Linear]] = {"heads": attentions[0], "parts": mlps[0]}
    query, key, value, out = attentions[0].values()
    *into, down = mlps[0].values()
    inside = block.get_submodule(next(iter(attentions[0])).rpartition(".")[0])  # the module that holds the queries
    size = next((vars(inside)[name] for name in HEAD_SIZES if name in vars(inside)), 0)
    fits = (
        type(size) is int
        and size > 0
        and key.out_features == value.out_features
        and key.out_features % size == 0
        and query.out_features % key.out_features == 0
        and query.out_features == out.in_features
        and all(linear.out_features == down.in_features for linear in into)
    )
    if not fits:
        return None
    sliced = {id(parameter) for maps in axes.values() for linear in maps.values() for parameter in linear.parameters()}
    in_attention = {id(parameter) for parameter in inside.parameters()}
    for parameter in block.parameters():
        width = size if id(parameter) in in_attention else out.out_features
        if id(parameter) not in sliced and tuple(parameter.shape) != (width,):
            return None
    layout = {
        path: Cut(axis, int(linear in (out, down))) for axis, maps in axes.items() for path, linear in maps.items()
    }
    weights = {axis: sum(linear.weight.numel() for linear in maps.values()) for axis, maps in axes.items()}
    return Anatomy(key.out_features // size, 1, layout, weights, out.in_features, down.in_features)


def _matches(block: nn.Module, table: Sequence[Names]) -> list[dict[str, nn.Linear]]:
    """For each module that has all linear layers of a row of the table: these layers, by their paths in the block."""
    # A path through a name with a leading underscore belongs to a wrapper, which may recompute what it wraps later.
    linears = {
        path: module for path, module in block.named_modules() if type(module) is nn.Linear and "._" not in f".{path}"
    }
    matches = []
    for path, _ in block.named_modules():
        rows = [[f"{path}.{name}" if path else name for name in (*into, out)] for into, out in table]
        if row := next((row for row in rows if all(name in linears for name in row)), None):
            matches.append({name: linears[name] for name in row})
    return matches


def _with(
    block: nn.Module, replaced: Mapping[str, nn.Module], call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call `call` while the modules in `replaced` stand in for the block's modules at these paths."""
    parents = {path: block.get_submodule(path.rpartition(".")[0])._modules for path in replaced}
    names = {path: path.rpartition(".")[2] for path in replaced}
    before = {path: parents[path][names[path]] for path in replaced}
    try:
        for path, module in replaced.items():
            parents[path][names[path]] = module
        return call(*args, **kwargs)
    finally:
        for path, real in before.items():
            parents[path][names[path]] = real


@contextmanager
def _evaluating(block: nn.Module) -> Iterator[None]:
    """Put the block in evaluation mode inside the context: dropout would draw other numbers in each call."""
    modes = {module: module.training for module in block.modules()}
    block.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
