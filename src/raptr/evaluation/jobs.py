"""What the evaluations share: their outcome, and the small files of finished jobs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

RENAMED = ("model.name",)  # settings that may change between two commands for one folder


@final
@dataclass(frozen=True)
class Judged:
    """The outcome of an evaluation; `record` is None if no job is finished."""

    folder: Path
    record: dict[str, Any] | None
    finished: int
    planned: int

    @property
    def stopped(self) -> bool:
        """Whether it was stopped before its last job."""
        return self.finished < self.planned


def read_json(path: Path, *needed: str) -> dict[str, Any]:
    """Read the mapping in a file that a job has written; ValueError if it is damaged or lacks a key of `needed`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, and the same command makes it again") from None
    if not isinstance(value, dict) or any(key not in value for key in needed):
        raise ValueError(f"{path} is damaged (not what was written); remove it, and the same command makes it again")
    return value
