"""Run by several processes, which torchrun starts again when one is killed: a training by the command line, under fire.

python -m torch.distributed.run --nproc-per-node N --max-restarts K -m tests.distributed.killed FOLDER CONFIG KILLS

KILLS is a JSON list of {"rank", "step", "call"}. With a `call`, such as "rename" (of `os`), the process is killed in
the writing of the checkpoint after that step, at the first such call; without one, in the middle of that step. Kills
come one after the other, each once. Whoever gets to the end trains the same again, undisturbed, in another folder.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from raptr.cli import main as raptr
from raptr.subnetworks import Subnetwork
from raptr.train.loop import Trainer


def die(mark: Path) -> None:
    """End this process as a kill from outside does, and remember it."""
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def arm(kill: dict[str, Any], mark: Path) -> None:
    """Set one kill up in the process that it is meant for."""
    if int(os.environ["RANK"]) != kill["rank"]:
        return
    update, save = Trainer.update, Trainer.save

    def updating(trainer: Trainer, loss: torch.Tensor, subnetwork: Subnetwork) -> torch.Tensor:
        if trainer.step == kill["step"]:
            die(mark)
        return update(trainer, loss, subnetwork)

    def saving(trainer: Trainer) -> None:
        if trainer.step == kill["step"]:
            patch.object(os, kill["call"], lambda *_, **__: die(mark)).start()
        save(trainer)

    if "call" in kill:
        patch.object(Trainer, "save", saving).start()
    else:
        patch.object(Trainer, "update", updating).start()


def train(config: str, run: Path) -> None:
    """The command, whose exit code 0 is no end of this program."""
    sys.argv = ["raptr", "pretrain", "--config", config, "--run", str(run)]
    try:
        raptr()
    except SystemExit as ended:
        if ended.code:
            raise


def main(folder: Path, config: str, kills: list[dict[str, Any]]) -> None:
    """Train under fire; then undisturbed."""
    torch.set_num_threads(1)
    marks = [folder / f"killed-{number}" for number in range(len(kills))]
    left = [number for number, mark in enumerate(marks) if not mark.exists()]
    if left:
        arm(kills[left[0]], marks[left[0]])
    train(config, folder / "fire")
    train(config, folder / "calm")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
