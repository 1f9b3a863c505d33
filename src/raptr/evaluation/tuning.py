"""Fine-tune an encoder once, at one learning rate and seed, and score it on the dev set.

The paper's recipe: 3 epochs, batches of 32, the learning rate rises linearly over 6% of the steps and then stays.
What it does not say is BERT's: AdamW with eps 1e-6, weight decay 0.01 on matrices and embeddings, gradients clipped at
norm 1, dropout 0.1, 128 tokens. The score is that of the last step; no step is chosen by its score.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from raptr.evaluation.encoder import Encoder, tokenize
from raptr.evaluation.metrics import score
from raptr.evaluation.reading import Split, TaskData
from raptr.train.safety import StopRequest

EVAL_BATCH = 128
MULTIPLE = 8  # sequences are padded to a multiple of this


@final
@dataclass(frozen=True)
class Recipe:
    """How an encoder is fine-tuned, whatever the learning rate and the seed."""

    epochs: int = 3
    batch: int = 32
    warmup: float = 0.06
    dropout: float = 0.1
    length: int = 128
    examples: int | None = None  # so many of the training examples; None: all
    leading_space: bool = False
    weight_decay: float = 0.01
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} is {value}; a whole number from 1 on is allowed")
        if self.length < 8:
            raise ValueError(f"--length is {self.length}; a whole number from 8 on is allowed")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout is {self.dropout}; at least 0 and less than 1 is allowed")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, relative to its highest value."""
        return min(1.0, (step + 1) / max(1, round(self.warmup * steps)))


@final
@dataclass(frozen=True)
class Coded:
    """Examples as ids, with their targets."""

    inputs: Sequence[dict[str, list[int]]]
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


@final
class Tuning:
    """A task's data, tokenized once for all jobs."""

    def __init__(self, encoder: Encoder, data: TaskData, recipe: Recipe, device: torch.device) -> None:
        self._encoder, self._data, self._recipe, self._device = encoder, data, recipe, device
        self._train = self._code(chosen(data.train, recipe.examples))
        self._dev = self._code(data.dev)
        self._longest = encoder.folder.longest(recipe.length)
        self.steps = recipe.epochs * math.ceil(len(self._train) / recipe.batch)

    def _code(self, split: Split) -> Coded:
        recipe = self._recipe
        inputs = tokenize(self._encoder, split.texts, recipe.length, leading_space=recipe.leading_space)
        kind = torch.float32 if self._data.task.regression else torch.long
        return Coded(inputs, torch.tensor(split.targets).to(kind))

    def run(self, rate: float, seed: int, stop: StopRequest, on_step: Callable[[], None]) -> dict[str, Any] | None:
        """The result of one job; None if it was asked to stop."""
        devices = [self._device] if self._device.type == "cuda" else []
        started = time.monotonic()
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)  # the new head and dropout
            model = self._encoder.classifier(self._data.outputs, self._recipe.dropout)
            torch.nn.Module.to(model, self._device)
            diverged, loss = self._fit(model, rate, seed, stop, on_step)
        if diverged is None and stop.asked:
            return None
        scores = None if diverged is not None else self._score(model)
        return {
            "device": self._device.type,
            "rate": rate,
            "seed": seed,
            "scores": scores,
            "loss": loss,  # of the last training batch
            "diverged": diverged,
            "seconds": time.monotonic() - started,
        }

    def _fit(
        self, model: Any, rate: float, seed: int, stop: StopRequest, on_step: Callable[[], None]
    ) -> tuple[int | None, float | None]:
        """Train to the last step, or until a stop; the first step that was not finite, if any, or the last loss."""
        recipe = self._recipe
        named = list(model.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=rate, eps=1e-6)
        order = torch.Generator().manual_seed(seed)
        model.train()
        step, first_bad = 0, torch.full((), -1, device=self._device)  # read once an epoch: no step waits for a GPU
        for _ in range(recipe.epochs):
            shuffled = torch.randperm(len(self._train), generator=order)
            for start in range(0, len(shuffled), recipe.batch):
                if stop.asked:
                    return None, None
                places = shuffled[start : start + recipe.batch]
                for group in optimizer.param_groups:
                    group["lr"] = rate * recipe.rate(step, self.steps)
                loss = self._loss(self._outputs(model, self._train, places.tolist()), self._train.targets[places])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
                optimizer.step()
                finite = loss.isfinite() & norm.isfinite()
                first_bad = torch.where((first_bad < 0) & ~finite, step, first_bad)
                step += 1
                on_step()
            if (bad := int(first_bad)) >= 0:
                return bad, None
        return None, float(loss.detach())

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = targets.to(self._device)
        if self._data.task.regression:
            return functional.mse_loss(outputs[:, 0], targets)
        return functional.cross_entropy(outputs, targets)

    def _outputs(self, model: Any, coded: Coded, places: Sequence[int]) -> Tensor:
        pad = self._encoder.folder.tokenizer.pad_token_id
        rows = padded([coded.inputs[place] for place in places], pad, self._longest)
        batch = {name: tensor.to(self._device) for name, tensor in rows.items()}
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            outputs: Tensor = model(**batch).logits
        return outputs.float()

    @torch.no_grad()
    def _score(self, model: Any) -> dict[str, float]:
        model.eval()
        places = sorted(range(len(self._dev)), key=lambda place: len(self._dev.inputs[place]["input_ids"]))
        predictions = np.zeros(len(places))
        for start in range(0, len(places), EVAL_BATCH):
            chunk = places[start : start + EVAL_BATCH]
            outputs = self._outputs(model, self._dev, chunk)
            answers = outputs[:, 0] if self._data.task.regression else outputs.argmax(-1)
            predictions[chunk] = answers.cpu().numpy()
        return score(self._data.task.metrics, self._dev.targets.numpy(), predictions)


def padded(rows: Sequence[dict[str, list[int]]], pad: int, limit: int) -> dict[str, Tensor]:
    """The rows of a batch, padded on the right to a common length: a multiple of `MULTIPLE`, or at most `limit`."""
    longest = max(len(row["input_ids"]) for row in rows)
    width = max(longest, min(-(-longest // MULTIPLE) * MULTIPLE, limit))
    fill = {"input_ids": pad}  # 0 for all else: no attention, the first type
    return {
        name: torch.tensor([row[name] + [fill.get(name, 0)] * (width - len(row[name])) for row in rows])
        for name in rows[0]
    }


def chosen(split: Split, examples: int | None) -> Split:
    """So many examples, the same ones for every seed; all if there are no more."""
    if examples is None or examples >= len(split):
        return split
    places = np.random.default_rng(0).permutation(len(split))[:examples].tolist()
    return Split(split.path, tuple(split.texts[i] for i in places), tuple(split.targets[i] for i in places))


def constant_answer(data: TaskData) -> dict[str, float]:
    """The scores of the best constant answer: the dev set's most frequent label, or its mean, for every example."""
    targets = np.array(data.dev.targets)
    values, counts = np.unique(targets, return_counts=True)
    answer = targets.mean() if data.task.regression else values[counts.argmax()]
    return score(data.task.metrics, targets, np.full(len(targets), answer))
