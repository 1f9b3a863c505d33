"""Between our tensors and those of a stock model of `transformers`, in both directions.

A family says once, as `Piece`s, which part of its tensors each stock tensor is. An export reads the pieces, and
starting from a stock model's folder writes them:

    {"model.layers.0.self_attn.k_proj.weight": Piece(a view of our fused matrix, its shape there), ...}

Only safetensors are read: nothing pickled, no code of the folder, no network.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
NAMED = 4  # tensors that a message names


@final
@dataclass(frozen=True)
class Piece:
    """A stock tensor as a view of one of ours: the same numbers in the same order, in these or more dimensions.

    An export multiplies it by `scale` and puts `skip` rows of zeros in front. A folder's tensor may have more rows
    behind the skipped ones than ours where `skip` is not 0.
    """

    view: Tensor
    shape: tuple[int, ...]
    scale: float = 1.0
    skip: int = 0

    def exported(self) -> Tensor:
        made = (self.view.detach() * self.scale).reshape(self.shape)
        return torch.cat([made.new_zeros(self.skip, *made.shape[1:]), made]) if self.skip else made

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stock tensor of this shape holds the piece."""
        if not self.skip:
            return shape == self.shape
        return shape[1:] == self.shape[1:] and shape[0] >= self.skip + self.shape[0]

    def fill(self, tensor: Tensor) -> None:
        """Write a stock tensor into ours, in our precision."""
        used = tensor[self.skip : self.skip + self.shape[0]]
        self.view.detach().copy_(used.reshape(self.view.shape))


def whole(tensor: Tensor, scale: float = 1.0) -> Piece:
    """One of our tensors that is the stock one as it is."""
    return Piece(tensor, tuple(tensor.shape), scale)


@final
@dataclass(frozen=True)
class StockFolder:
    """A folder that `save_pretrained` wrote."""

    path: Path

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """What config.json says."""
        if not (self.path / CONFIG).is_file():
            raise ValueError(
                f"model.start is {str(self.path)!r}, which holds no {CONFIG}. Name the folder of a model, such as the "
                "export in a run's folder."
            )
        return self._json(CONFIG)

    @property
    def architecture(self) -> str:
        classes = self.facts.get("architectures")
        return classes[0] if isinstance(classes, list) and len(classes) == 1 else repr(classes)

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The files of weights, by name."""
        if (self.path / WEIGHTS).is_file():
            return (self.path / WEIGHTS,)
        if not (self.path / INDEX).is_file():
            pickled = sorted(path.name for path in self.path.glob("pytorch_model*.bin"))
            there = f"only {pickled[0]}, which is pickled and not read" if pickled else "no weights"
            raise ValueError(
                f"model.start is {str(self.path)!r}, which holds {there}; {WEIGHTS} is allowed, as "
                "save_pretrained of transformers writes it."
            )
        places = self._json(INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ValueError(f"{self.path / INDEX} has no weight_map from tensors to files. Copy the folder again.")
        files = tuple(self.path / name for name in sorted(set(places.values())))
        for file in files:
            if file.parent != self.path or not file.is_file():
                raise ValueError(f"{self.path / INDEX} names {file.name!r}, which is not there. Copy the folder again.")
        return files

    @cached_property
    def places(self) -> Mapping[str, Path]:
        """The file of each tensor."""
        places: dict[str, Path] = {}
        for file in self.files:
            try:
                with safe_open(file, "pt") as opened:
                    places |= dict.fromkeys(opened.keys(), file)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} is no whole safetensors file ({error}). Copy the folder again.") from error
        return places

    def tensor(self, name: str) -> Tensor:
        if name not in self.places:
            raise ValueError(f"model.start is {str(self.path)!r}, whose weights lack {name}")
        with safe_open(self.places[name], "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(
                f"model.start is {str(self.path)!r}, whose {name} is {tensor.dtype}; float16, bfloat16, float32 and "
                "float64 are allowed"
            )
        return tensor

    def fill(self, pieces: Mapping[str, Piece], besides: str) -> None:
        """Write the folder's tensors into the pieces; names that match `besides` are needed for nothing here."""
        if strange := [name for name in self.places if name not in pieces and not re.fullmatch(besides, name)]:
            raise ValueError(
                f"model.start is {str(self.path)!r}, whose weights have {', '.join(strange[:NAMED])}; a model with "
                f"its {CONFIG} has no such tensors"
            )
        for name, piece in pieces.items():
            tensor = self.tensor(name)
            if not piece.fits(tuple(tensor.shape)):
                raise ValueError(
                    f"model.start is {str(self.path)!r}, whose {name} has the shape {tuple(tensor.shape)}; the "
                    f"model's is {piece.shape}"
                )
            piece.fill(tensor)

    def read(self, kind: Any, needed: Mapping[str, Any]) -> Any:
        """config.json as a configuration class of `transformers` reads it; other values than the needed are refused."""
        try:
            config = kind.from_dict(dict(self.facts))
        except Exception as error:  # the class raises errors of many kinds
            said = " ".join(str(error).split())
            raise ValueError(f"{self.path / CONFIG} describes no {self.architecture} ({said})") from error
        for key, value in {**needed, "quantization_config": None}.items():
            if (there := getattr(config, key, None)) != value:
                raise ValueError(f"model.start is {str(self.path)!r}, whose {key} is {there!r}; {value!r} is allowed")
        return config

    def _json(self, name: str) -> dict[str, Any]:
        try:
            facts = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path / name} is not valid JSON ({error}). Copy the folder again.") from error
        if not isinstance(facts, dict):
            raise ValueError(f"{self.path / name} is no mapping. Copy the folder again.")
        return facts
