"""Fine-tune an encoder at one learning rate and seed, or at several at once, and score it on the dev set.

The paper's recipe: 3 epochs, batches of 32, and a learning rate that rises linearly over 6% of the steps and then
stays constant. What the paper does not say is as in BERT: AdamW with eps 1e-6, weight decay 0.01 on matrices and
embeddings, gradients clipped at norm 1, dropout 0.1, 128 tokens. The score is that of the last step; no step is chosen
by its score.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from raptr.evaluation.coding import Coded, coded
from raptr.evaluation.encoder import Encoder, tokenize
from raptr.evaluation.joined import join
from raptr.evaluation.metrics import score
from raptr.evaluation.reading import Split, TaskData
from raptr.evaluation.stepping import Steps, on_stream, scores
from raptr.train.safety import StopRequest

EVAL_BATCH = 256
EVAL_ROWS = 2048  # of a batch, summed over the models that are scored at once
TRIED = 2  # examples for each model in the trial of a joined model


@final
@dataclass(frozen=True)
class Recipe:
    """How an encoder is fine-tuned, apart from the learning rate and the seed."""

    epochs: int = 3
    batch: int = 32
    warmup: float = 0.06
    dropout: float = 0.1
    length: int = 128
    examples: int | None = None  # how many training examples to use; None: all
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
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"--warmup is {self.warmup}; from 0 to 1, a share of the steps, is allowed")
        if not self.clip > 0:
            raise ValueError(f"--clip is {self.clip}; more than 0 is allowed")

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, relative to its highest value."""
        return min(1.0, (step + 1) / max(1, round(self.warmup * steps)))


@final
@dataclass(frozen=True)
class Job:
    """One fine-tuning: an encoder at a learning rate and a seed."""

    encoder: Encoder
    rate: float
    seed: int


class NotJoinedError(ValueError):
    """Several models were to run at once, but their architecture does not allow it."""


@final
class Tuning:
    """A task's examples, tokenized once for all jobs whose models share a tokenizer."""

    def __init__(self, encoder: Encoder, data: TaskData, recipe: Recipe, device: torch.device) -> None:
        self._data, self._recipe, self._device = data, recipe, device
        self.length, self.cut = encoder.folder.longest(recipe.length), 0  # limit in tokens; number of examples cut
        self._train = self._code(encoder, chosen(data.train, recipe.examples)).to(device)
        self._dev = self._code(encoder, data.dev).to(device)
        self.steps = recipe.epochs * math.ceil(len(self._train) / recipe.batch)

    @property
    def note(self) -> str | None:
        """A sentence that says how many examples were cut, and at what length; None if none were."""
        if not self.cut:
            return None
        whole, asked = len(self._train) + len(self._dev), self._recipe.length
        limit = f"--length {asked}" if self.length == asked else f"{self.length} tokens, the most that the model reads"
        return f"{self.cut:,} of {whole:,} examples are longer than {limit}, and are cut"

    def _code(self, encoder: Encoder, split: Split) -> Coded:
        rows, cut = tokenize(encoder, split.texts, self._recipe.length, leading_space=self._recipe.leading_space)
        self.cut += cut
        kind = torch.float32 if self._data.task.regression else torch.long
        pad = encoder.folder.tokenizer.pad_token_id
        assert isinstance(pad, int)
        return coded(rows, torch.tensor(split.targets).to(kind), pad)

    def run(
        self,
        jobs: Sequence[Job],
        stop: StopRequest,
        on_steps: Callable[[int], None] = lambda count: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> list[dict[str, Any]]:
        """Run jobs at once and return their results, or an empty list if a stop was asked for before they ended.

        The models must have one architecture. `on_steps` is told how many steps were made, summed over the jobs;
        `say` is told why steps are slow, if they are.
        """
        devices = [self._device] if self._device.type == "cuda" else []
        started = time.monotonic()
        with torch.random.fork_rng(devices=devices), on_stream(self._device) as capture:
            model = self._classifier(jobs)
            steps = Steps(
                model,
                self._train,
                self._losses,
                weight_decay=self._recipe.weight_decay,
                clip=self._recipe.clip,
                half=self._device.type == "cuda",
                capture=capture,
                joined=len(jobs),
                say=say,
            )
            if not self._fit(model, steps, jobs, stop, on_steps):
                return []
            shared = {"device": self._device.type, "precision": steps.precision, "graphs": steps.captured}
            shared |= {"length": self.length, "cut": self.cut}
            shared |= {"at_once": len(jobs), "seconds": time.monotonic() - started}
            ended = zip(jobs, self._answers(model, len(jobs)), steps.losses, steps.diverged(), strict=True)
            return [
                {
                    "rate": job.rate,
                    "seed": job.seed,
                    "scores": None if diverged is not None else self._score(answers_N),
                    "loss": None if diverged is not None else loss,  # of the last training batch
                    "diverged": diverged,
                    **shared,
                }
                for job, answers_N, loss, diverged in ended
            ]

    def _classifier(self, jobs: Sequence[Job]) -> nn.Module:
        """Return the model of a job, or the joined models of several jobs."""
        by_start: dict[tuple[Path, int], nn.Module] = {}  # jobs that differ only in learning rate start alike
        places = [(job.encoder.folder.path, job.seed) for job in jobs]
        for place, job in zip(places, jobs, strict=True):
            if place not in by_start:
                torch.manual_seed(job.seed)  # for the new head
                model = job.encoder.classifier(self._data.outputs, self._recipe.dropout)
                by_start[place] = nn.Module.to(model, self._device)
        models = [by_start[place] for place in places]
        torch.manual_seed(jobs[-1].seed)  # for the trial and for dropout
        if len(models) == 1:
            return models[0]
        # Try examples of all lengths: a joined model may pad a model's examples further than it would alone.
        ranks = torch.linspace(0, len(self._train) - 1, TRIED * len(jobs)).long()
        order = self._train.lengths_N.argsort(stable=True)[ranks]
        widths, tried = self._train.widths(order, TRIED), order.to(self._device)
        alone = [self._train.batch(*selection) for selection in zip(torch.split(tried, TRIED), widths, strict=True)]
        joined = join(models, alone, self._train.batch(tried, max(widths)))
        if joined is None:
            raise NotJoinedError(f"models of type {jobs[0].encoder.folder.config.model_type} cannot be joined")
        return joined

    def _fit(
        self, model: nn.Module, steps: Steps, jobs: Sequence[Job], stop: StopRequest, on_steps: Callable[[int], None]
    ) -> bool:
        """Train to the last step, or to the end of an epoch in which all jobs diverged; return False after a stop."""
        recipe, step = self._recipe, 0
        orders = [torch.Generator().manual_seed(job.seed) for job in jobs]
        rates_K = torch.tensor([job.rate for job in jobs], device=self._device)
        model.train()
        for _ in range(recipe.epochs):
            shuffled_KN = torch.stack([torch.randperm(len(self._train), generator=order) for order in orders])
            batches = torch.split(shuffled_KN.to(self._device), recipe.batch, dim=1)
            widths = zip(*(self._train.widths(shuffled_N, recipe.batch) for shuffled_N in shuffled_KN), strict=True)
            for places_KB, wide in zip(batches, widths, strict=True):
                if stop.asked:
                    return False
                steps(places_KB.flatten(), max(wide), rates_K * recipe.rate(step, self.steps))
                step += 1
                on_steps(len(jobs))
            if None not in steps.diverged():  # read once per epoch, so that no step waits for the GPU
                break
        return True

    def _losses(self, outputs_BC: Tensor, targets_B: Tensor) -> Tensor:
        if self._data.task.regression:
            return functional.mse_loss(outputs_BC[:, 0], targets_B, reduction="none")
        return functional.cross_entropy(outputs_BC, targets_B, reduction="none")

    @torch.no_grad()
    def _answers(self, model: nn.Module, joined: int) -> np.ndarray[Any, Any]:
        """Return each model's answers on the dev set, shape (K, N), from batches of examples of similar lengths."""
        model.eval()
        size = max(1, min(EVAL_BATCH, EVAL_ROWS // joined))
        by_length_N = self._dev.lengths_N.argsort(stable=True)
        answers = []
        batches = torch.split(by_length_N.to(self._device), size)
        for places_B, width in zip(batches, self._dev.widths(by_length_N, size), strict=True):
            outputs = scores(model, self._dev.batch(places_B.repeat(joined), width))
            answers_KB = (outputs[:, 0] if self._data.task.regression else outputs.argmax(-1)).view(joined, -1)
            answers.append(answers_KB)
        answers_KN = np.zeros((joined, len(self._dev)))
        answers_KN[:, by_length_N.numpy()] = torch.cat(answers, 1).cpu().numpy()
        return answers_KN

    def _score(self, answers_N: np.ndarray[Any, Any]) -> dict[str, float]:
        return score(self._data.task.metrics, self._dev.targets_N.cpu().numpy(), answers_N)


def chosen(split: Split, examples: int | None) -> Split:
    """Return `examples` of the examples, the same ones for every seed, or all if there are no more."""
    if examples is None or examples >= len(split):
        return split
    places = np.random.default_rng(0).permutation(len(split))[:examples].tolist()
    texts, targets = tuple(split.texts[i] for i in places), tuple(split.targets[i] for i in places)
    return replace(split, texts=texts, targets=targets)


def constant_answer(data: TaskData) -> dict[str, float]:
    """Return the scores of the best constant answer: the dev set's most frequent label, or for regression its mean."""
    targets = np.array(data.dev.targets)
    values, counts = np.unique(targets, return_counts=True)
    answer = targets.mean() if data.task.regression else values[counts.argmax()]
    return score(data.task.metrics, targets, np.full(len(targets), answer))
