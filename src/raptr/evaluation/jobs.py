"""What the evaluations share: what came out, small files of finished jobs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

RENAMED = ("model.name",)  # settings that may change between commands


@final
@dataclass(frozen=True)
class Judged:
    """What came out; `record` is None where no job is finished."""

    folder: Path
    record: dict[str, Any] | None
    finished: int
    planned: int

    @property
    def stopped(self) -> bool:
        """Whether it was asked to stop before the last job."""
        return self.finished < self.planned


def read_json(path: Path, *needed: str) -> dict[str, Any]:
    """The mapping in a file that a job has written, which has these keys."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, and the same command makes it again") from None
    if not isinstance(value, dict) or any(key not in value for key in needed):
        raise ValueError(f"{path} is damaged (not what was written); remove it, and the same command makes it again")
    return value
