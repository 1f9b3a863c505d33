"""A folder with a model of `transformers` and its tokenizer: a raptr export, or anyone's model."""

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

TOKENIZER = ("*token*", "*vocab*", "merges*", "*.model")  # patterns of the names of a tokenizer's files


@final
@dataclass(frozen=True)
class ModelFolder:
    """What a model's folder holds, except the weights."""

    path: Path
    name: str
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str

    @property
    def tokenizer_fingerprint(self) -> str:
        """A checksum of the tokenizer's files; models with the same one tokenize texts alike."""
        return _checksum(path for pattern in TOKENIZER for path in self.path.glob(pattern))

    def longest(self, length: int | None = None) -> int:
        """Return how many tokens a sequence may have: what model and tokenizer allow, at most `length`."""
        positions = getattr(self.config, "max_position_embeddings", None)
        limits = [self.tokenizer.model_max_length, *(limit for limit in (length, positions) if isinstance(limit, int))]
        return int(min(limits))


def open_folder(model: Path) -> ModelFolder:
    """Open the model in a folder. For a run this is its export, which is made if it is missing or out of date."""
    if not model.is_dir():
        raise ValueError(
            f"the model is {str(model)!r}, which is not a folder; name a run, an export or a model's folder"
        )
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
            with safe_open(file, "pt"):  # this compares the file's length with its header
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a complete safetensors file ({error}). Copy the folder again.") from error
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder} cannot be loaded by transformers: {_line(error)}") from error
    return ModelFolder(folder, name, config, tokenizer, _fingerprint(folder))


def refuse_mismatched(folder: Path, loading: Mapping[str, Any]) -> None:
    """Refuse weights whose shapes differ from those of the configuration."""
    for name, shape, wanted in sorted(loading["mismatched_keys"]):
        raise ValueError(
            f"{folder} cannot be loaded: {name} has the shape {tuple(shape)}, with its config.json it would have "
            f"{tuple(wanted)}"
        )


def refuse_missing(folder: Path, names: Iterable[str], model: object) -> None:
    """Refuse weights that lack some of the model's tensors."""
    if lost := sorted(names):
        raise ValueError(
            f"{folder} has no weights for {len(lost)} tensors, such as {lost[0]}; its weights are not those of a "
            f"{type(model).__name__}"
        )


def _exported(run: Path) -> Path:
    """Return the export of a run's newest checkpoint; an export of another step is replaced."""
    folder, steps = run / "export", checkpoint.steps(run / "checkpoints")
    if not steps and (folder / "config.json").is_file():
        return folder
    return folder if steps and exported_step(folder) == steps[-1] else export(run)


def _fingerprint(folder: Path) -> str:
    """Return a checksum of configuration, weights and tokenizer."""
    return _checksum([*folder.glob("*.safetensors"), folder / "config.json", *folder.glob("tokenizer.json")])


def _checksum(paths: Iterable[Path]) -> str:
    sums = "\n".join(f"{path.name} {sha256_of(path)}" for path in sorted(set(paths)))
    return hashlib.sha256(sums.encode()).hexdigest()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from reporting that a head is new, and from drawing progress bars."""
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
    """Return the first sentence of an error of transformers, which can be a page long."""
    return " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
