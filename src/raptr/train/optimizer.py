"""AdamW, its parameter groups, and the learning rate as a pure function of the step.

The learning rate warms up linearly, stays constant, and decays over the last part of the run: linearly to `floor`
of the peak (BERT), or by a cosine (UL2). The length of the decay is a fraction of the run's own steps, a quarter
unless set otherwise, and does not depend on the method. So a shorter run of a comparison decays on equal terms.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from raptr.train.idle import Policy


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and the learning rate."""

    peak: float = 1e-3
    warmup: int = 0
    decay: float = 0.25  # the last part of the run in which the learning rate falls, as a fraction of its steps
    decay_shape: Literal["linear", "cosine"] = "linear"
    floor: float = 0.0  # the learning rate at the end, as a fraction of the peak
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-6
    clip: float = 1.0  # the largest norm of the gradient; 0: no clipping
    idle: Policy = "skip"

    def __post_init__(self) -> None:
        _check("epsilon", self.epsilon, 0 < self.epsilon < math.inf, "a number above 0")
        for name in ("weight_decay", "clip"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "a number from 0 on")
        for name in ("beta1", "beta2"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) < 1, "a number from 0 to below 1")
        largest = torch.finfo(torch.float32).max * (1 - self.beta1)  # AdamW's first step divides by 1 - beta1
        _check("peak", self.peak, 0 < self.peak <= largest, f"a number above 0 and up to {largest:.3g}")
        for name in ("floor", "decay"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "a fraction from 0 to 1")
        _check("warmup", self.warmup, self.warmup >= 0, "a whole number from 0 on")

    def check_steps(self, steps: int) -> None:
        """Refuse a warm-up and a decay that do not fit into the run together."""
        if self.warmup + self.decay_steps(steps) > steps:
            raise ValueError(
                f"optimizer.warmup is {self.warmup} steps and optimizer.decay {self.decay:g} of the run, "
                f"{self.decay_steps(steps)} steps; together that is more than train.steps, {steps}. "
                "Lower optimizer.warmup or optimizer.decay, or train longer."
            )

    def decay_steps(self, steps: int) -> int:
        """How many steps the decay lasts in a run of `steps` steps."""
        return math.ceil(round(self.decay * steps, 6))  # 0.1 * 30 is a little more than 3 in floating point

    def learning_rate(self, step: int, steps: int) -> float:
        """The learning rate of step `step` (from 0) of `steps`."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        decay = self.decay_steps(steps)
        left = steps - step  # the last step still has one part in `decay` of the peak
        if left >= decay or decay == 0:
            return self.peak
        share = left / decay if self.decay_shape == "linear" else (1 - math.cos(math.pi * left / decay)) / 2
        return self.peak * (self.floor + (1 - self.floor) * share)


def make_optimizer(settings: OptimizerSettings, model: nn.Module) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and embeddings, none on biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.peak,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=parameters[0].is_cuda,
    )


def clip(parameters: Iterable[nn.Parameter], limit: float) -> torch.Tensor:
    """Scale all gradients so that their joint norm is at most `limit` (0: leave them); returns the norm."""
    if limit == 0:
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return nn.utils.clip_grad_norm_(parameters, limit)


def _check(name: str, value: object, fine: bool, allowed: str) -> None:
    if not fine:
        raise ValueError(f"optimizer.{name} is {value!r}; {allowed} is allowed")
