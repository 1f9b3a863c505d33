"""Tiny encoders and tasks, made in a moment."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from raptr.models.export import save

GOOD, BAD = ("fine", "great", "lovely"), ("dull", "poor", "awful")
PLAIN = ("the", "film", "is", "a", "story", "of", "men", "who", "sing")
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def stock_tokenizer(length: int = 24) -> PreTrainedTokenizerFast:
    """A stock tokenizer of whole words, with two types of tokens for pairs."""
    ids = {word: place for place, word in enumerate((*SPECIALS, *GOOD, *BAD, *PLAIN))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def make_bert(folder: Path, *, width: int = 32, **settings: Any) -> Path:
    """A stock BERT with random weights, and its tokenizer."""
    config: dict[str, Any] = {
        "vocab_size": len(stock_tokenizer()),
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 24,
        **settings,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForMaskedLM(BertConfig(**config))
    folder.mkdir(parents=True)
    save(model, stock_tokenizer(), folder)
    return folder


def opinions(count: int, seed: int) -> list[dict[str, object]]:
    """Sentences with one word of praise or blame, and which it is."""
    random = Random(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        label = random.randrange(2)
        words = random.choices(PLAIN, k=random.randrange(2, 8))
        words.insert(random.randrange(len(words) + 1), random.choice(GOOD if label else BAD))
        rows.append({"sentence": " ".join(words), "label": label})
    return rows


def shuffled(rows: Sequence[dict[str, object]], seed: int) -> list[dict[str, object]]:
    """The same rows with their labels shuffled, so that there is nothing to learn."""
    labels = [row["label"] for row in rows]
    Random(seed).shuffle(labels)
    return [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]


def write_jsonl(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write rows as lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_task(folder: Path, train: Sequence[dict[str, object]], dev: Sequence[dict[str, object]]) -> Path:
    """A folder with both files."""
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "dev.jsonl", dev)
    return folder
