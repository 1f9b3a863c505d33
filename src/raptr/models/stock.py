"""Convert between our tensors and those of a stock model of `transformers`, in both directions.

A family defines once, as `Piece`s, which part of its tensors corresponds to each stock tensor. An export reads the
pieces; a start from a stock model's folder writes them:

    {"model.layers.0.self_attn.k_proj.weight": Piece(a view of our fused matrix, the stock tensor's shape), ...}

Only safetensors files are read. No pickle is loaded, no code of the folder is run, and nothing is fetched.
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
NAMED = 4  # tensors that an error message names, at most


@final
@dataclass(frozen=True)
class Piece:
    """A stock tensor of this shape as a view of one of ours: the same numbers in the same order.

    The view may have more dimensions. An export multiplies it by `scale` and puts `skip` rows of zeros in front, which
    `shape` does not count. If `skip` is not 0, a folder's tensor may be longer than that; its last rows are not read.
    """

    view: Tensor
    shape: tuple[int, ...]
    scale: float = 1.0
    skip: int = 0

    def exported(self) -> Tensor:
        tensor = (self.view.detach() * self.scale).reshape(self.shape)
        return torch.cat([tensor.new_zeros(self.skip, *tensor.shape[1:]), tensor]) if self.skip else tensor

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stock tensor of this shape contains the piece."""
        if not self.skip:
            return shape == self.shape
        return shape[1:] == self.shape[1:] and shape[0] >= self.skip + self.shape[0]

    def fill(self, tensor: Tensor) -> None:
        """Copy a stock tensor into ours, in our precision."""
        used = tensor[self.skip : self.skip + self.shape[0]]
        self.view.detach().copy_(used.reshape(self.view.shape))


def whole(tensor: Tensor, scale: float = 1.0) -> Piece:
    """A piece for a tensor that equals its stock counterpart, without slicing; an export multiplies it by `scale`."""
    return Piece(tensor, tuple(tensor.shape), scale)


@final
@dataclass(frozen=True)
class StockFolder:
    """A folder that `save_pretrained` wrote."""

    path: Path

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """The contents of config.json."""
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
        """The files that hold the weights, sorted by name."""
        if (self.path / WEIGHTS).is_file():
            return (self.path / WEIGHTS,)
        if not (self.path / INDEX).is_file():
            pickled = sorted(path.name for path in self.path.glob("pytorch_model*.bin"))
            content = f"only {pickled[0]}, which is pickled and not read" if pickled else "no weights"
            raise ValueError(
                f"model.start is {str(self.path)!r}, which holds {content}; {WEIGHTS} is allowed, as "
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
        """The file that holds each tensor, by the tensor's name."""
        places: dict[str, Path] = {}
        for file in self.files:
            try:
                with safe_open(file, "pt") as opened:
                    places |= dict.fromkeys(opened.keys(), file)
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{file} is not a complete safetensors file ({error}). Copy the folder again."
                ) from error
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
        """Copy the folder's tensors into the pieces; other tensors are refused unless `besides` matches their names."""
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
        """Read config.json with `kind`, a configuration class of `transformers`.

        Raise ValueError if it cannot be read so, if a value differs from `needed`, or if the weights are quantized.
        """
        try:
            config = kind.from_dict(dict(self.facts))
        except Exception as error:  # the class can raise errors of many types
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.path / CONFIG} does not describe a {self.architecture} ({reason})") from error
        for key, value in {**needed, "quantization_config": None}.items():
            if (actual := getattr(config, key, None)) != value:
                raise ValueError(f"model.start is {str(self.path)!r}, whose {key} is {actual!r}; {value!r} is allowed")
        return config

    def _json(self, name: str) -> dict[str, Any]:
        try:
            facts = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path / name} is not valid JSON ({error}). Copy the folder again.") from error
        if not isinstance(facts, dict):
            raise ValueError(f"{self.path / name} is not a mapping. Copy the folder again.")
        return facts
