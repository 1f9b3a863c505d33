"""What the tests of comparisons share: a tiny comparison, its numbers, and ways to disturb it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raptr.data import TokenStore
from raptr.subnetworks import Subnetwork
from raptr.train.loop import Trainer


def asked(store: TokenStore, **keys: Any) -> dict[str, Any]:
    return {
        "settings": {
            "model": {"size": "tiny", "width": 16, "heads": 4, "head_size": 4, "mlp": 16},
            "data": {"source": str(store.path), "length": 24},
            "optimizer": {"warmup": 2, "decay": 0.3},
            "train": {"steps": 8, "batch": 4, "eval_samples": 8, "checkpoint_every": 3, "device": "cpu"},
        },
        "seeds": [0, 1],
        "peaks": [0.01],
        "entries": {"full": {"name": "full", "peaks": [0.01]}, "raptr": {"name": "raptr", "peaks": [0.01, 0.02]}},
        **keys,
    }


def numbers(out: Path) -> dict[str, Any]:
    """What a comparison found, by its folder or its record, without the times."""

    def untimed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: untimed(entry) for key, entry in value.items() if key not in ("seconds", "relative_time")}
        return [untimed(entry) for entry in value] if isinstance(value, list) else value

    path = out / "compare.json" if out.is_dir() else out
    found = untimed(json.loads(path.read_text()))
    assert isinstance(found, dict)
    return found


def at_step(count: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Do something in the optimizer step with this number, counted over all runs; returns the growing count."""
    optimize, seen = Trainer.optimize, []

    def counted(self: Trainer, subnetwork: Subnetwork) -> Any:
        seen.append(self.step)
        if len(seen) == count:
            act()
        return optimize(self, subnetwork)

    monkeypatch.setattr(Trainer, "optimize", counted)
    return seen


class Killed(BaseException):
    """Ends a run where it is, with nothing saved."""


def kill() -> None:
    raise Killed
