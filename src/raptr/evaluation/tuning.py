"""Fine-tune an encoder once, at one learning rate and seed, and score it on the dev set.

The paper's recipe: 3 epochs, batches of 32, the learning rate rises linearly over 6% of the steps and then stays.
What it does not say is BERT's: AdamW with eps 1e-6, weight decay 0.01 on matrices and embeddings, gradients clipped at
norm 1, dropout 0.1, 128 tokens. The score is that of the last step; no step is chosen by its score.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from raptr.evaluation.coding import Coded, coded
from raptr.evaluation.encoder import Encoder, tokenize
from raptr.evaluation.metrics import score
from raptr.evaluation.reading import Split, TaskData
from raptr.evaluation.stepping import Steps, on_stream, scores
from raptr.train.safety import StopRequest

EVAL_BATCH = 256


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
class Tuning:
    """A task's examples, tokenized once for all jobs of models that share a tokenizer."""

    def __init__(self, encoder: Encoder, data: TaskData, recipe: Recipe, device: torch.device) -> None:
        self._data, self._recipe, self._device = data, recipe, device
        self._train = self._code(encoder, chosen(data.train, recipe.examples)).to(device)
        self._dev = self._code(encoder, data.dev).to(device)
        self.steps = recipe.epochs * math.ceil(len(self._train) / recipe.batch)

    def _code(self, encoder: Encoder, split: Split) -> Coded:
        rows = tokenize(encoder, split.texts, self._recipe.length, leading_space=self._recipe.leading_space)
        kind = torch.float32 if self._data.task.regression else torch.long
        pad = encoder.folder.tokenizer.pad_token_id
        assert isinstance(pad, int)
        return coded(rows, torch.tensor(split.targets).to(kind), pad)

    def run(
        self, encoder: Encoder, rate: float, seed: int, stop: StopRequest, on_step: Callable[[], None]
    ) -> dict[str, Any] | None:
        """The result of one job; None if it was asked to stop."""
        devices = [self._device] if self._device.type == "cuda" else []
        started = time.monotonic()
        with torch.random.fork_rng(devices=devices), on_stream(self._device) as capture:
            torch.manual_seed(seed)  # the new head and dropout
            model = encoder.classifier(self._data.outputs, self._recipe.dropout)
            torch.nn.Module.to(model, self._device)
            steps = Steps(
                model,
                self._train,
                self._loss,
                weight_decay=self._recipe.weight_decay,
                clip=self._recipe.clip,
                half=self._device.type == "cuda",
                capture=capture,
            )
            self._fit(model, steps, rate, seed, stop, on_step)
            diverged = steps.diverged()
            if diverged is None and stop.asked:
                return None
            return {
                "device": self._device.type,
                "precision": steps.precision,
                "rate": rate,
                "seed": seed,
                "scores": None if diverged is not None else self._score(model),
                "loss": None if diverged is not None else steps.loss,  # of the last training batch
                "diverged": diverged,
                "graphs": steps.captured,
                "seconds": time.monotonic() - started,
            }

    def _fit(
        self, model: Any, steps: Steps, rate: float, seed: int, stop: StopRequest, on_step: Callable[[], None]
    ) -> None:
        """Train to the last step, or until a stop or the end of an epoch in which a step was not finite."""
        recipe, step = self._recipe, 0
        order = torch.Generator().manual_seed(seed)
        model.train()
        for _ in range(recipe.epochs):
            shuffled_N = torch.randperm(len(self._train), generator=order)
            batches = torch.split(shuffled_N.to(self._device), recipe.batch)
            for places_B, width in zip(batches, self._train.widths(shuffled_N, recipe.batch), strict=True):
                if stop.asked:
                    return
                steps(places_B, width, rate * recipe.rate(step, self.steps))
                step += 1
                on_step()
            if steps.diverged() is not None:  # read once an epoch: no step waits for the GPU
                return

    def _loss(self, outputs_BC: Tensor, targets_B: Tensor) -> Tensor:
        if self._data.task.regression:
            return functional.mse_loss(outputs_BC[:, 0], targets_B)
        return functional.cross_entropy(outputs_BC, targets_B)

    @torch.no_grad()
    def _score(self, model: Any) -> dict[str, float]:
        """The metrics on the dev set, in batches of similar lengths."""
        model.eval()
        by_length_N = self._dev.lengths_N.argsort(stable=True)
        batches = torch.split(by_length_N.to(self._device), EVAL_BATCH)
        answers = []
        for places_B, width in zip(batches, self._dev.widths(by_length_N, EVAL_BATCH), strict=True):
            outputs_BC = scores(model, self._dev.batch(places_B, width))
            answers.append(outputs_BC[:, 0] if self._data.task.regression else outputs_BC.argmax(-1))
        predictions = np.zeros(len(self._dev))
        predictions[by_length_N.numpy()] = torch.cat(answers).cpu().numpy()
        return score(self._data.task.metrics, self._dev.targets_N.cpu().numpy(), predictions)


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
