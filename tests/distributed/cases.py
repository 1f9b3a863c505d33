"""The runs that are compared between one process and several: tiny, 50 steps, two changes of stage."""

from pathlib import Path
from typing import Any

from raptr.train.config import Config

STEPS = 50
RAPTR = {"name": "raptr", "schedule": "2-3-4", "scaling": "sqrt"}
CASES: dict[str, dict[str, Any]] = {
    "bert, raptr": {"method": RAPTR},
    "decoder, raptr, zero, accumulated": {
        "method": RAPTR,
        "optimizer": {"idle": "zero", "clip": 0.05},
        "train": {"accumulate": 2},
    },
    "bert, stacking, recomputed": {"method": {"name": "stacking", "schedule": "2-3-4"}, "train": {"recompute": True}},
    "bert, muon": {"method": RAPTR, "optimizer": {"name": "muon"}, "train": {"steps": 12}},
    "decoder, adafactor": {
        "method": RAPTR,
        "optimizer": {"name": "adafactor"},
        "model": {"width": 128, "head_size": 32, "mlp": 132},  # some matrices are large enough to be factored
        "train": {"steps": 6, "checkpoint_every": 3},
    },
    "bert, msg in width": {
        "method": {"name": "msg", "schedule": "2-4-4", "heads": "1-3-4", "parts": "1-3-4", "mask_steps": 2},
        "train": {"steps": 15, "checkpoint_every": 12},
    },
    "bert, started": {"method": RAPTR, "train": {"steps": 12}},  # from the export of the first case
    "bert, gather": {"method": RAPTR, "train": {"execution": "gather", "accumulate": 2, "steps": 12}},
    "decoder, heads and parts": {
        "method": {**RAPTR, "heads": "2-3-4", "parts": "1-2-4"},
        "optimizer": {"idle": "zero"},
        "train": {"steps": 15},
    },
    "bert, heads and parts, skipped": {
        "method": {**RAPTR, "heads": "2-3-4", "parts": "1-2-4"},
        "optimizer": {"idle": "skip"},
        "train": {"steps": 15},
    },
}


def config(case: str, folder: Path, engine: str | None = None, **train: Any) -> Config:
    """The settings of a case; its data is in the folder of its family's name."""
    sections, family = CASES[case], case.split(",")[0]
    settings: dict[str, Any] = {
        "steps": STEPS,
        "batch": 8,
        "eval_samples": 12,
        "eval_every": 25,
        "checkpoint_every": 25,
        "log_every": 5,
    }
    settings |= {"device": "cpu", "tracker": "none", "parallel": engine, **sections.get("train", {}), **train}
    model = {"family": family, "layers": 4, "width": 16, "heads": 4, "head_size": 4, "mlp": 20}
    model |= sections.get("model", {})
    return Config.read(
        {
            "model": {"start": str(folder / "export")} if "started" in case else model,
            "method": sections["method"],
            "data": {"source": str(folder / family), "length": 16, "vocabulary": 600},
            "optimizer": {"peak": 0.01, "warmup": 3, "clip": 0.5, **sections.get("optimizer", {})},
            "train": {key: value for key, value in settings.items() if value is not None},
        }
    )
