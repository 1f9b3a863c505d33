"""What a tracker is. It is made when the first number of a start is there, so that its packages are imported late."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar


class Tracker(ABC):
    """Shows a run's numbers in another program."""

    package: ClassVar[str]  # that it needs
    extra: ClassVar[str]  # of raptr, that installs the package
    folder: ClassVar[str]  # in the run's folder, all that the tracker writes

    @abstractmethod
    def __init__(self, run: Path, config: Mapping[str, Any], step: int) -> None:
        """Track the run in this folder from step `step` on; later steps of an earlier start are written again."""

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a step, each named KIND/NAME, such as eval/loss."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""
