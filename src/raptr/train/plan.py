"""A plan: what a method will cost, stage by stage, computed before any GPU time is spent."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from raptr.methods import Method
from raptr.models.contract import ModelConfig
from raptr.subnetworks import Subnetwork
from raptr.train.flops import Flops, expected_flops, flops, planned_flops

if TYPE_CHECKING:  # the configuration imports torch and tokenizers, which `plan` does not need
    from raptr.train.config import Config


@dataclass(frozen=True)
class PlanRow:
    """A stage: its steps, its mean size, and the cost of its steps relative to full training."""

    stage: int
    start: int
    stop: int
    size: float
    keep: tuple[float, ...]
    heads: int
    parts: int
    layers_flops: float
    model_flops: float


@dataclass(frozen=True)
class Plan:
    """All stages, and the cost of the whole run relative to full training with the same number of steps."""

    method: str
    layers: int
    steps: int
    rows: tuple[PlanRow, ...]
    average: float
    flops: float
    full_flops: float
    relative_layers: float
    relative_model: float

    @property
    def speedup(self) -> float:
        """The largest possible speed-up: the whole model's FLOPs in full training, divided by those of the plan."""
        return 1 / self.relative_model

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.speedup}


def plan_run(config: "Config") -> Plan:
    """Return what a run of this configuration costs."""
    dimensions = config.model.build(config.vocabulary_size(), config.data.length)
    return plan(config.make_method(), dimensions, **config.step_load)


def plan(method: Method, config: ModelConfig, *, sequences: int, length: int, targets: float) -> Plan:
    """Return what `method` costs on a model of these dimensions."""
    cost: dict[str, Any] = {"sequences": sequences, "length": length, "targets": targets}
    full = flops(config, Subnetwork.full(config.layers), **cost)
    total, steps = planned_flops(config, method, **cost), method.steps
    rows = []
    for number, phase in enumerate(method.phases(), start=1):
        step = relative(expected_flops(config, phase, **cost), full)
        rows.append(
            PlanRow(
                stage=number,
                start=phase.start,
                stop=phase.stop,
                size=phase.size,
                keep=phase.keep,
                heads=phase.heads,
                parts=phase.parts,
                layers_flops=step.layers,
                model_flops=step.total,
            )
        )
    whole = relative(total, Flops(full.layers * steps, full.total * steps))
    return Plan(
        method=method.name,
        layers=config.layers,
        steps=steps,
        rows=tuple(rows),
        average=sum(row.size * (row.stop - row.start) for row in rows) / steps,
        flops=total.total,
        full_flops=full.total * steps,
        relative_layers=whole.layers,
        relative_model=whole.total,
    )


def relative(cost: Flops, full: Flops) -> Flops:
    """Return a cost as fractions of that of full training."""
    return Flops(cost.layers / full.layers, cost.total / full.total)
