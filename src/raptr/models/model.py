"""A trainable model, and the one walk through its layers.

    x = enter(batch); for each block that runs: x = block(x, inputs, context); loss(x, batch)

Training, evaluation and studies all go this way. Which layers run is chosen in Python, outside any compiled code:
`Inputs` says which, and holds their scales and indices as tensors (inputs.py). What runs may be other blocks than the
model's own: `gather` passes slots that hold their weights, and recomputation and studies pass wrapped ones.

The entrance, each block and the exit are modules of their own, which are compiled one by one and called as modules, so
that hooks see them. A model keeps nothing between two calls.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptr.data.batch import Batch
from raptr.models.contract import ModelConfig
from raptr.models.init import initialise
from raptr.models.inputs import Inputs, pack, signature, unpack
from raptr.models.layout import Cut, Layout
from raptr.subnetworks import Subnetwork


class Model(nn.Module, ABC):
    """What training, evaluation, growth and export ask of a model."""

    LAYERS: ClassVar[str] = "blocks"  # the name of the list of blocks, as it begins the names of their parameters
    OUTPUTS: ClassVar[tuple[str, ...]]  # the modules of a block that write to the residual stream
    DRAWN_AS: ClassVar[Mapping[str, str]] = {}  # names that key initial values, where they are not the parameter's own

    config: ModelConfig
    layout: Layout  # of a block's tensors
    blocks: nn.ModuleList

    @abstractmethod
    def new_block(self) -> nn.Module:
        """A block like those of the model, with any weights; called with x, its inputs and the context."""

    @abstractmethod
    def ends(self) -> Sequence[nn.Module]:
        """The modules before and after the blocks, which are compiled as the blocks are."""

    @abstractmethod
    def enter(self, batch: Batch, stream: torch.dtype | None) -> Tensor:
        """What enters the first block, (B, S, D), in the precision of the residual stream (None: as it comes)."""

    @abstractmethod
    def scores(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        """The scores over the vocabulary at the batch's targets, (B, M, V), from what the last block gives."""

    def loss(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        """The mean loss over the batch's targets; a family may compute it without the whole matrix of scores."""
        return F.cross_entropy(self.scores(x_BSD, batch).flatten(0, -2), batch.labels_BM.flatten())

    def initialise(self, seed: int) -> None:
        """Give every parameter its initial value."""
        making = {name: cut for name, cut in self.layout.items() if (cut.axis, cut.dim) == ("parts", 0)}
        initialise(
            self,
            seed,
            init=self.config.init,
            layers=self.config.layers,
            outputs=self.OUTPUTS,
            hidden={name.partition(".")[0]: cut.maps for name, cut in making.items()},
            drawn_as=self.DRAWN_AS,
        )

    def context(self, batch: Batch) -> Any:
        """What every block sees besides x, made once: a mask, tables of positions."""
        return None

    def inputs(self, subnetwork: Subnetwork, stream: torch.dtype | None = None) -> Inputs:
        """What the walk needs to run this subnetwork, on the model's device."""
        if subnetwork.layers != len(self.blocks):
            raise ValueError(f"the subnetwork is made for {subnetwork.layers} layers; the model has {len(self.blocks)}")
        like = next(self.parameters())
        packed = pack(subnetwork, like.dtype, self.config).to(like.device)
        return Inputs(subnetwork.kept, list(unpack(packed, signature(subnetwork, self.config))), stream)

    def forward(self, batch: Batch, inputs: Inputs, blocks: Sequence[Callable[..., Tensor]] | None = None) -> Tensor:
        """The mean loss over the batch's targets, from the part of the model that runs."""
        return self.loss(self.hidden(batch, inputs, blocks), batch)

    def losses(self, batch: Batch, inputs: Inputs, targets: Sequence[Batch]) -> list[Tensor]:
        """The mean losses over several choices of targets in one batch, from one pass through the layers."""
        x_BSD = self.hidden(batch, inputs)
        return [self.loss(x_BSD, chosen) for chosen in targets]

    def hidden(self, batch: Batch, inputs: Inputs, blocks: Sequence[Callable[..., Tensor]] | None = None) -> Tensor:
        """What the last block gives: the walk over the layers that run, or over the blocks given in their place."""
        own: Sequence[Callable[..., Tensor]] = [self.blocks[layer] for layer in inputs.kept]
        x_BSD, context = self.enter(batch, inputs.stream), self.context(batch)
        for block, given in zip(own if blocks is None else blocks, inputs.blocks, strict=True):
            x_BSD = block(x_BSD, given, context)
        return x_BSD


def cut_of(model: Model, name: str) -> Cut | None:
    """Where the parameter of this name has an axis of heads or MLP parts; None: it has none."""
    return model.layout.get(name.split(".", 2)[2]) if name.startswith(f"{model.LAYERS}.") else None


def fused_maps(model: nn.Module, name: str) -> int:
    """How many maps of one size the parameter of this name holds, one after the other in its first dimension."""
    cut = cut_of(model, name) if isinstance(model, Model) else None
    return cut.maps if cut is not None and cut.dim == 0 else 1


def at_targets(x_BSD: Tensor, positions_BM: Tensor | None) -> Tensor:
    """The rows of x where the loss is taken, (N, D): see `Batch.positions_BM` for what positions may be."""
    x_ND = x_BSD.flatten(0, 1)
    if positions_BM is None:
        return x_ND
    if positions_BM.dim() == 2:
        batch, length, _ = x_BSD.shape
        first_B = torch.arange(0, batch * length, length, device=x_BSD.device)
        positions_BM = (first_B.unsqueeze(1) + positions_BM).flatten()
    return x_ND.index_select(0, positions_BM)
