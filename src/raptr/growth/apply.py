"""Apply a growth plan, tensor by tensor, to weights and optimizer state alike.

Tensors are named as in a checkpoint: `model.NAME` is a weight, `KIND.NAME` a tensor of its optimizer state (for AdamW:
exp_avg, exp_avg_sq, step), if the parameter has one. Only names connect the two models. A sharded tensor is copied
shard by shard, or gathered if its rows move. Only the model's layout says where a tensor holds heads and MLP parts.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from raptr.distributed.sharding import is_sharded, laid_out, part, rows, whole
from raptr.growth.plan import Growth, Units
from raptr.models.layout import Cut, by_unit
from raptr.models.model import Model, cut_of

WEIGHT = "model"


class _Widening(NamedTuple):
    """The axis along which a tensor gets new units, and the source of each unit in the smaller model."""

    cut: Cut
    units: Units

    def grown(self, rows: int) -> int:
        """Return the larger tensor's number of rows along the axis, from that of the smaller tensor."""
        return rows // len(self.old) * len(self.units)

    @property
    def old(self) -> list[int]:
        """The places in the larger tensor of the units that the smaller model has."""
        return [place for place, source in enumerate(self.units) if source is not None]


def grow(plan: Growth, old: Mapping[str, Tensor], into: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Fill the larger model's weights in place from the smaller model's tensors, and return its optimizer state.

    `into` holds the weights of `model`, the larger model; new heads and MLP parts keep their values there. A tensor
    whose moments would all be zero gets no state: the optimizer creates its initial state at the next step.
    """
    state: dict[str, Tensor] = {}
    kinds = sorted({name.partition(".")[0] for name in old} - {WEIGHT})
    with torch.no_grad():
        for name, weight in into.items():
            kind, _, parameter = name.partition(".")
            assert kind == WEIGHT, name
            rule = plan.rule(parameter, layers=model.LAYERS, outputs=model.OUTPUTS)
            source, cut = old[f"{WEIGHT}.{rule.source}"], cut_of(model, parameter)
            units = None if cut is None else plan.heads if cut.axis == "heads" else plan.parts
            widening = None if cut is None or units is None else _Widening(cut, units)
            if rule.zero_weight:
                weight.zero_()
            else:
                _place(source, weight, widening)
            if not rule.zero_moments:
                kept = {kind: old[f"{kind}.{rule.source}"] for kind in kinds if f"{kind}.{rule.source}" in old}
                for kind, tensor in kept.items():
                    state[f"{kind}.{parameter}"] = _kept(tensor, source, weight, widening)
    return state


def _place(source: Tensor, into: Tensor, widening: _Widening | None) -> None:
    """Copy a tensor into the larger one, each unit to its place; without `widening` the shapes must be equal."""
    if widening is None:
        assert source.shape == into.shape, (source.shape, into.shape)  # copy_ would broadcast
        into.copy_(source)
        return
    cut, places = widening.cut, torch.tensor(widening.old, device=into.device)
    source, grown = whole(source), whole(into)
    by_unit(grown, cut, len(widening.units)).index_copy_(cut.dim + 1, places, by_unit(source, cut, len(places)))
    if is_sharded(into):
        rows(into).copy_(part(grown, into))


def _kept(tensor: Tensor, source: Tensor, weight: Tensor, widening: _Widening | None) -> Tensor:
    """Return an optimizer-state tensor for the larger `weight`, from that of `source`, with zeros for new units.

    A step count that all rows shared becomes one for each row along the widened axis.
    """
    if widening is None:
        return tensor.clone()
    axis = widening.cut.dim
    if tensor.dim() == 0:
        tensor = tensor.expand([rows if dim == axis else 1 for dim, rows in enumerate(source.shape)]).contiguous()
    shape = [widening.grown(rows) if dim == axis else rows for dim, rows in enumerate(tensor.shape)]
    tensor = whole(tensor)
    grown = tensor.new_zeros(shape)
    _place(tensor, grown, widening)
    return laid_out(grown, weight)
