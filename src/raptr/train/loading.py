"""Loading a run's trained model from nothing but the run's folder."""

from dataclasses import dataclass
from pathlib import Path

from raptr.data.tokenizer import read_vocabulary
from raptr.files import sha256_of
from raptr.methods import Method
from raptr.models.model import Model
from raptr.train import checkpoint
from raptr.train.checkpoint import Checkpoint
from raptr.train.config import Config
from raptr.train.run import RunFolder

TRIES = 5  # to read a checkpoint of a run that is being trained, which removes old ones


@dataclass(frozen=True)
class Loaded:
    """A model with the weights of a checkpoint, on the CPU, and what it was trained with."""

    model: Model
    config: Config
    method: Method
    checkpoint: Checkpoint


def load_model(run: Path, step: int | None = None) -> Loaded:
    """Load the model of a run's newest intact checkpoint, or of that at `step`; raises ValueError if there is none."""
    folder = RunFolder(run)
    for _ in range(TRIES):
        before = set(checkpoint.steps(folder.checkpoints))
        try:
            return _load(run, folder, step)
        except Exception:
            wanted = max(before, default=None) if step is None else step
            removed = wanted in before and wanted not in checkpoint.steps(folder.checkpoints)
            if not removed:
                raise
    raise ValueError(
        f"run is {str(run)!r}, which is being trained and removes its checkpoints before they are read. Try again "
        "when it is finished, or continue it with a larger train.keep."
    )


def _load(run: Path, folder: RunFolder, step: int | None) -> Loaded:
    config = folder.read()
    saved = checkpoint.load_latest(folder.checkpoints) if step is None else checkpoint.load(folder.checkpoints, step)
    if saved is None:
        raise ValueError(f"run is {str(run)!r}, which has no checkpoint. Train it first.")
    _check_tokenizer(folder.tokenizer, saved)
    dimensions = config.model.build(read_vocabulary(folder.tokenizer).size, config.data.length)
    method = config.make_method()
    model = dimensions.resized(saved.shape(method.target)).build(config.train.seed)
    saved.read({f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}, "model.")
    return Loaded(model, config, method, saved)


def _check_tokenizer(file: Path, found: Checkpoint) -> None:
    """Refuse a tokenizer other than that of training; checkpoints of earlier versions do not record which it was."""
    trained = found.state.get("tokenizer")
    if trained is not None and file.is_file() and sha256_of(file) != trained:
        raise ValueError(
            f"{file} is not the tokenizer that the run was trained with (sha256 {sha256_of(file)}, in training "
            f"{trained}). Put back tokenizer.json of the run's data."
        )
