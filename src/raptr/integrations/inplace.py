"""Growth inside a model that has all its layers from the start, for loops that build model and optimizer once.

While the method's model has n layers, these are the first n blocks; the blocks above them are bypassed and cost memory
only. A growth copies weights, buffers and optimizer state from block to block, in place. The result equals that of a
model that is built with n layers and then grown, if both start with the same weights. The lists of an encoder-decoder
grow at the same time, each in the way that the method prescribes.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raptr.distributed.sharding import reshard, rows
from raptr.growth.plan import Growth
from raptr.methods import Method
from raptr.models.attach import Routed
from raptr.models.blockcalls import original
from raptr.subnetworks import Subnetwork

# Attributes that mark tensors: `from_pretrained` of transformers sets the first on tensors that it loaded from a
# checkpoint, a growth sets the second on tensors that it overwrote.
LOADED, GROWN = "_is_hf_initialized", "_raptr_grown"


@final
class InPlace:
    """Places the layers of a method's model among the blocks of an attached model, and applies the method's growths.

    `growths` maps the first step of a stage to the growth before it; it is empty for a method that never grows.
    """

    def __init__(self, routed: Routed, method: Method, optimizers: Sequence[Optimizer]) -> None:
        self._routed, self._optimizers = routed, optimizers
        self._depth = method.target.layers  # for a method that grows: the length of each block list
        self._firsts = range(0, routed.layers, self._depth)  # the index of each list's first block
        stages = [(phase.start, method.shape(phase.start)) for phase in method.phases()]
        self.growths: dict[int, Growth] = {
            start: method.growth(old, new) for (_, old), (start, new) in pairwise(stages) if old != new
        }
        self.check(method)

    def placed(self, subnetwork: Subnetwork) -> Subnetwork:
        """Extend a subnetwork of the method's model to all blocks; each list bypasses the layers above it."""
        above = self._depth - subnetwork.layers
        return replace(subnetwork, scales=(subnetwork.scales + (0.0,) * above) * len(self._firsts))

    def grow(self, first: int, step: int) -> None:
        """Apply the growths of all stages that begin in steps `first` to `step`."""
        for start, plan in self.growths.items():
            if first <= start <= step:
                self._apply(plan)

    def unknown_to_optimizers(self, first: int, step: int) -> bool:
        """Whether the optimizers have no state of the layers that a growth in steps `first` to `step` copies.

        Then the loop steps another optimizer, or one that keeps no state.
        """
        sources = {layer for start, plan in self.growths.items() if first <= start <= step for layer in plan.sources}
        tensors = [
            tensor for start in self._firsts for layer in sources for tensor in self._tensors(start + layer).values()
        ]
        known = any(tensor in optimizer.state for optimizer in self._optimizers for tensor in tensors)
        return bool(sources) and not known and not all(map(_stateless, self._optimizers))

    def check_left_out(self, first: int, step: int) -> None:
        """Raise RuntimeError if a growth in steps `first` to `step` - 1, which were left out, would overwrite training.

        Trained layers above those that ran belong to a checkpoint that was loaded meanwhile.
        """
        left_out = [plan for start, plan in self.growths.items() if first <= start < step]
        ran = max(left_out[0].sources) + 1 if left_out else self._depth
        above = [start + layer for start in self._firsts for layer in range(ran, self._depth)]
        if any(_gain_changed(*named) for layer in above for named in self._tensors(layer).items()):
            raise RuntimeError(
                f"begin({step}): steps {first} to {step - 1} were left out, in which the model would grow, but its "
                f"layers from {ran + 1} on are trained already. After loading a checkpoint call resume(...) with the "
                "state that was saved with it."
            )

    def trained_before(self) -> list[int]:
        """The layers that a growth will overwrite although they were loaded, trained or made by an earlier growth."""
        grown = {
            layer for plan in self.growths.values() for layer, source in enumerate(plan.sources) if source != layer
        }
        layers = [first + layer for first in self._firsts for layer in sorted(grown)]
        return [layer for layer in layers if any(_trained(*named) for named in self._tensors(layer).items())]

    def _apply(self, plan: Growth) -> None:
        if plan.moments == "reset":
            for optimizer in self._optimizers:
                optimizer.state.clear()
        # No layer is copied from one above it, so going from the top down reads each source before it is overwritten.
        for layer, source in reversed(list(enumerate(plan.sources))):
            if source != layer:
                for first in self._firsts:
                    kept = plan.moments == "copy" or layer not in plan.new
                    self._copy(first + source, first + layer, kept)

    def _copy(self, source: int, layer: int, kept: bool) -> None:
        """Copy a block's tensors to another block, with their optimizer state if `kept`."""
        tensors = self._tensors(source)
        for name, target in self._tensors(layer).items():
            tensor = tensors.get(name)
            if tensor is not None and tensor is not target:  # layers may share a tensor
                with torch.no_grad():
                    target.copy_(tensor)
                setattr(target, GROWN, True)
                self._move_state(tensor, target, kept)

    def _move_state(self, source: Tensor, target: Tensor, kept: bool) -> None:
        """Replace the target's optimizer state by a copy of the source's; if not `kept`, only delete it."""
        for optimizer in self._optimizers:
            optimizer.state.pop(target, None)
            if kept and source in optimizer.state:
                optimizer.state[target] = {key: _copied(value) for key, value in optimizer.state[source].items()}

    def _tensors(self, layer: int) -> dict[str, Tensor]:
        """The tensors of a block that checkpoints contain: parameters and persistent buffers, under FSDP2 as shards.

        A non-persistent buffer is a constant of its layer, which is built again on resume.
        """
        block = original(self._routed.blocks[layer])
        reshard(block)
        constants = {
            id(module._buffers[name]) for module in block.modules() for name in module._non_persistent_buffers_set
        }
        buffers = {name: buffer for name, buffer in block.named_buffers() if id(buffer) not in constants}
        return {**dict(block.named_parameters()), **buffers}

    def check(self, method: Method) -> None:
        """Raise ValueError if the method's growths cannot be applied to this model."""
        if not self.growths:
            return
        for plan in self.growths.values():
            if plan.identity:
                raise ValueError(
                    f"method {method.name} has init='zero', and which weights of other people's blocks must be zero is "
                    "not known. Use init='copy'."
                )
            if plan.heads is not None or plan.parts is not None:
                raise ValueError(
                    f"method {method.name} adds heads or MLP parts, which only `raptr pretrain` can do. Leave out the "
                    "settings heads and parts."
                )
            for first in self._firsts:
                for layer, source in enumerate(plan.sources):
                    self._check_alike(method, first + layer, first + source)
        self._check_optimizers(method)

    def _check_alike(self, method: Method, layer: int, source: int) -> None:
        tensors = self._tensors(source)
        for name, target in self._tensors(layer).items():
            tensor = tensors.get(name)
            if tensor is None and target.dim() < 2:
                continue  # such as a norm that the first layer lacks; it keeps its initial weights
            if tensor is None or tensor.shape != target.shape:
                raise ValueError(
                    f"method {method.name} makes layer {layer + 1} of the blocks at {self._routed.path!r} from layer "
                    f"{source + 1}, which has no {name} of the same shape. Use a method of constant shape, such as "
                    "raptr."
                )
            frozen = isinstance(target, nn.Parameter) and not (target.requires_grad and tensor.requires_grad)
            if frozen and not torch.equal(tensor, target):  # frozen constants, such as tables, are equal in all layers
                raise ValueError(
                    f"method {method.name} makes layer {layer + 1} of the blocks at {self._routed.path!r} from layer "
                    f"{source + 1}, but {name} is frozen: growth is for models that train as a whole, not for adapters "
                    "or parts of a trained model. Use a method of constant shape, such as raptr."
                )

    def _check_optimizers(self, method: Method) -> None:
        if any(type(optimizer).__name__ == "ZeroRedundancyOptimizer" for optimizer in self._optimizers):
            raise ValueError(
                f"method {method.name} copies what the optimizer knows about a layer, but ZeroRedundancyOptimizer "
                "spreads it over the processes. Use FSDP2 or another optimizer, or a method of constant shape, such "
                "as raptr."
            )
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        held = {id(parameter) for group in groups for parameter in group["params"]}
        for layer in range(self._routed.layers):
            for name, tensor in self._tensors(layer).items():
                if isinstance(tensor, nn.Parameter) and tensor.requires_grad and id(tensor) not in held:
                    problem = "optimizer is not given" if not self._optimizers else f"optimizer does not hold {name}"
                    raise ValueError(
                        f"method {method.name} copies what the optimizer knows about a layer, but {problem}. Give "
                        "stepwise(..., optimizer=...) the optimizer of the blocks' parameters, or a list of them."
                    )


def _stateless(optimizer: Optimizer) -> bool:
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps optimizers
    return isinstance(inner, torch.optim.SGD) and not any(group["momentum"] for group in inner.param_groups)


def _trained(name: str, tensor: Tensor) -> bool:
    """Whether a block's tensor was loaded, overwritten by a growth, or changed by training."""
    return bool({LOADED, GROWN} & {*vars(tensor)}) or _gain_changed(name, tensor)


def _gain_changed(name: str, tensor: Tensor) -> bool:
    """Whether this is a norm's gain that training has changed; its initial values are all equal.

    Of a sharded gain only the rows of this process are checked.
    """
    if not isinstance(tensor, nn.Parameter) or tensor.dim() != 1 or name.rpartition(".")[2] != "weight":
        return False
    values = rows(tensor.detach())
    return values.numel() > 1 and bool((values != values[0]).any())


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
