"""The encoder to be scored, as a sequence classifier of `transformers`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from raptr.evaluation.folder import ModelFolder, open_folder, quiet, refuse_mismatched, refuse_missing

# Names of dropout rates in the configurations of encoders.
DROPOUT = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "classifier_dropout_prob"),
    *("dropout", "attention_dropout", "seq_classif_dropout", "embedding_dropout", "mlp_dropout", "pooler_dropout"),
)
NARROW = 512  # encoders up to this width also try NARROW_RATES
RATES = (1e-5, 2e-5, 3e-5, 5e-5)  # the paper's
NARROW_RATES = (1e-4, 3e-4)


@final
@dataclass(frozen=True)
class Encoder:
    """An encoder and its tokenizer, in a folder."""

    folder: ModelFolder

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates to try by default: narrow models also need higher ones than the paper's."""
        width = getattr(self.folder.config, "hidden_size", None)
        return (*RATES, *NARROW_RATES) if isinstance(width, int) and width <= NARROW else RATES

    def dropout_settings(self) -> list[str]:
        """Return the names of the dropout rates in the configuration."""
        known = self.folder.config.to_dict()
        return [name for name in DROPOUT if name in known]

    def classifier(self, outputs: int, dropout: float) -> PreTrainedModel:
        """Return the model in float32 with a new head of `outputs` outputs, drawn from torch's global generator."""
        changed = {"num_labels": outputs, **dict.fromkeys(self.dropout_settings(), dropout)}
        path = self.folder.path
        with quiet():
            config = AutoConfig.from_pretrained(path, local_files_only=True, **changed)
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                path,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        refuse_mismatched(path, loading)
        assert isinstance(model, PreTrainedModel)
        body = f"{model.base_model_prefix}."
        lost = (name for name in loading["missing_keys"] if name.startswith(body) and "pooler" not in name)
        refuse_missing(path, lost, model)
        return model


def load_encoder(model: Path) -> Encoder:
    """Load the encoder in a folder. For a run this is its export, which is made if it is missing or out of date."""
    folder = open_folder(model)
    _refuse_other(folder.path, folder.config)
    if folder.config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise ValueError(
            f"{folder.path} is a model of type {folder.config.model_type}, for which transformers has no sequence "
            "classifier"
        )
    if folder.tokenizer.pad_token_id is None:
        raise ValueError(f"the tokenizer in {folder.path} has no padding token, which batches of several texts need")
    return Encoder(folder)


def is_decoder(config: PretrainedConfig) -> bool:
    """Return whether a configuration is that of a decoder: a model that continues a text."""
    kind = config.model_type
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return causal or bool(getattr(config, "is_decoder", False))


def _refuse_other(path: Path, config: PretrainedConfig) -> None:
    if is_decoder(config):
        raise ValueError(
            f"{path} is a decoder ({config.model_type}); finetune judges encoders, trained with objective mlm. "
            "Use raptr fewshot for it."
        )
    if tuned := [name for name in config.architectures or () if name.endswith("ForSequenceClassification")]:
        raise ValueError(f"{path} is fine-tuned already ({tuned[0]}); name the pretrained encoder, without its head")


def tokenize(
    encoder: Encoder, texts: Sequence[tuple[str, ...]], length: int, *, leading_space: bool
) -> tuple[list[dict[str, list[int]]], int]:
    """Return each example's ids and other model inputs, and how many examples were cut.

    An example of more than `length` tokens, or of more than the model reads, loses tokens of its longer text.
    """
    if leading_space:  # byte-level tokenizers know most words with a space before them
        texts = [tuple(f" {text}" for text in example) for example in texts]
    columns: list[Any] = [[example[place] for example in texts] for place in range(len(texts[0]))]
    coded = encoder.folder.tokenizer(*columns, truncation="longest_first", max_length=encoder.folder.longest(length))
    cut = sum(bool(encoding.overflowing) for encoding in coded.encodings or ())
    return [{name: coded[name][i] for name in coded} for i in range(len(texts))], cut
