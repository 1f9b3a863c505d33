"""TensorBoard: event files in `tensorboard/`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, final

from raptr.train.trackers.contract import Tracker


@final
class TensorBoard(Tracker):
    """Writes event files, without the configuration."""

    package: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "train"
    folder: ClassVar[str] = "tensorboard"

    def __init__(self, run: Path, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import

        self._board = SummaryWriter(str(run / self.folder), purge_step=step)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._board.close()
