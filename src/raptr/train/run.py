"""The run folder: what a run was asked to do, where it ran, and what it measured.

config.yaml        the resolved configuration
environment.json   versions, commit, hardware, threads
metrics.jsonl      append-only; readers keep the last record of a step and ignore a torn line
checkpoints/       step-N/
report/            plots and tables, made from the rest
"""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import torch
import yaml

from raptr.train.config import Config, differences

PACKAGES = ("raptr", "torch", "numpy", "transformers", "tokenizers", "safetensors")


@final
class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.report = path / "report"

    def open(self, config: Config, *, fresh: bool) -> None:
        """Start a run here, or go on with the one that is here; `fresh` replaces it."""
        if fresh and self.path.exists():
            self._remove()
        if self.path.exists() and not self.config.exists() and any(self.path.iterdir()):
            raise ValueError(f"run is {str(self.path)!r}, a folder with other things in it; name a new or empty one")
        if self.config.exists():
            old = yaml.safe_load(self.config.read_text(encoding="utf-8"))
            changed = differences(old if isinstance(old, Mapping) else {}, config.mapping())
            if changed:
                raise ValueError(
                    f"the run in {str(self.path)!r} was started with other settings ({'; '.join(changed)}); "
                    "go on with the old ones, name another run, or replace this one with --fresh"
                )
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.config, yaml.safe_dump(config.mapping(), sort_keys=False))
        _write(self.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
        if self.metrics.exists() and not self.metrics.read_bytes().endswith(b"\n"):
            self._append("\n")  # a killed run may leave half a line; the next record starts on its own

    def record(self, record: Mapping[str, Any]) -> None:
        """Append one record to the metrics."""
        self._append(json.dumps(record) + "\n")

    def _append(self, text: str) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(text)

    def _remove(self) -> None:
        if not self.config.exists():
            raise ValueError(f"run is {str(self.path)!r}, which holds no run; only a run can be replaced")
        shutil.rmtree(self.path)


def environment() -> dict[str, Any]:
    """Versions, commit and hardware, to stand beside every number the run gives."""
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "commit": _commit(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    """The commit of the project's checkout, `+` marking uncommitted changes; None outside one."""
    here = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole, so that a kill leaves the old or the new one."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
