"""Tiny decoders, the words they know, and tasks for them, made in a moment."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from raptr.models.export import save
from tests.evaluation.tiny import BAD, GOOD, PLAIN, opinions

QUESTION = "is it good"
PIECE = r"\n| ?[^\s]+"
SPECIALS = ("[PAD]", "[EOS]", "[UNK]", "[S2S]")
CAPITALS = {"france": "paris", "spain": "madrid", "italy": "rome", "greece": "athens"}


def words() -> list[str]:
    """Every piece of the texts below, with and without the space before it."""
    texts = [*GOOD, *BAD, *PLAIN, "yes", "no", "Question:", *QUESTION.split(), "good?", "Answer:"]
    texts += ["Answer", "these", "questions:", "Q:", "A:", "capital", "of", *CAPITALS, *(f"{c}?" for c in CAPITALS)]
    texts += CAPITALS.values()
    return ["\n", *dict.fromkeys(piece for text in texts for piece in (text, f" {text}"))]


def word_tokenizer(length: int, specials: Sequence[str] = SPECIALS) -> PreTrainedTokenizerFast:
    """A stock tokenizer of whole words, each with the space before it."""
    ids = {piece: place for place, piece in enumerate((*specials, *words()))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=length,
        clean_up_tokenization_spaces=False,
        eos_token="[EOS]",
        bos_token="[EOS]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        additional_special_tokens=[name for name in specials if name == "[S2S]"],
    )


def make_decoder(
    folder: Path, texts: Iterable[str] = (), *, length: int = 96, ul2: bool = False, seed: int = 0, steps: int = 150
) -> Path:
    """A stock Llama in a folder; trained to say the last word of the texts, if there are any."""
    tokenizer = word_tokenizer(length, SPECIALS if ul2 else SPECIALS[:3])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=length,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        _teach(model, [tokenizer.encode(text) for text in texts], steps)
    folder.mkdir(parents=True)
    save(model, tokenizer, folder)
    (folder / "README.md").write_text(f"---\ntags: [raptr, llama, {'ul2' if ul2 else 'causal'}]\n---\n\n# A model\n")
    return folder


def _teach(model: Any, rows: Sequence[list[int]], steps: int) -> None:
    """Train on what follows each answer's beginning: the last two tokens of every text."""
    if not rows:
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        chosen = [rows[(step * 32 + i) % len(rows)] for i in range(32)]
        width = max(map(len, chosen))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in chosen])
        targets = torch.tensor([[-100] * (len(row) - 2) + row[-2:] + [-100] * (width - len(row)) for row in chosen])
        loss = model(ids, labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def reviews(count: int, seed: int) -> list[dict[str, object]]:
    """Rows of BoolQ: whether a sentence praises."""
    return [
        {"passage": row["sentence"], "question": QUESTION, "label": bool(row["label"])} for row in opinions(count, seed)
    ]


def review_texts(rows: Sequence[dict[str, object]], seed: int) -> list[str]:
    """The prompts of one exemplar with their answers, as the task writes them, and a line's end."""
    random = Random(seed)

    def said(row: dict[str, object]) -> str:
        return f"{row['passage']}\nQuestion: {QUESTION}?\nAnswer: {'yes' if row['label'] else 'no'}"

    return [f"{said(random.choice(rows))}\n\n{said(row)}\n" for row in rows]


def capital_rows(count: int) -> list[dict[str, object]]:
    """Rows of NQ-open: a country's capital."""
    listed = list(CAPITALS.items())
    return [
        {"question": f"capital of {listed[i % 4][0]}", "answers": [listed[i % 4][1], "nowhere"]} for i in range(count)
    ]


def capital_texts() -> list[str]:
    """The prompts of one exemplar with their answers."""
    asked = [f"Q: capital of {country}?\nA: {city}" for country, city in CAPITALS.items()]
    return [f"Answer these questions:\n\n{shown}\n{one}\n" for shown in asked for one in asked]


assert all(re.fullmatch(PIECE, word) for word in words())
