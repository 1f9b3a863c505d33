"""The base class of trainable models, with the one pass through the layers.

    x = enter(batch); for each block that runs: x = block(x, inputs, context); loss(x, batch)

Training, evaluation and studies all use this pass. Which layers run is chosen in Python, outside any compiled code:
`Inputs` names the layers and holds their scales and indices as tensors (inputs.py). A caller can replace the model's
blocks by others: `gather` passes slots that hold the layers' weights, recomputation and studies pass wrapped blocks.

The entrance, each block and the exit are separate modules. They are compiled one by one, and called as modules so that
their hooks run. A model keeps no state between two calls.
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
    """A model that can be trained, evaluated, grown and exported; each family has a subclass."""

    LAYERS: ClassVar[str] = "blocks"  # the attribute that holds the blocks, with which their parameters' names begin
    OUTPUTS: ClassVar[tuple[str, ...]]  # the modules of a block that write to the residual stream
    DRAWN_AS: ClassVar[Mapping[str, str]] = {}  # parameters whose initial values are keyed by another name

    config: ModelConfig
    layout: Layout  # the heads and MLP parts in a block's tensors
    blocks: nn.ModuleList

    @abstractmethod
    def new_block(self) -> nn.Module:
        """Return another block of the same architecture with arbitrary weights, called as block(x, inputs, context)."""

    @abstractmethod
    def ends(self) -> Sequence[nn.Module]:
        """The modules before and after the blocks, which are compiled like the blocks."""

    @abstractmethod
    def enter(self, batch: Batch, stream: torch.dtype | None) -> Tensor:
        """Return the input of the first block, (B, S, D), in the precision `stream` (None: as computed)."""

    @abstractmethod
    def scores(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        """Return the logits at the batch's targets, (B, M, V), from the output of the last block."""

    def loss(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss over the batch's targets; a family may compute it without all logits at once."""
        return F.cross_entropy(self.scores(x_BSD, batch).flatten(0, -2), batch.labels_BM.flatten())

    def initialise(self, seed: int) -> None:
        """Set every parameter to its initial value, in place."""
        mlp_inputs = {name: cut for name, cut in self.layout.items() if (cut.axis, cut.dim) == ("parts", 0)}
        initialise(
            self,
            seed,
            init=self.config.init,
            layers=self.config.layers,
            outputs=self.OUTPUTS,
            hidden={name.partition(".")[0]: cut.maps for name, cut in mlp_inputs.items()},
            drawn_as=self.DRAWN_AS,
        )

    def context(self, batch: Batch) -> Any:
        """Return what all blocks receive besides x, computed once for a batch, such as a mask or position tables."""
        return None

    def inputs(self, subnetwork: Subnetwork, stream: torch.dtype | None = None) -> Inputs:
        """Return the subnetwork as tensors on the model's device; `stream` is the residual stream's precision."""
        if subnetwork.layers != len(self.blocks):
            raise ValueError(f"the subnetwork is made for {subnetwork.layers} layers; the model has {len(self.blocks)}")
        like = next(self.parameters())
        packed = pack(subnetwork, like.dtype, self.config).to(like.device)
        return Inputs(subnetwork.kept, list(unpack(packed, signature(subnetwork, self.config))), stream)

    def forward(self, batch: Batch, inputs: Inputs, blocks: Sequence[Callable[..., Tensor]] | None = None) -> Tensor:
        """Return the mean loss over the batch's targets, computed by the subnetwork in `inputs`; see `hidden`."""
        return self.loss(self.hidden(batch, inputs, blocks), batch)

    def losses(self, batch: Batch, inputs: Inputs, targets: Sequence[Batch]) -> list[Tensor]:
        """Return the mean loss for each choice of targets in one batch, from a single pass through the layers."""
        x_BSD = self.hidden(batch, inputs)
        return [self.loss(x_BSD, chosen) for chosen in targets]

    def hidden(self, batch: Batch, inputs: Inputs, blocks: Sequence[Callable[..., Tensor]] | None = None) -> Tensor:
        """Return the output of the last block, (B, S, D); `blocks` are called in place of the running layers."""
        running: Sequence[Callable[..., Tensor]] = [self.blocks[layer] for layer in inputs.kept]
        x_BSD, context = self.enter(batch, inputs.stream), self.context(batch)
        for block, block_inputs in zip(running if blocks is None else blocks, inputs.blocks, strict=True):
            x_BSD = block(x_BSD, block_inputs, context)
        return x_BSD


def cut_of(model: Model, name: str) -> Cut | None:
    """Return where the parameter of this name holds heads or MLP parts; None if it holds neither."""
    return model.layout.get(name.split(".", 2)[2]) if name.startswith(f"{model.LAYERS}.") else None


def fused_maps(model: nn.Module, name: str) -> int:
    """Return how many projections of equal size are fused in the first dimension of the parameter of this name."""
    cut = cut_of(model, name) if isinstance(model, Model) else None
    return cut.maps if cut is not None and cut.dim == 0 else 1


def at_targets(x_BSD: Tensor, positions_BM: Tensor | None) -> Tensor:
    """Return the rows of x where the loss is taken, (N, D); `Batch.positions_BM` describes the forms of positions."""
    x_ND = x_BSD.flatten(0, 1)
    if positions_BM is None:
        return x_ND
    if positions_BM.dim() == 2:
        batch, length, _ = x_BSD.shape
        first_B = torch.arange(0, batch * length, length, device=x_BSD.device)
        positions_BM = (first_B.unsqueeze(1) + positions_BM).flatten()
    return x_ND.index_select(0, positions_BM)
