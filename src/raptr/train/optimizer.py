"""Optimizers by name, parameter groups, optimizer state by parameter name, and the learning rate of a step.

The learning rate is a pure function of the step: it warms up linearly, stays constant, and decays over the last part of
the run. The length of the decay is a fraction of the run's own steps, a quarter by default, and does not depend on the
method. So a shorter run of a comparison decays on equal terms. The shapes of a decay that begins at step k:

    linear, cosine   from the peak to `floor` times the peak at the end of the run
    inverse-sqrt     peak·√(k / step), without a floor; with a peak of 1/√k this is T5's and UL2's 1/√max(step, k)

Groups and state are those of any `torch.optim` class. Each class decides what state it keeps for a parameter and what
its initial values are. This state exists from the parameter's first step on, so a layer that has not run yet has no
state in a checkpoint, nor after loading one.
"""

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raptr.distributed.sharding import is_sharded, mine, over_shards
from raptr.models.model import fused_maps
from raptr.models.roles import layer_matrices, roles
from raptr.train.adafactor import Adafactor
from raptr.train.adamw import AdamW
from raptr.train.idle import Policy
from raptr.train.muon import Muon

UNUSED = {  # settings that an optimizer does not use
    "adamw": ("momentum",),
    "muon": (),
    "adafactor": ("weight_decay", "beta1", "beta2", "epsilon", "momentum"),
}


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer and the learning rate."""

    name: Literal["adamw", "muon", "adafactor"] = "adamw"
    peak: float = 1e-3
    warmup: int = 0
    decay: float = 0.25  # the last part of the run, in which the learning rate falls, as a fraction of its steps
    decay_shape: Literal["linear", "cosine", "inverse-sqrt"] = "linear"
    floor: float = 0.0  # the learning rate at the end, as a fraction of the peak
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-6
    momentum: float = 0.95  # of Muon's matrices; all other parameters use AdamW's settings
    clip: float = 1.0  # the largest norm of the gradients; 0: no clipping
    idle: Policy | None = None  # None: the method's default, see `Config.idle`

    def __post_init__(self) -> None:
        _check("epsilon", self.epsilon, 0 < self.epsilon < math.inf, "a number above 0")
        for name in ("weight_decay", "clip"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "a number from 0 on")
        for name in ("beta1", "beta2", "momentum"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) < 1, "a number from 0 to below 1")
        largest = torch.finfo(torch.float32).max * (1 - self.beta1)  # AdamW's first step divides by 1 - beta1
        _check("peak", self.peak, 0 < self.peak <= largest, f"a number above 0 and up to {largest:.3g}")
        for name in ("floor", "decay"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "a fraction from 0 to 1")
        _check("warmup", self.warmup, self.warmup >= 0, "a whole number from 0 on")
        if self.decay_shape == "inverse-sqrt" and self.floor:
            raise ValueError(
                f"optimizer.floor is {self.floor!r}, but optimizer.decay_shape inverse-sqrt ends at no fixed fraction "
                "of the peak. Use 0."
            )
        for setting in fields(self):
            if setting.name in UNUSED[self.name] and getattr(self, setting.name) != setting.default:
                problem = f"optimizer.{setting.name} is {getattr(self, setting.name)!r}"
                raise ValueError(f"{problem}, but optimizer.name {self.name} does not use it. Leave it out.")
        if self.name == "muon" and self.idle == "zero":
            raise ValueError(
                "optimizer.idle is 'zero' with optimizer.name muon, whose updates are of one size even for a gradient "
                "of zero, so idle layers would keep moving. Use skip, or another optimizer."
            )

    def check_steps(self, steps: int) -> None:
        """Refuse a warm-up and a decay that together exceed the run, and an inverse-sqrt decay from step 0 on."""
        if self.decay_shape == "inverse-sqrt" and self.decay_steps(steps) == steps:
            raise ValueError(
                f"optimizer.decay is {self.decay:g} with optimizer.decay_shape inverse-sqrt, whose decay begins at "
                f"step 1 or later: fewer than all {steps} steps are allowed. For a decay from step k on, use "
                "1 - k / train.steps."
            )
        if self.warmup + self.decay_steps(steps) > steps:
            raise ValueError(
                f"optimizer.warmup is {self.warmup} steps and optimizer.decay {self.decay:g} of the run, "
                f"{self.decay_steps(steps)} steps; together that is more than train.steps, {steps}. "
                f"Lower optimizer.warmup to {steps - self.decay_steps(steps)} or less (--set optimizer.warmup=…), "
                "lower optimizer.decay, or train longer."
            )

    def decay_steps(self, steps: int) -> int:
        """Return how many steps the decay lasts in a run of `steps` steps."""
        return math.ceil(round(self.decay * steps, 6))  # 0.07 * 100 is a little more than 7 in floating point

    def learning_rate(self, step: int, steps: int) -> float:
        """Return the learning rate of step `step` (counted from 0) of `steps`."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        decay = self.decay_steps(steps)
        left = steps - step  # 1 in the last step: the decay would reach its floor one step later
        if left >= decay:
            return self.peak
        if self.decay_shape == "inverse-sqrt":
            return self.peak * math.sqrt((steps - decay) / step)
        share = left / decay if self.decay_shape == "linear" else (1 - math.cos(math.pi * left / decay)) / 2
        return self.peak * (self.floor + (1 - self.floor) * share)


def make_optimizer(settings: OptimizerSettings, model: nn.Module, *, compiled: bool = False) -> Optimizer:
    """Return the optimizer of the settings; weight decay, if it has any, is for matrices and embeddings only.

    `compiled` compiles the updates that have no fused kernel on a GPU: Adafactor's, and those of AdamW for parameters
    with a step count for each row.
    """
    if settings.name == "adafactor":
        maps = {name: fused_maps(model, name) for name, _ in model.named_parameters()}
        return Adafactor(map_groups(model, maps), lr=settings.peak, compiled=compiled)
    matrices = {name: fused_maps(model, name) for name in layer_matrices(model)} if settings.name == "muon" else {}
    adamw = AdamW(
        decay_groups(model, settings.weight_decay, without=matrices),
        lr=settings.peak,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=next(model.parameters()).is_cuda,
        compiled=compiled,
    )
    if settings.name == "adamw":
        return adamw
    muon_settings = {"lr": settings.peak, "weight_decay": settings.weight_decay, "momentum": settings.momentum}
    return Muon([{**group, **muon_settings} for group in map_groups(model, matrices)], adamw)


def decay_groups(model: nn.Module, weight_decay: float, without: Container[str] = ()) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices and embeddings, which decay; biases and norm gains, which do not."""
    named = dict(model.named_parameters())
    known = {name: role for name, role in roles(model).items() if name not in without}
    return [
        {"params": [named[name] for name, role in known.items() if role in kinds], "weight_decay": decay}
        for kinds, decay in ((("matrix", "embedding"), weight_decay), (("gain", "bias"), 0.0))
    ]


def map_groups(model: nn.Module, maps: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return groups of the parameters named in `maps`, one for each number of linear maps that a parameter fuses."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if name in maps]
    return [
        {"params": [parameter for name, parameter in named if maps[name] == count], "maps": count}
        for count in sorted(set(maps.values()))
    ]


def state_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer state as KIND.NAME for each parameter NAME; parameters that took no step yet have none."""
    return {
        f"{kind}.{name}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_state(optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace the optimizer state by these tensors, named KIND.NAME; parameters without any start afresh."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = {parameter: place for place, parameter in enumerate(parameters)}
    named = {name: places[parameter] for name, parameter in model.named_parameters()}
    state: dict[int, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        kind, _, name = full.partition(".")
        if name not in named:
            raise ValueError(f"the optimizer's state has {full}, but the model has no parameter {name or full}")
        state.setdefault(named[name], {})[kind] = tensor
    # torch moves each tensor to the device that the class expects: a fused kernel reads its step count on the GPU.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def clip(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `limit` (0: no scaling); return the norm before that."""
    running = [parameter for parameter in parameters if parameter.grad is not None]
    plain = [mine(parameter) for parameter in running]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in plain if parameter.grad is not None])
    if running and is_sharded(running[0]):
        norm = over_shards(norm.square(), running[0]).sqrt()
    if limit:
        nn.utils.clip_grads_with_norm_(plain, limit, norm)
    return norm


def _check(name: str, value: object, fine: bool, allowed: str) -> None:
    if not fine:
        raise ValueError(f"optimizer.{name} is {value!r}; {allowed} is allowed")
