"""A folder of `transformers` with a model and its tokenizer: a raptr export, or anybody's model."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from raptr.files import sha256_of
from raptr.train import checkpoint
from raptr.train.exporting import export, exported_step

TOKENIZER = ("*token*", "*vocab*", "merges*", "*.model")  # names of a tokenizer's files


@final
@dataclass(frozen=True)
class ModelFolder:
    """What a folder holds, without its weights."""

    path: Path
    name: str
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str

    @property
    def tokenizer_fingerprint(self) -> str:
        """A checksum of the tokenizer's files; models that share it share what texts become."""
        return _checksum(path for pattern in TOKENIZER for path in self.path.glob(pattern))

    def longest(self, length: int | None = None) -> int:
        """How many tokens a sequence may have, at most `length`."""
        positions = getattr(self.config, "max_position_embeddings", None)
        limits = [self.tokenizer.model_max_length, *(limit for limit in (length, positions) if isinstance(limit, int))]
        return int(min(limits))


def open_folder(model: Path) -> ModelFolder:
    """The model in a folder; of a run it is the export, which is made if there is none."""
    if not model.is_dir():
        raise ValueError(f"the model is {str(model)!r}, which is no folder; name a run, an export or a model's folder")
    is_run = (model / "config.yaml").is_file() and not (model / "config.json").is_file()
    folder = _exported(model) if is_run else model
    resolved = folder.resolve()
    name = resolved.parent.name if resolved.name == "export" else resolved.name
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} has no config.json with a model.safetensors; name a run, an export or a model's folder"
        )
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):  # the header says how long the file is
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is no whole safetensors file ({error}). Copy the folder again.") from error
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder} cannot be loaded by transformers: {_line(error)}") from error
    return ModelFolder(folder, name, config, tokenizer, _fingerprint(folder))


def refuse_mismatched(folder: Path, loading: Mapping[str, Any]) -> None:
    """Refuse weights whose shapes are not those of the configuration."""
    for name, there, wanted in sorted(loading["mismatched_keys"]):
        raise ValueError(
            f"{folder} cannot be loaded: {name} has the shape {tuple(there)}, with its config.json it would have "
            f"{tuple(wanted)}"
        )


def refuse_missing(folder: Path, names: Iterable[str], model: object) -> None:
    """Refuse weights that lack tensors of the model."""
    if lost := sorted(names):
        raise ValueError(
            f"{folder} has no weights for {len(lost)} tensors, such as {lost[0]}; its weights are not those of a "
            f"{type(model).__name__}"
        )


def _exported(run: Path) -> Path:
    """The export of a run's newest checkpoint; an earlier one is replaced."""
    folder, steps = run / "export", checkpoint.steps(run / "checkpoints")
    if not steps and (folder / "config.json").is_file():
        return folder
    return folder if steps and exported_step(folder) == steps[-1] else export(run)


def _fingerprint(folder: Path) -> str:
    """A checksum of configuration, weights and tokenizer."""
    return _checksum([*folder.glob("*.safetensors"), folder / "config.json", *folder.glob("tokenizer.json")])


def _checksum(paths: Iterable[Path]) -> str:
    sums = "\n".join(f"{path.name} {sha256_of(path)}" for path in sorted(set(paths)))
    return hashlib.sha256(sums.encode()).hexdigest()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from announcing that a head is new, and from drawing bars."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _line(error: Exception) -> str:
    """The first sentence of what transformers says, which may go on for a page."""
    return " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
