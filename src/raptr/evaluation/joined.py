"""Several classifiers of one architecture as one model, which runs all of them in one pass.

A step of a small model is hundreds of small kernels, which take as long for one model as for several. So the layers of
K models become one layer with their weights stacked, and the batch is their batches one after the other: products
become batched products; attention, activations and dropout, which have no weights, see a larger batch.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

TOLERANCE = 1e-4  # between the outputs of a model alone and among others, in float32


@final
@dataclass
class _Rows:
    """How many rows the batch has, of all models together; known while the joined model runs."""

    count: int = 0

    def of_each(self, inputs: Tensor, models: int) -> Tensor:
        """Inputs by model; those that are not a batch's, such as distances between positions, cannot be divided."""
        if len(inputs) != self.count:
            raise ValueError(f"a layer takes {len(inputs)} rows, the batch has {self.count}")
        return torch.unflatten(inputs, 0, (models, -1))


def _stacked(layers: Sequence[nn.Module], name: str) -> nn.Parameter | None:
    found: list[nn.Parameter | None] = [getattr(layer, name) for layer in layers]
    if found[0] is None:
        return None
    tensors = [tensor.detach() for tensor in found if tensor is not None]
    return nn.Parameter(torch.stack(tensors), requires_grad=found[0].requires_grad)


@final
class _Linear(nn.Module):
    def __init__(self, layers: Sequence[nn.Linear], rows: _Rows) -> None:
        super().__init__()
        self.weight, self.bias, self._rows = _stacked(layers, "weight"), _stacked(layers, "bias"), rows

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.weight is not None
        rows_KNI = self._rows.of_each(inputs, len(self.weight)).flatten(1, -2)
        if self.bias is None:
            outputs_KNO = torch.bmm(rows_KNI, self.weight.mT)
        else:
            outputs_KNO = torch.baddbmm(self.bias.unsqueeze(1), rows_KNI, self.weight.mT)
        return outputs_KNO.reshape(*inputs.shape[:-1], -1)


@final
class _LayerNorm(nn.Module):
    def __init__(self, layers: Sequence[nn.LayerNorm], rows: _Rows) -> None:
        super().__init__()
        self.weight, self.bias, self._rows = _stacked(layers, "weight"), _stacked(layers, "bias"), rows
        self._shape, self._eps = layers[0].normalized_shape, layers[0].eps

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.weight is not None
        normed = functional.layer_norm(inputs, self._shape, eps=self._eps)
        normed = self._rows.of_each(normed, len(self.weight))
        room = [len(self.weight), *[1] * (normed.ndim - self.weight.ndim), *self._shape]
        weight = self.weight.view(room)
        outputs = normed * weight if self.bias is None else torch.addcmul(self.bias.view(room), normed, weight)
        return outputs.flatten(0, 1)


@final
class _Embedding(nn.Module):
    first_K: Tensor

    def __init__(self, layers: Sequence[nn.Embedding], rows: _Rows) -> None:
        super().__init__()
        self.weight = _stacked(layers, "weight")
        assert self.weight is not None
        self._rows, self._padding = rows, layers[0].padding_idx
        self.register_buffer("first_K", torch.arange(len(layers), device=self.weight.device) * layers[0].num_embeddings)

    def forward(self, ids: Tensor) -> Tensor:
        assert self.weight is not None
        if ids.ndim == 1:
            ids = ids.unsqueeze(0)
        if len(ids) == 1:  # the same for all rows, such as positions
            ids = ids.expand(self._rows.count, *ids.shape[1:])
        places = self._rows.of_each(ids, len(self.first_K))
        places = places + self.first_K.view(-1, *[1] * (places.ndim - 1))
        outputs = functional.embedding(places.flatten(0, 1), self.weight.flatten(0, 1))
        if self._padding is None:
            return outputs
        return torch.where((ids == self._padding).unsqueeze(-1), outputs.detach(), outputs)  # padding is not trained


KINDS: Mapping[type[nn.Module], Any] = {nn.Linear: _Linear, nn.LayerNorm: _LayerNorm, nn.Embedding: _Embedding}


def join(models: Sequence[nn.Module], batches: Sequence[Mapping[str, Tensor]]) -> nn.Module | None:
    """The models as one, for batches that are joined the same way; None if this architecture cannot be joined.

    Whether it can is tried: on its batch of `batches`, which are of one shape, each model must give what it gives
    alone. All rows together should not be as many as a row has tokens, which a layer could mistake for them. The models
    stay as they are.
    """
    names = [name for name, _ in models[0].named_modules(remove_duplicate=False)]
    for layer in models[0].modules():
        if layer._parameters and not _plain(layer):
            return None
    joined, rows = copy.deepcopy(models[0]), _Rows()
    made: dict[int, nn.Module] = {}  # by layer: one that is used in several places is joined once
    try:
        for name in names:
            layers = [model.get_submodule(name) for model in models]
            if layers[0]._parameters:
                if id(layers[0]) not in made:
                    made[id(layers[0])] = KINDS[type(layers[0])](layers, rows)
                joined.set_submodule(name, made[id(layers[0])])
        joined.register_forward_pre_hook(_Count(rows), with_kwargs=True)
        joined.train(models[0].training)
        return joined if _agree(models, joined, batches) else None
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError, TypeError, ValueError):  # code that looks into its layers, or at shapes
        return None


def _plain(layer: nn.Module) -> bool:
    """Whether a layer with weights is one that can be joined, and has no extras."""
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        return False
    parametrized = set(layer._parameters) - {"weight", "bias"}
    return type(layer) in KINDS and not parametrized and not layer._forward_hooks and not layer._forward_pre_hooks


@final
@dataclass(frozen=True)
class _Count:
    """Notes how many rows the batch has that a model is called with."""

    rows: _Rows

    def __call__(self, _: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self.rows.count = len(next(iter(named.values())))


@torch.no_grad()
def _agree(models: Sequence[Any], joined: Any, batches: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether the models give together what each of them gives alone, without dropout."""
    training = [model.training for model in (*models, joined)]
    try:
        for model in (*models, joined):
            model.eval()
        alone = torch.cat([model(**batch).logits for model, batch in zip(models, batches, strict=True)])
        together = joined(**{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}).logits
    finally:
        for model, mode in zip((*models, joined), training, strict=True):
            model.train(mode)
    return together.shape == alone.shape and torch.allclose(together, alone, rtol=TOLERANCE, atol=TOLERANCE)
