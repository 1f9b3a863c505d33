"""The run folder: what a run was asked to do, where it ran, and what it measured.

config.yaml        the resolved configuration
environment.json   versions, commit, hardware, threads
metrics.jsonl      append-only; readers keep the last record of a step and ignore a torn line
tokenizer.json     that of the data, so that an export needs nothing but the run
tensorboard/       the same numbers for TensorBoard
checkpoints/       step-N/
export/            the model as `transformers` loads it
report/            plots and tables, made from the rest
"""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
import yaml

from raptr.train.config import Config, differences
from raptr.train.safety import LOCK, locked

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

PACKAGES = ("raptr", "torch", "numpy", "transformers", "tokenizers", "safetensors")


@final
class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tokenizer = path / "tokenizer.json"
        self.report = path / "report"
        self._board: SummaryWriter | None = None

    @contextmanager
    def opened(self, config: Config, *, fresh: bool = False) -> Iterator[None]:
        """Hold the folder to start a run, or to go on with the one that is here; `fresh` replaces it."""
        if self.path.exists() and not self.config.exists() and any(p.name != LOCK for p in self.path.iterdir()):
            raise ValueError(f"run is {str(self.path)!r}, a folder with other things in it; name a new or empty one")
        with locked(self.path):
            if fresh:
                self._clear()
            self._start(config)
            try:
                yield
            finally:
                self._close()

    def read(self) -> Config:
        """The configuration of the run that is here."""
        if not self.config.is_file():
            raise ValueError(
                f"run is {str(self.path)!r}, which holds no run (no {self.config.name}); the folder of a run is allowed"
            )
        given = yaml.safe_load(self.config.read_text(encoding="utf-8"))
        return Config.read(given if isinstance(given, dict) else {})

    def _start(self, config: Config) -> None:
        if self.config.exists():
            # read as a configuration: a setting that came later has its default
            changed = differences(self.read().mapping(), config.mapping())
            if changed:
                raise ValueError(
                    f"the run in {str(self.path)!r} was started with other settings ({'; '.join(changed)}); "
                    "go on with the old ones, name another run, or replace this one with --fresh"
                )
        write_file(self.config, yaml.safe_dump(config.mapping(), sort_keys=False))
        write_file(self.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
        if self.metrics.exists() and not self.metrics.read_bytes().endswith(b"\n"):
            self._append("\n")  # a killed run may leave half a line; the next record starts on its own

    def record(self, record: Mapping[str, Any]) -> None:
        """Append one record to the metrics, and to TensorBoard's."""
        self._append(json.dumps(record) + "\n")
        if self._board is None:
            from torch.utils.tensorboard.writer import SummaryWriter  # slow to import

            # what a killed run wrote beyond its checkpoint is hidden, since it is written again
            self._board = SummaryWriter(str(self.path / "tensorboard"), purge_step=record["step"])
        for key, value in record.items():
            if key not in ("kind", "step") and isinstance(value, int | float):
                self._board.add_scalar(f"{record['kind']}/{key}", value, record["step"])

    def _close(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None

    def _append(self, text: str) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(text)

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != LOCK:
                entry.unlink()


def environment() -> dict[str, Any]:
    """Versions, commit and hardware, to stand beside every number the run gives."""
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "commit": _commit(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # a source tree that is on the path but not installed
        return None


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


def write_file(path: Path, text: str) -> None:
    """Replace a file as a whole, so that a kill leaves the old or the new one."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
