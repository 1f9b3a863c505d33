"""Run by two processes: what a signal, a disagreement and a process that hangs lead to.

python -m torch.distributed.run --nproc-per-node 2 -m tests.distributed.faults FOLDER

Each process writes what it saw to seen-RANK.json.
"""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from raptr import files
from raptr.distributed.errors import Disagreement, Elsewhere, Lost
from raptr.distributed.processes import joined
from raptr.methods.raptr import RaPTr
from raptr.subnetworks import Subnetwork
from raptr.train.loop import Trainer, pretrain
from tests.distributed.cases import config

QUIET = Console(quiet=True)
AT = 7  # the step at which it happens
PATIENCE = 5.0  # seconds


def attempt(folder: Path, run: str, timeout: float = 60.0, **train: Any) -> dict[str, Any]:
    """How a run ends here."""
    try:
        result = pretrain(config("bert, raptr", folder, "fsdp", timeout=timeout, **train), folder / run, console=QUIET)
    except (Disagreement, Elsewhere, Lost, OSError) as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"step": result.step, "stopped": result.stopped}


def in_step(rank: int, act: Callable[[], None]) -> AbstractContextManager[object]:
    """Let this process do something in the middle of a step, if it has this rank."""
    gradients = Trainer.gradients

    def changed(trainer: Trainer, subnetwork: Subnetwork) -> torch.Tensor:
        loss = gradients(trainer, subnetwork)
        if trainer.processes.rank == rank and trainer.step == AT:
            act()
        return loss

    return patch.object(Trainer, "gradients", changed)


def other_layers(rank: int) -> AbstractContextManager[object]:
    """Let the method of this process draw other layers than the others' at one step."""
    subnetwork = RaPTr.subnetwork

    def changed(method: RaPTr, step: int) -> Subnetwork:
        drawn = subnetwork(method, step)
        mine = int(os.environ["RANK"]) == rank and step == AT
        return replace(drawn, scales=drawn.scales[::-1][1:] + drawn.scales[-1:]) if mine else drawn

    return patch.object(RaPTr, "subnetwork", changed)


def full_disk(rank: int) -> AbstractContextManager[object]:
    """Let this process find no space for its part of a checkpoint."""
    sync = files.sync

    def changed(path: Path) -> None:
        if int(os.environ["RANK"]) == rank and path.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        sync(path)

    return patch.object(files, "sync", changed)


def main(folder: Path) -> None:
    """One fault after the other, the deadly one last."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    seen: dict[str, Any] = {}
    with joined() as processes:
        with in_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM)):
            seen["signal"] = attempt(folder, "signal")
        with other_layers(1):
            seen["disagreement"] = attempt(folder, "disagreement")
        seen["settings"] = attempt(folder, "settings", seed=processes.rank)
        with full_disk(1):
            seen["full disk"] = attempt(folder, "full", checkpoint_every=AT)
    with in_step(1, lambda: time.sleep(PATIENCE + 4)):
        seen["hang"] = attempt(folder, "hang", timeout=PATIENCE)
    (folder / f"seen-{processes.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
