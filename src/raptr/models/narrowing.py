"""Heads and MLP parts of other people's blocks: only the kept slices of their linear maps run.

A block is known by the names of its linear maps: four of an attention, two or three of an MLP (`ATTENTION`, `MLP`), in
whichever module of the block, once each. Every other weight of it must be a vector of the model's width, or of a
head's size beside the queries. So mixtures of experts, cross-attention, fused maps and adapters are not known, and
their models run subnetworks of whole layers only.

While a known block runs with a part of its heads or MLP, stand-ins take the place of its linear maps: each gathers the
rows or columns of the real weight that are kept and multiplies by those. Nothing else is told, since the attention of
these blocks counts heads by the width that it gets. Whether that is true is not left to names: `check` compares.
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

# The maps into the axis, and the one out of it; the first of an attention's are the queries, the keys, the values.
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
HEAD_SIZES = ("head_dim", "attention_head_size")  # attributes of an attention module
PARTS = 4  # as in raptr's own models
CHECKPOINT = "_gradient_checkpointing_func"  # with which a block of `transformers` recomputes itself
TOLERANCE = 0.05  # of the largest value: far above the rounding of bfloat16, far below a mistake


@final
@dataclass(frozen=True)
class Anatomy:
    """How a block is cut: into groups of heads that share keys and values, and into parts of the MLP.

    The layout goes by the paths of the linear maps, whose weights are counted for each axis. `queries` is the width of
    all heads together, `mlp` that of all parts.
    """

    heads: int
    parts: int
    layout: Layout
    weights: Mapping[Width, int]
    queries: int
    mlp: int

    def units(self, axis: Width) -> int:
        """How many heads or parts there are."""
        return self.heads if axis == "heads" else self.parts

    def flops(self, heads: int, parts: int, length: int) -> float:
        """The FLOPs of a token in the forward pass of this many heads and parts, as `ModelConfig` counts them."""
        attention = 2 * (self.weights["heads"] + 2 * length * self.queries) * heads / self.heads
        return attention + 2 * self.weights["parts"] * parts / self.parts


@final
class _Slice(nn.Module):
    """Replaces a linear map by its kept rows or columns; columns are scaled, the bias that follows them is not."""

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
    """The kept heads and MLP parts of one block; None: all are, and what they give is not scaled."""

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
        """Call the block with its slices in place, as they will be again where it recomputes itself."""
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
        """An axis along which the block cannot run in part, if there is one; `call` calls the block.

        What the kept units give to the map behind them must be what they give when all of them run.
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
                except Exception:  # whatever the block says of widths that it does not expect
                    return axis
                if part.shape != expected.shape or (part - expected).abs().max() > TOLERANCE * expected.abs().max():
                    return axis
        return None

    def _entering(self, path: str, call: Callable[[], Any]) -> Tensor:
        """What a map is given in a call of the block."""
        given: list[Tensor] = []
        hook = self._block.get_submodule(path).register_forward_pre_hook(lambda _module, args: given.append(args[0]))
        try:
            call()
        finally:
            hook.remove()
        return given[0]


def anatomies(blocks: Sequence[nn.Module], parts: int | None) -> tuple[Anatomy, ...]:
    """How each block is cut; empty where one of them is not known, or has another number of heads than the others.

    The MLP is cut into `parts`; None: into 4, or into 1 where its width is not a multiple of 4.
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
    """The refusal of a setting that needs blocks which can run a part of their heads or MLP."""
    kinds = " and ".join(sorted({type(block).__name__ for block in blocks}))
    return ValueError(f"{problem}; only depth is available for a model of {kinds}. Leave out the setting {setting}.")


def _anatomy(block: nn.Module) -> Anatomy | None:
    """How the block is cut, its MLP as one part; None if it is not known."""
    attentions, mlps = _matches(block, ATTENTION), _matches(block, MLP)
    if len(attentions) != 1 or len(mlps) != 1:
        return None
    axes: dict[Width, dict[str, nn.Linear]] = {"heads": attentions[0], "parts": mlps[0]}
    query, key, value, out = attentions[0].values()
    *into, down = mlps[0].values()
    inside = block.get_submodule(next(iter(attentions[0])).rpartition(".")[0])  # the module that has the queries
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
    own = {id(parameter) for maps in axes.values() for linear in maps.values() for parameter in linear.parameters()}
    in_attention = {id(parameter) for parameter in inside.parameters()}
    for parameter in block.parameters():
        width = size if id(parameter) in in_attention else out.out_features
        if id(parameter) not in own and tuple(parameter.shape) != (width,):
            return None
    layout = {
        path: Cut(axis, int(linear in (out, down))) for axis, maps in axes.items() for path, linear in maps.items()
    }
    weights = {axis: sum(linear.weight.numel() for linear in maps.values()) for axis, maps in axes.items()}
    return Anatomy(key.out_features // size, 1, layout, weights, out.in_features, down.in_features)


def _matches(block: nn.Module, table: Sequence[Names]) -> list[dict[str, nn.Linear]]:
    """The linear maps of each module of the block that has all those of a row, by their paths in the block."""
    # A wrapper, whose module's name begins with an underscore, may call what it wraps later, to recompute it.
    linears = {
        path: module for path, module in block.named_modules() if type(module) is nn.Linear and "._" not in f".{path}"
    }
    found = []
    for path, _ in block.named_modules():
        rows = [[f"{path}.{name}" if path else name for name in (*into, out)] for into, out in table]
        if row := next((row for row in rows if all(name in linears for name in row)), None):
            found.append({name: linears[name] for name in row})
    return found


def _with(
    block: nn.Module, replaced: Mapping[str, nn.Module], call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A call with other modules in place of some of the block's."""
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
    """The block without dropout, whose random numbers would differ."""
    modes = {module: module.training for module in block.modules()}
    block.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
