"""Join several classifiers of one architecture into one model, which runs all of them in one pass.

A step of a small model is hundreds of operations that are too small to fill a GPU. So the layers of K models become
one layer with stacked weights, and their batches are concatenated: matrix products become batched matrix products;
attention, activations and dropout, which have no weights, see a larger batch.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

TOLERANCE = 1e-4  # between a model's outputs alone and when joined, in float32


@final
@dataclass
class _Rows:
    """The number of rows in the batch, over all models; known only while the joined model runs."""

    count: int = 0

    def of_each(self, inputs: Tensor, models: int) -> Tensor:
        """Split inputs by model; ValueError if their rows are not the batch's, as for distances between positions."""
        if len(inputs) != self.count:
            raise ValueError(f"a layer takes {len(inputs)} rows, the batch has {self.count}")
        return torch.unflatten(inputs, 0, (models, -1))


def _stacked(tensors: Sequence[Tensor]) -> nn.Parameter:
    stacked = torch.stack([tensor.detach() for tensor in tensors])
    return nn.Parameter(stacked, requires_grad=tensors[0].requires_grad)


def _biases(layers: Sequence[nn.Linear | nn.LayerNorm]) -> nn.Parameter | None:
    return None if layers[0].bias is None else _stacked([layer.bias for layer in layers])


@final
class _Linear(nn.Module):
    def __init__(self, layers: Sequence[nn.Linear], rows: _Rows) -> None:
        super().__init__()
        # Stored transposed, like the gradient that a batched product gives, so that copies between the two are plain.
        self.weight = nn.Parameter(_stacked([layer.weight.mT for layer in layers]).detach().mT)
        self.weight.requires_grad_(layers[0].weight.requires_grad)
        self.bias, self._rows = _biases(layers), rows

    def forward(self, inputs: Tensor) -> Tensor:
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
        self.weight, self.bias, self._rows = _stacked([layer.weight for layer in layers]), _biases(layers), rows
        self._shape, self._eps = layers[0].normalized_shape, layers[0].eps

    def forward(self, inputs: Tensor) -> Tensor:
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
        self.weight = _stacked([layer.weight for layer in layers])
        self._rows, self._padding = rows, layers[0].padding_idx
        self.register_buffer("first_K", torch.arange(len(layers), device=self.weight.device) * layers[0].num_embeddings)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.ndim == 1:
            ids = ids.unsqueeze(0)
        if len(ids) == 1:  # one row for the whole batch, such as positions
            ids = ids.expand(self._rows.count, *ids.shape[1:])
        places = self._rows.of_each(ids, len(self.first_K))
        places = places + self.first_K.view(-1, *[1] * (places.ndim - 1))
        outputs = functional.embedding(places.flatten(0, 1), self.weight.flatten(0, 1))
        if self._padding is None:
            return outputs
        return torch.where((ids == self._padding).unsqueeze(-1), outputs.detach(), outputs)  # padding is not trained


KINDS: Mapping[type[nn.Module], Any] = {nn.Linear: _Linear, nn.LayerNorm: _LayerNorm, nn.Embedding: _Embedding}


def join(
    models: Sequence[nn.Module], alone: Sequence[Mapping[str, Tensor]], together: Mapping[str, Tensor]
) -> nn.Module | None:
    """Return the models joined into one, which takes their concatenated batches; None if they cannot be joined.

    A trial decides: `alone` is a batch for each model, `together` the same examples concatenated and padded to one
    width. The outputs must be the same. The models are not changed.
    """
    names = [name for name, _ in models[0].named_modules(remove_duplicate=False)]
    weighted = {layer for layer in models[0].modules() if list(layer.parameters(recurse=False))}
    if not all(_plain(layer) for layer in weighted):
        return None
    joined, rows = copy.deepcopy(models[0]), _Rows()
    joined_layers: dict[nn.Module, nn.Module] = {}  # by layer: a layer used in several places is joined once
    try:
        for name in names:
            layers = [model.get_submodule(name) for model in models]
            if layers[0] in weighted:
                if layers[0] not in joined_layers:
                    joined_layers[layers[0]] = KINDS[type(layers[0])](layers, rows)
                joined.set_submodule(name, joined_layers[layers[0]])
        joined.register_forward_pre_hook(_Count(rows), with_kwargs=True)
        if not _equal(models, joined, alone, together) or not _apart(len(models), joined, together):
            return None
        for number, model in enumerate(models):
            _fill(joined, number, model)
        return joined.train(models[0].training)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # model code that inspects its layers or shapes can fail in any way
        return None


def _plain(layer: nn.Module) -> bool:
    """Return whether a layer with weights can be joined: one of the known types, without hooks or extras."""
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        return False
    parametrized = set(layer._parameters) - {"weight", "bias"}
    return type(layer) in KINDS and not parametrized and not layer._forward_hooks and not layer._forward_pre_hooks


@final
@dataclass(frozen=True)
class _Count:
    """A hook that notes the number of rows in the batch that a model is called with."""

    rows: _Rows

    def __call__(self, _: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self.rows.count = len(next(iter(named.values())))


@torch.no_grad()
def _equal(
    models: Sequence[nn.Module], joined: Any, alone: Sequence[Mapping[str, Tensor]], together: Mapping[str, Tensor]
) -> bool:
    """Return whether the joined model's outputs equal those of each model alone, without dropout.

    Noise is added to all weights first: models that started from the same weights, or have biases of 0, would agree
    even if a layer used another model's weights.
    """
    outputs = []
    for number, (model, batch) in enumerate(zip(models, alone, strict=True)):
        noisy: Any = copy.deepcopy(model).eval()
        for weight in noisy.parameters():
            weight.add_(torch.randn_like(weight) / weight.shape[-1] ** 0.5)
        _fill(joined, number, noisy)
        outputs.append(noisy(**batch).logits)
    expected, actual = torch.cat(outputs), joined.eval()(**together).logits
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def _apart(models: int, joined: Any, together: Mapping[str, Tensor]) -> bool:
    """Return whether, in training mode, the first model's outputs depend on no other model's weights."""
    outputs = joined.train()(**together).logits
    weights = [weight for weight in joined.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(outputs[: len(outputs) // models].sum(), weights, materialize_grads=True)
    return not any(gradient[1:].any() for gradient in gradients)


@torch.no_grad()
def _fill(joined: nn.Module, number: int, model: nn.Module) -> None:
    """Copy the weights of model `number` into the joined model."""
    weights, own = dict(joined.named_parameters()), dict(model.named_parameters())
    if weights.keys() != own.keys():
        raise ValueError("layers that share a weight would each get their own")
    for name, weight in own.items():
        weights[name][number] = weight
