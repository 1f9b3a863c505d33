"""Export a trained model as a stock model and tokenizer of `transformers`, and read stock models back.

Each family has a file of its own that converts its weights; what the families share is here and in stock.py. An export
contains no code and no pickles.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from raptr.data.tokenizer import Vocabulary
from raptr.models.contract import ModelConfig
from raptr.models.stock import StockFolder
from raptr.subnetworks import Subnetwork


@dataclass(frozen=True)
class Exporter:
    """How a family's models are exported and read back, and what their model card says."""

    stock: str  # the name of the stock class
    convert: Callable[[Any, Subnetwork, Vocabulary], PreTrainedModel]  # to a stock model of the layers that run
    tokenizer: Callable[[Path, int], PreTrainedTokenizerFast]  # from a `tokenizer.json` and the number of positions
    dimensions: Callable[[StockFolder], dict[str, Any]]  # to settings of `model`; raises ValueError for another network
    load: Callable[[Any, StockFolder], None]  # copies the folder's weights into a model of its dimensions
    task: str  # the name of the `transformers` pipeline
    tags: tuple[str, ...]
    says: str  # a description of the model
    example: str  # Python code that uses the model
    note: str = ""  # further advice to users
    sections: Mapping[str, str] = field(default_factory=dict)  # further advice, by the objective of the training


def check(config: ModelConfig, subnetwork: Subnetwork, vocabulary: Vocabulary) -> None:
    """Raise a ValueError if no stock model can represent this subnetwork, or if the vocabulary is not the model's."""
    if vocabulary.size != config.vocabulary:
        raise ValueError(
            f"the tokenizer has {vocabulary.size} tokens and the model {config.vocabulary}. "
            "Use the tokenizer that the model was trained with."
        )
    if subnetwork.layers != config.layers:
        raise ValueError(f"the subnetwork is made for {subnetwork.layers} layers; the model has {config.layers}")
    if (subnetwork.head_gates, subnetwork.part_gates) != (None, None):
        raise ValueError("heads or MLP parts are still faded in by gates. In a stock model every gate must be 1.")
    for layer in subnetwork.kept:
        if subnetwork.scaled == "layer" and subnetwork.scales[layer] != 1:
            raise ValueError(
                f"layer {layer + 1} is scaled by {subnetwork.scales[layer]:.4g} as a whole. Only scales of its "
                "branches can be folded into a stock model's weights; a whole layer's scale must be 1 there."
            )
        for axis, kept, count in (
            ("heads", subnetwork.heads, config.shape.heads),
            ("MLP parts", subnetwork.parts, config.parts),
        ):
            if kept is not None and len(kept[layer]) != count:
                raise ValueError(
                    f"layer {layer + 1} runs {len(kept[layer])} of {count} {axis}. "
                    "A stock model has whole layers, so all of them must run."
                )


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the files that `from_pretrained` reads to `folder`."""
    with _without_bars():
        model.save_pretrained(folder)
    # The weights are written as readable by their owner alone, the other files with the system's default permissions.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    tokenizer.save_pretrained(folder)
    # Newer versions write a class name that older ones do not know. All versions know this one.
    file = folder / "tokenizer_config.json"
    facts = {**json.loads(file.read_text(encoding="utf-8")), "tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8", newline="\n")


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of `transformers`."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
