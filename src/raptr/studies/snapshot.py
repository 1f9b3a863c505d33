"""Snapshots of a long computation's tensors on disk, from which a stopped study resumes."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from raptr.files import new_file


def write_snapshot(path: Path, identity: object, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors atomically. `identity`, any JSON value, says which computation they belong to."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with new_file(path) as partial:
        save_file(contiguous, partial, metadata={"identity": json.dumps(identity)})


def read_snapshot(path: Path, identity: object) -> dict[str, Tensor] | None:
    """Return the tensors, or None if the file is missing, damaged or of another computation."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("identity") != json.dumps(identity):
                return None
            return {name: torch.clone(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        return None
