"""The model that is judged: a folder of `transformers`, a raptr export or anybody's, as a sequence classifier."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.utils import logging

from raptr.files import sha256_of
from raptr.train import checkpoint
from raptr.train.exporting import export

# What the configurations of encoders call their dropout rates.
DROPOUT = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "classifier_dropout_prob"),
    *("dropout", "attention_dropout", "seq_classif_dropout", "embedding_dropout", "mlp_dropout", "pooler_dropout"),
)
NARROW = 512  # widths up to this get NARROW_RATES too
RATES = (1e-5, 2e-5, 3e-5, 5e-5)  # the paper's
NARROW_RATES = (1e-4, 3e-4)


@final
@dataclass(frozen=True)
class Encoder:
    """A folder with an encoder and its tokenizer."""

    folder: Path
    name: str
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates to try unless others are given: narrow models want higher ones than the paper's."""
        width = getattr(self.config, "hidden_size", None)
        return (*RATES, *NARROW_RATES) if isinstance(width, int) and width <= NARROW else RATES

    def longest(self, length: int) -> int:
        """How many tokens a sequence may have, at most `length`."""
        positions = getattr(self.config, "max_position_embeddings", None)
        limits = [length, self.tokenizer.model_max_length, *([positions] if isinstance(positions, int) else [])]
        return int(min(limits))

    def dropout_settings(self) -> list[str]:
        """The settings of the configuration that are dropout rates."""
        known = self.config.to_dict()
        return [name for name in DROPOUT if name in known]

    def classifier(self, outputs: int, dropout: float) -> PreTrainedModel:
        """The model with a new head of so many outputs, in float32; the head is drawn from torch's generator."""
        changed = {"num_labels": outputs, **dict.fromkeys(self.dropout_settings(), dropout)}
        with _quiet():
            config = AutoConfig.from_pretrained(self.folder, local_files_only=True, **changed)
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                self.folder,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        assert isinstance(model, PreTrainedModel)
        body = f"{model.base_model_prefix}."
        lost = sorted(name for name in loading["missing_keys"] if name.startswith(body) and "pooler" not in name)
        if lost:
            raise ValueError(
                f"{self.folder} has no weights for {len(lost)} tensors of the encoder, such as {lost[0]}; "
                f"its weights are not those of a {type(model).__name__}"
            )
        return model


def load_encoder(model: Path) -> Encoder:
    """The encoder in a folder; of a run it is the export, which is made if there is none."""
    if not model.is_dir():
        raise ValueError(f"the model is {str(model)!r}, which is no folder; name a run, an export or an encoder")
    is_run = (model / "config.yaml").is_file() and not (model / "config.json").is_file()
    folder = _exported(model) if is_run else model
    resolved = folder.resolve()
    name = resolved.parent.name if resolved.name == "export" else resolved.name
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} has no config.json with a model.safetensors; name a run, an export or an encoder's folder"
        )
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        with _quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder} cannot be loaded by transformers: {_line(error)}") from error
    _refuse_other(folder, config)
    if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise ValueError(f"{folder} is a model of type {kind}, for which transformers has no sequence classifier")
    if tokenizer.pad_token_id is None:
        raise ValueError(f"the tokenizer in {folder} has no padding token, which batches of several texts need")
    return Encoder(folder, name, config, tokenizer, _fingerprint(folder))


def _exported(run: Path) -> Path:
    """The export of a run's newest checkpoint; an earlier one is replaced."""
    folder, newest = run / "export", checkpoint.newest(run / "checkpoints")
    written = folder / "config.json"
    if written.is_file() and (newest is None or newest.stat().st_mtime_ns <= written.stat().st_mtime_ns):
        return folder
    return export(run)


def _refuse_other(folder: Path, config: PretrainedConfig) -> None:
    kind = config.model_type
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if causal or getattr(config, "is_decoder", False):
        raise ValueError(f"{folder} is a decoder ({kind}); finetune judges encoders, trained with objective mlm")
    if tuned := [name for name in config.architectures or () if name.endswith("ForSequenceClassification")]:
        raise ValueError(f"{folder} is fine-tuned already ({tuned[0]}); name the pretrained encoder, without its head")


def _fingerprint(folder: Path) -> str:
    """A checksum of configuration, weights and tokenizer."""
    paths = sorted([*folder.glob("*.safetensors"), folder / "config.json", *folder.glob("tokenizer.json")])
    sums = "\n".join(f"{path.name} {sha256_of(path)}" for path in paths)
    return hashlib.sha256(sums.encode()).hexdigest()


def tokenize(
    encoder: Encoder, texts: Sequence[tuple[str, ...]], length: int, *, leading_space: bool
) -> list[dict[str, list[int]]]:
    """Each example's ids, with whatever else the model takes, cut to `length` tokens at the longer text."""
    if leading_space:  # a byte-level tokenizer knows most words with the space before them
        texts = [tuple(f" {text}" for text in example) for example in texts]
    columns: list[Any] = [[example[place] for example in texts] for place in range(len(texts[0]))]
    coded = encoder.tokenizer(*columns, truncation="longest_first", max_length=encoder.longest(length))
    return [{name: coded[name][i] for name in coded} for i in range(len(texts))]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from announcing that the head is new, and from drawing bars."""
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
