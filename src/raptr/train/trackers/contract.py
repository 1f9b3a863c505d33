"""The interface of a tracker. It is created with the first record of a start, so its packages are imported late."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar


class Tracker(ABC):
    """Shows a run's numbers in another program."""

    package: ClassVar[str]  # the package that it needs
    extra: ClassVar[str]  # the extra of raptr that installs the package
    folder: ClassVar[str]  # the folder in the run's folder for all that the tracker writes

    @abstractmethod
    def __init__(self, run: Path, config: Mapping[str, Any], step: int) -> None:
        """Track the run in this folder from step `step` on; an earlier start may have logged some of these steps."""

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a step, each named KIND/NAME, such as eval/loss."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""
