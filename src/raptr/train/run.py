"""The run folder: what a run was asked to do, where it ran, and what it measured.

config.yaml        the complete configuration, with method, device and precision decided, never `auto`
environment.json   a list of the starts that trained: first step, device, versions, commit, hardware, threads
metrics.jsonl      append-only; readers keep the last record of a step and ignore an incomplete line
tokenizer.json     the data's tokenizer, so that an export needs nothing but the run; with tokenizer_config.json if the
                   data has one
tensorboard/       the same numbers for TensorBoard, or in wandb/ for W&B: `train.tracker`
checkpoints/       step-N/
export/            the model in the format of `transformers`
report/            plots and tables, derived from the rest
evaluation/        scores on tasks, written by `raptr finetune` and `raptr fewshot`

A folder with config.yaml and environment.json is a run's. Both are written before the first step, but only after the
data was checked and the model built. Once a step was trained, environment.json may be missing. A run that has trained
no step yet can be started again with any settings.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

import torch
import yaml

from raptr.data.tokenizer import CONFIG
from raptr.files import hidden, new_file
from raptr.strict_yaml import load_yaml
from raptr.train import checkpoint
from raptr.train.config import ROUNDING, Config, differences
from raptr.train.safety import LOCK, locked
from raptr.train.trackers.contract import Tracker
from raptr.train.trackers.registry import TRACKERS

# What raptr writes into a run's folder besides config.yaml and environment.json; comparisons write outcome.json.
WRITTEN = re.compile(
    r"metrics\.jsonl|tokenizer(_config)?\.json|outcome\.json|checkpoints|evaluation|report|export(-\d+-layers)?(-step-\d+)?|"
    + "|".join(tracker.folder for tracker in TRACKERS.values())
)
PARTIAL = re.compile(r"\.(config\.yaml|environment\.json|outcome\.json|export.*)\.(partial|replaced|removing)")
COMPARED = {"data", "processes"}  # what a start compares with the start before it
PACKAGES = ("raptr", "torch", "numpy", "transformers", "tokenizers", "safetensors")


@final
class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self.writes = path, writes  # of several processes, only one writes
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / checkpoint.FOLDER
        self.tokenizer = path / "tokenizer.json"
        self.report = path / "report"
        self._held: Config | None = None  # the configuration that the open folder is held for
        self._tracker: Tracker | None = None

    @contextmanager
    def opened(self, config: Config, *, fresh: bool = False) -> Iterator[Config]:
        """Lock the folder for a new run, for the run in it, or (`fresh`) for one that replaces that run.

        Yields the configuration to train with, in which method, device and precision are decided. Writes nothing yet.
        Raises ValueError if the folder holds other things, a run with other settings, or a run that is training.
        """
        is_run = self.config.is_file() and (self.environment.is_file() or self.begun())
        others = sorted(p.name for p in self.path.iterdir() if p.name != LOCK) if self.path.exists() else []
        strange = [name for name in others if not PARTIAL.fullmatch(name)]
        if strange == [self.environment.name] and hidden(self.config, "partial").name in others:
            strange = []  # a start was killed between its two renames
        if not is_run and strange:
            raise ValueError(
                f"run is {str(self.path)!r}, a folder without a run that holds {', '.join(others[:4])}; "
                "name a new or an empty folder"
            )
        refusal = f"run is {str(self.path)!r}, where another process is training; wait for it, or name another run"
        with locked(self.path, refusal):
            try:
                self._held = self._settled(config, self.read() if is_run else None, fresh=fresh)
                yield self._held
            finally:
                self._close()

    def read(self) -> Config:
        """Return the configuration of the run in this folder; raises ValueError if there is none."""
        if not self.config.is_file():
            raise ValueError(
                f"run is {str(self.path)!r}, which holds no run (no {self.config.name}); the folder of a run is allowed"
            )
        try:
            settings = load_yaml(self.config.read_text(encoding="utf-8"), str(self.config))
            if not isinstance(settings, dict):
                raise ValueError("it is not a mapping of sections")
            return Config.read(settings)
        except (yaml.YAMLError, ValueError) as error:
            raise ValueError(f"{self.config} is not the configuration of a run: {_line(error)}") from error

    def starts(self) -> list[dict[str, Any]]:
        """Return the starts that trained so far, oldest first; empty if there is no environment.json."""
        if not self.environment.is_file():
            return []
        try:
            starts = json.loads(self.environment.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            problem = f"not valid JSON ({_line(error)})"
        else:
            listed = starts if isinstance(starts, list) else []
            if listed and all(isinstance(start, dict) and start.keys() >= COMPARED for start in listed):
                return listed
            problem = "no list of starts"
        raise ValueError(
            f"{self.environment} is {problem}; restore it, remove it to go on without it, or replace this run with "
            "--fresh"
        )

    def begun(self) -> bool:
        """Return whether a step was trained here: there is a checkpoint or a training record."""
        if checkpoint.newest(self.checkpoints) is not None:
            return True
        return self.metrics.is_file() and b'"kind": "train"' in self.metrics.read_bytes()

    def _settled(self, config: Config, begun: Config | None, *, fresh: bool) -> Config:
        """Return the configuration to train with: `auto` as decided when the run began, or now if it is a new run."""
        if begun is None or fresh or not self.begun():
            return config.resolved()
        wanted = config.following(begun)
        changed = differences(begun.mapping(), wanted.mapping())
        if refused := [f"{key}: {change}" for key, change in changed.items() if key not in ROUNDING]:
            raise ValueError(
                f"the run in {str(self.path)!r} was started with other settings ({'; '.join(refused)}); "
                "go on with the old ones, name another folder with --run, or replace this run with --fresh"
            )
        try:
            settled = wanted.resolved()
        except ValueError as error:
            device, precision = begun.train.device, begun.train.precision
            raise ValueError(
                f"{error} The run in {str(self.path)!r} began with train.device {device} and train.precision "
                f"{precision}; --device and --set train.precision go on with another, and with other rounding."
            ) from None
        if changed:
            changes = "; ".join(f"{key}: {change}" for key, change in changed.items())
            warnings.warn(f"the run in {str(self.path)!r} goes on with other rounding ({changes})", stacklevel=4)
        return settled

    def clear(self) -> None:
        """Remove what raptr wrote for the run in this folder, except the two files that mark it as a run."""
        for entry in self.path.iterdir() if self.writes and self.config.is_file() else ():
            if PARTIAL.fullmatch(entry.name) or WRITTEN.fullmatch(entry.name):
                _remove(entry)

    def begin(self, config: Config, tokenizer: Path, start: Mapping[str, Any]) -> None:
        """Write the configuration, the tokenizer, and at which step, on which data and machine this start begins."""
        if not self.writes:
            return
        begun = self.begun()
        starts = self.starts() if begun else []
        if not begun:  # earlier starts, if any, came no further than their first evaluation
            _remove(self.metrics)
            for tracker in TRACKERS.values():
                _remove(self.path / tracker.folder)
        if starts:
            check_data(self.path, starts[-1]["data"], start["data"])
        count = start["processes"]
        before = starts[-1]["processes"] if starts else count
        if config.dimensions.dropout and before != count:
            raise ValueError(
                f"the run in {str(self.path)!r} was trained by {before} processes, and now there are {count}; with "
                "model.dropout their number cannot change, since each draws what it drops"
            )
        recorded = json.dumps([*starts, {**start, **environment()}], indent=2) + "\n"
        # Both are renamed when both are on disk, because a folder with only a config.yaml may not be a run's.
        with new_file(self.config) as settings, new_file(self.environment) as starts_so_far:
            settings.write_bytes(yaml.safe_dump(config.mapping(), sort_keys=False).encode())
            starts_so_far.write_bytes(recorded.encode())
        shutil.copyfile(tokenizer, self.tokenizer)
        _remove(self.tokenizer.with_name(CONFIG))
        if (names := tokenizer.with_name(CONFIG)).exists():
            shutil.copyfile(names, self.tokenizer.with_name(CONFIG))
        if self.metrics.exists() and not self.metrics.read_bytes().endswith(b"\n"):
            self._append("\n")  # a killed run may leave half a line; the next record starts a new one

    def record(self, record: Mapping[str, Any]) -> None:
        """Append one record to the metrics, and pass its numbers to the tracker."""
        if not self.writes:
            return
        self._append(json.dumps(record) + "\n")
        assert self._held is not None
        kind = TRACKERS.get(self._held.train.tracker)
        if kind is None:
            return
        if self._tracker is None:  # made with its first record, whose step it must know
            self._tracker = kind(self.path, self._held.mapping(), record["step"])
        numbers = {key: value for key, value in record.items() if key not in ("kind", "step")}
        numbers = {f"{record['kind']}/{key}": value for key, value in numbers.items() if isinstance(value, int | float)}
        self._tracker.log(record["step"], numbers)

    def _close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None

    def _append(self, text: str) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(text)


def check_data(run: Path, before: str, now: str) -> None:
    """Refuse data whose fingerprint differs from that of the data that a run was trained on."""
    if before != now:
        raise ValueError(
            f"the run in {str(run)!r} was trained on other data (fingerprint {before}, now {now}); start another run"
        )


def environment() -> dict[str, Any]:
    """Return versions, commit and hardware, which belong to every number that a run reports.

    A copy of the project without its git history takes the commit from the environment variable RAPTR_COMMIT.
    """
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "commit": _commit(Path(__file__).resolve().parents[1]) or os.environ.get("RAPTR_COMMIT") or None,
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


def _commit(package: Path) -> str | None:
    """Return the commit of the project's checkout, with `+` for uncommitted changes; None for an installed package."""
    try:
        top = _git(package, "rev-parse", "--show-toplevel")
        if Path(top).resolve() / "src" / "raptr" != package:  # another repository, with the environment in it
            return None
        return _git(package, "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*") or None
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    completed = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return completed.stdout.strip()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
