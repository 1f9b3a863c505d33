"""A run in several starts of the program, and what is compared of two runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from raptr.data import TokenStore
from raptr.train import checkpoint
from raptr.train.config import Config
from raptr.train.loop import Result, Trainer
from raptr.train.run import RunFolder
from raptr.train.safety import reproducible

QUIET = Console(quiet=True)


def leg(chosen: Config, run: Path, store: TokenStore, until: int | None = None) -> tuple[Result, dict[str, Tensor]]:
    """One start of the program: open the folder, resume, train up to `until`, or to the end."""
    folder = RunFolder(run)
    with folder.opened(chosen) as settled, reproducible(chosen.train.deterministic):
        trainer = Trainer(settled, folder, store, torch.device(settled.train.device))
        if (found := checkpoint.load_latest(folder.checkpoints)) is not None:
            trainer.resume(found, QUIET)
        result = trainer.train(until or chosen.train.steps, QUIET)
    return result, snapshot(trainer)


def snapshot(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and optimizer state as they are now."""
    return {name: tensor.clone() for name, tensor in trainer.tensors().items()}


def records(run: Path) -> list[dict[str, Any]]:
    """The last record of each kind and step, without the time it took."""
    last: dict[tuple[str, int], dict[str, Any]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        del record["seconds"]
        last[record["kind"], record["step"]] = record
    return [last[key] for key in sorted(last)]


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """The names whose tensors are not equal bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
