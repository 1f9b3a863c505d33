"""Checkpoints: the whole state of a run before step N, in `checkpoints/step-N/`, complete or not there.

A checkpoint holds the tensors as safetensors (written through `torch.distributed.checkpoint`, each process its
shards), the rest as `state.json`, and `manifest.json` with the size and sha256 of each file. Any number of processes
can read what any other number wrote: a tensor is assembled from the files that hold its rows.

A checkpoint is written to a hidden folder, which is renamed to `step-N` once everything is on the disk
(`raptr/files.py`). So a folder `step-N` is complete unless the disk damaged it later, which the manifest shows. If
`step-N` is missing, `.step-N.replaced` is read instead.

Nothing is pickled. The Hugging Face storage is used because the default writer of
`torch.distributed.checkpoint` pickles its metadata; with `save_distributed=True` it needs no metadata file.
"""

import contextlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from raptr import files
from raptr.distributed.processes import ALONE, Processes, explained
from raptr.distributed.sharding import is_sharded
from raptr.settings import read
from raptr.subnetworks import Shape

T = TypeVar("T")

FOLDER = "checkpoints"  # in a run's folder
STATE = "state.json"
MANIFEST = "manifest.json"
STEP = re.compile(r"step-(0|[1-9][0-9]*)")
HIDDEN = re.compile(r"\.step-(0|[1-9][0-9]*)\.(partial|replaced|removing)")


@dataclass(frozen=True)
class Progress:
    """How far a run has come: its totals before step `step`, and the fingerprint of its data."""

    step: int
    seconds: float
    flops: int | float
    flops_layers: int | float
    eval_loss: float | None
    data: str


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: the state before step `step`."""

    path: Path
    step: int
    state: Mapping[str, Any]

    def shape(self, constant: Shape) -> Shape:
        """Return the shape of the stored model, or `constant` if none is recorded, as before models could grow."""
        return self._checked(Shape, self.state["shape"], "shape.") if "shape" in self.state else constant

    def progress(self) -> Progress:
        named = {entry.name: self.state[entry.name] for entry in fields(Progress) if entry.name in self.state}
        progress = self._checked(Progress, named)
        if progress.step != self.step:
            raise ValueError(f"{self.path / STATE}: step is {progress.step}, but the folder is named {self.path.name}")
        return progress

    def _checked(self, kind: type[T], values: object, section: str = "") -> T:
        try:
            return read(kind, values, section)
        except ValueError as error:
            raise ValueError(f"{self.path / STATE} is not that of a run: {error}") from None

    def blank(self, *, without: str, parameters: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return an empty tensor to read into for each stored one whose name does not begin with `without`.

        A tensor KIND.NAME that has the shape of the parameter NAME is sharded like that parameter.
        """
        described = HuggingFaceStorageReader(str(self.path)).read_metadata().state_dict_metadata
        blank: dict[str, Tensor] = {}
        for name, entry in described.items():
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(without):
                parameter, dtype = (parameters or {}).get(name.partition(".")[2]), entry.properties.dtype
                if parameter is not None and is_sharded(parameter) and parameter.shape == entry.size:
                    blank[name] = torch.empty_like(parameter, dtype=dtype)
                else:
                    blank[name] = torch.empty(entry.size, dtype=dtype)
        return blank

    def read(self, into: Mapping[str, Tensor], prefix: str = "") -> None:
        """Read the stored tensors whose names begin with `prefix` into `into`; names, shapes and dtypes must match."""
        # A tensor on the meta device would be replaced, not filled.
        assert not any(tensor.is_meta for tensor in into.values())
        reader = HuggingFaceStorageReader(str(self.path))
        described = reader.read_metadata().state_dict_metadata
        stored = {name: entry for name, entry in described.items() if name.startswith(prefix)}
        problems = []
        if missing := sorted(into.keys() - stored.keys()):
            problems.append(f"it does not have {_listing(missing)}")
        if surplus := sorted(stored.keys() - into.keys()):
            problems.append(f"it has {_listing(surplus)} too many")
        differing = []
        for name in sorted(into.keys() & stored.keys()):
            actual, wanted = stored[name], into[name]
            assert isinstance(actual, TensorStorageMetadata)
            if (actual.properties.dtype, actual.size) != (wanted.dtype, wanted.shape):
                has = f"{actual.properties.dtype} {tuple(actual.size)}"
                differing.append(f"{name} as {has} instead of {wanted.dtype} {tuple(wanted.shape)}")
        if differing:
            problems.append(f"it has {_listing(differing)}")
        if problems:
            raise ValueError(f"checkpoint {self.path} does not fit: {'; '.join(problems)}")
        targets = {name: tensor.detach() for name, tensor in into.items()}
        with _one_process():
            state_dict_loader.load(targets, storage_reader=reader, no_dist=True)


def place_of(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint, which need not exist."""
    return folder / f"step-{step}"


def steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint in this folder, intact or damaged, in ascending order."""
    return sorted(_checkpoints(folder))


def load_latest(folder: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint, with a warning for each newer one, or None if there are no checkpoints.

    Raises ValueError if all of them are damaged.
    """
    damaged: list[tuple[int, str]] = []
    for step, path in sorted(_checkpoints(folder).items(), reverse=True):
        if problem := _damage(path):
            damaged.append((step, problem))
            continue
        for newer, problem in damaged:
            message = f"step-{newer} in {folder} is damaged ({problem}); step-{step} is used instead"
            warnings.warn(f"checkpoint {message}", stacklevel=2)
        return Checkpoint(path, step, _state(path))
    if damaged:
        problems = ", ".join(f"step-{step} ({problem})" for step, problem in damaged)
        remedy = "restore one of them, or remove them all to start over"
        raise ValueError(f"every checkpoint in {folder} is damaged: {problems}; {remedy}")
    return None


def newest(folder: Path) -> Path | None:
    """Return the path of the checkpoint of the highest step, intact or damaged, or None."""
    return max(_checkpoints(folder).items(), default=(0, None))[1]


def load(folder: Path, step: int) -> Checkpoint:
    """Return the checkpoint of a step; raises ValueError if it is missing or damaged."""
    paths = _checkpoints(folder)
    if step not in paths:
        raise ValueError(f"step is {step}; allowed, since they have a checkpoint: {_listing(sorted(map(str, paths)))}")
    if problem := _damage(paths[step]):
        raise ValueError(f"checkpoint {paths[step]} is damaged: {problem}")
    return Checkpoint(paths[step], step, _state(paths[step]))


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep: int | None,
    processes: Processes = ALONE,
) -> Path:
    """Write checkpoint `step-N`, then remove all but the newest `keep` (None: keep all).

    Each process writes its own tensors; the first process does everything else.
    """
    assert step >= 0, step
    if keep is not None and keep < 1:
        raise ValueError(f"keep: {keep} checkpoints; at least 1, or None to keep all")
    text = json.dumps(dict(state), indent=2, allow_nan=False) + "\n"
    path = place_of(folder, step)
    with contextlib.ExitStack() as stack:
        with processes.together():
            if processes.first:
                if not folder.is_dir():
                    folder.mkdir(parents=True)
                    files.sync(folder.parent)
                _clean(folder)
                stack.enter_context(files.new_folder(path))
        _write(files.hidden(path, "partial"), tensors, text, processes)
        with processes.together():
            stack.close()  # renames the folder to its final name
            if processes.first:
                _prune(folder, step, keep)
    return path


def _prune(folder: Path, step: int, keep: int | None) -> None:
    if keep is not None:
        # A later step can only be a checkpoint too damaged to resume from: it must not displace an intact one.
        past = {number: old for number, old in _checkpoints(folder).items() if number <= step}
        for number in sorted(past)[:-keep]:
            files.remove(past[number], place_of(folder, number))


def _write(partial: Path, tensors: Mapping[str, Tensor], state: str, processes: Processes) -> None:
    """Write a complete checkpoint into a new folder and sync it to the disk, the manifest last."""
    # torch would pickle anything that is not a tensor.
    assert all(isinstance(tensor, Tensor) for tensor in tensors.values())
    # Safetensors refuses strided views; only those are copied here.
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
    with _one_process(), explained(processes):
        group = processes.control
        state_dict_saver.save(plain, storage_writer=writer, process_group=group, no_dist=group is None)
    entries: dict[str, dict[str, int | str]] = {}
    with processes.together():
        if processes.first:
            (partial / STATE).write_bytes(state.encode())
        patterns = (f"shard-{processes.rank + 1:05}-*", *([STATE] if processes.first else []))
        for path in [path for names in patterns for path in partial.glob(names)]:
            files.sync(path)
        entries = {name: entry for names in patterns for name, entry in _contents(partial, names).items()}
    contents = {name: entry for share in processes.gather(entries) for name, entry in share.items()}
    with processes.together():
        if processes.first:
            (partial / MANIFEST).write_bytes(_manifest(contents))
            files.sync(partial / MANIFEST)
            files.sync(partial)


def _contents(path: Path, names: str = "*") -> dict[str, dict[str, int | str]]:
    """Return the size and sha256 of each file that matches the pattern `names`, except the manifest."""
    contents: dict[str, dict[str, int | str]] = {}
    for file in path.glob(names):
        if file.name != MANIFEST and file.is_file():
            contents[file.name] = {"size": file.stat().st_size, "sha256": files.sha256_of(file)}
    return contents


def _manifest(contents: Any) -> bytes:
    """Return a manifest's bytes; the same contents always give the same bytes."""
    return (json.dumps(contents, indent=2, sort_keys=True) + "\n").encode()


def _damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, or None if they match its manifest."""
    try:
        expected, actual = json.loads(written := (path / MANIFEST).read_bytes()), _contents(path)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
    except (ValueError, RecursionError):
        return f"{MANIFEST} is not valid JSON"
    # The manifest must have exactly the bytes that would be written, so that any change is noticed, even a space.
    if not isinstance(expected, dict) or STATE not in expected or _manifest(expected) != written:
        return f"{MANIFEST} is not as it was written"
    for name, entry in expected.items():
        if name not in actual:
            return f"{name} is missing"
        if not isinstance(entry, dict) or entry.keys() != actual[name].keys():
            return f"{MANIFEST} is not as it was written"
        if entry["size"] != actual[name]["size"]:
            return f"{name} has {actual[name]['size']} bytes, {MANIFEST} says {entry['size']}"
        if entry != actual[name]:
            return f"{name} does not have the checksum in {MANIFEST}"
    # The reader loads every tensor file in the folder, so a stray one would be loaded too.
    strays = [name for name in sorted(actual.keys() - expected.keys()) if name.endswith(".safetensors")]
    if strays:
        return f"{strays[0]} is not in {MANIFEST}"
    try:
        _state(path)
    except (ValueError, RecursionError):
        return f"{STATE} is not a mapping in JSON"
    return None


def _state(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's state.json; raises ValueError if it is not a mapping."""
    state = json.loads((path / STATE).read_bytes())
    if not isinstance(state, dict):
        raise ValueError(f"{path / STATE} is not a mapping")
    return state


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Return the path of each step's checkpoint."""
    paths: dict[int, Path] = {}
    if folder.is_dir():
        for path in folder.iterdir():
            if (match := STEP.fullmatch(path.name)) and path.is_dir():
                paths[int(match[1])] = path
            elif (match := HIDDEN.fullmatch(path.name)) and match[2] == "replaced":
                paths.setdefault(int(match[1]), path)
    return paths


def _clean(folder: Path) -> None:
    """Remove what an interrupted save left behind, and restore a checkpoint that it was replacing."""
    for path in list(folder.iterdir()):
        if match := HIDDEN.fullmatch(path.name):
            files.recover(place_of(folder, int(match[1])))


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Hide the warning about a single process, and raise the original error instead of torch's wrapper."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
        try:
            yield
        except CheckpointException as wrapper:
            # The wrapper is a BaseException, which neither `except OSError` nor `except Exception` would catch.
            raise next(iter(wrapper.failures.values()))[0] from None


def _listing(names: Sequence[str]) -> str:
    """Return the first names for an error message, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
