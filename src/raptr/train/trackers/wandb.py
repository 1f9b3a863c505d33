"""Weights & Biases. Nothing leaves the machine unless the environment variable WANDB_MODE is online.

The numbers of all starts are kept in `wandb/` under one id, so that W&B shows them as one run: at once if online,
otherwise after `wandb sync`. Steps that were trained twice, because the run was killed after its last checkpoint, are
logged twice: `step` is a number like any other, since W&B's own step count cannot go back. WANDB_PROJECT names the
project.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, final

from raptr.train.trackers.contract import Tracker


@final
class WandB(Tracker):
    """Logs to a W&B run whose id is kept in the run's folder."""

    package: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"
    folder: ClassVar[str] = "wandb"

    def __init__(self, run: Path, config: Mapping[str, Any], step: int) -> None:
        import wandb  # slow to import

        identity = run / self.folder / "id"
        if not identity.exists():
            identity.parent.mkdir(exist_ok=True)
            identity.write_text(secrets.token_hex(8), encoding="utf-8")
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "raptr"),
                name=run.resolve().name,
                id=identity.read_text(encoding="utf-8"),
                resume="allow",
                dir=str(run),
                config=dict(config),
                mode=os.environ.get("WANDB_MODE", "offline"),
                settings=wandb.Settings(console="off", quiet=True),  # the console belongs to raptr's progress bar
            )
        except wandb.Error as error:
            raise ValueError(f"train.tracker is wandb, which could not start: {error}") from error
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def close(self) -> None:
        self._run.finish()
