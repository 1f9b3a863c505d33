"""A trained model as what others can load: a stock model and a stock tokenizer of `transformers`; and back.

How a family's weights become those of its stock class is the family's own file; what all of them do is here and in
stock.py. No code and nothing pickled goes along.
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
    """How the models of a family are exported and read back, and what the model card says of them."""

    stock: str  # the name of the stock class
    convert: Callable[[Any, Subnetwork, Vocabulary], PreTrainedModel]  # the layers that run, as a stock model
    tokenizer: Callable[[Path, int], PreTrainedTokenizerFast]  # a `tokenizer.json`, for this many positions
    dimensions: Callable[[StockFolder], dict[str, Any]]  # settings of `model`; refuses what our network is not
    load: Callable[[Any, StockFolder], None]  # into a model of these dimensions
    task: str  # the name of the pipeline
    tags: tuple[str, ...]
    says: str  # what the model is
    example: str  # Python code that uses it
    note: str = ""  # what else to know
    sections: Mapping[str, str] = field(default_factory=dict)  # what else to know after training with an objective


def check(config: ModelConfig, subnetwork: Subnetwork, vocabulary: Vocabulary) -> None:
    """Refuse what no stock model can hold."""
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
    """Write the files that `from_pretrained` reads into a folder."""
    with _without_bars():
        model.save_pretrained(folder)
    # The weights come readable by their owner only, the other files as the system's habit is.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    tokenizer.save_pretrained(folder)
    # Newer versions write a name of the class that older ones do not know; this one they all know.
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
