"""A plan: what a method will cost, stage by stage, before any GPU time is spent."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from raptr.methods import Method
from raptr.models.bert import BertConfig
from raptr.subnetworks import Subnetwork
from raptr.train.config import Config
from raptr.train.flops import Flops, expected_flops, flops, planned_flops


@dataclass(frozen=True)
class PlanRow:
    """A stage: its steps, its mean size, and the cost of its steps relative to full training's."""

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
    """All stages, and the whole run's cost relative to full training over the same steps."""

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
        """The largest speed-up that can be seen: whole-model FLOPs of full training over the plan's."""
        return 1 / self.relative_model

    def json(self) -> dict[str, Any]:
        """The plan as plain mappings."""
        return {**asdict(self), "speedup": self.speedup}

    def table(self) -> Table:
        """The plan for a terminal."""
        table = Table(title=f"{self.method}: {self.layers} layers, {self.steps:,} steps")
        for column in ("stage", "steps", "share", "size", "keep", "layers' FLOPs", "model's FLOPs"):
            table.add_column(column, justify="right", no_wrap=column == "steps")
        if narrow := any(row.heads != self.rows[-1].heads or row.parts != self.rows[-1].parts for row in self.rows):
            table.add_column("heads × parts", justify="right")
        for row in self.rows:
            cells = [
                str(row.stage),
                f"{row.start:,} – {row.stop - 1:,}",
                f"{(row.stop - row.start) / self.steps:.1%}",
                f"{row.size:.2f}".removesuffix(".00"),
                _keep(row.keep),
                f"{row.layers_flops:.3f}",
                f"{row.model_flops:.3f}",
            ]
            table.add_row(*cells, *([f"{row.heads} × {row.parts}"] if narrow else []))
        table.add_section()
        table.add_row(
            "all",
            f"0 – {self.steps - 1:,}",
            "100%",
            f"{self.average:.2f}".removesuffix(".00"),
            "",
            f"{self.relative_layers:.3f}",
            f"{self.relative_model:.3f}",
        )
        table.caption = (
            f"FLOPs relative to full training; {self.flops:.3g} in all instead of {self.full_flops:.3g}: "
            f"{1 - self.relative_model:.1%} saved, at most {self.speedup:.2f}× faster "
            f"(layers alone: {1 / self.relative_layers:.2f}×)"
        )
        return table


def plan_run(config: Config) -> Plan:
    """What a run of this configuration costs."""
    data = config.data
    dimensions = config.model.build(data.vocabulary_size(), data.length)
    method = config.make_method(dimensions)
    return plan(method, dimensions, sequences=config.train.batch, length=data.length, targets=config.targets)


def plan(method: Method, config: BertConfig, *, sequences: int, length: int, targets: int) -> Plan:
    """What `method` costs on a model of these dimensions."""
    cost = {"sequences": sequences, "length": length, "targets": targets}
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
    """A cost as fractions of full training's."""
    return Flops(cost.layers / full.layers, cost.total / full.total)


def _keep(keep: tuple[float, ...]) -> str:
    """The keep probabilities of the layers that may be dropped: one number, or the range."""
    free = sorted({round(p, 4) for p in keep if p < 1})
    if not free:
        return "1"
    return f"{free[0]:.3g}" if len(free) == 1 else f"{free[0]:.3g} – {free[-1]:.3g}"
