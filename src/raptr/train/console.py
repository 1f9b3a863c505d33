"""What a person sees of a plan and of a measurement."""

import json
from operator import attrgetter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from raptr.train.config import Config
from raptr.train.plan import Plan, plan_run
from raptr.train.progress import duration

if TYPE_CHECKING:  # it imports the training loop, which a plan does not need
    from raptr.train.measure import Measurement


def show_plan(config: Config, measured: "Measurement | None", *, as_json: bool) -> None:
    """Print what a run costs, and what was measured of it: tables, or JSON."""
    planned = plan_run(config)
    if as_json:
        record = planned.json() | ({"measured": measured.json()} if measured else {})
        print(json.dumps(record, indent=2), flush=True)
        return
    Console().print(plan_table(planned))
    if measured is not None:
        Console().print(measurement_table(measured))


def plan_table(plan: Plan) -> Table:
    """The plan for a terminal."""
    table = Table(title=f"{plan.method}: {plan.layers} layers, {plan.steps:,} steps")
    whole = plan.rows[-1]
    narrow = {
        f"{name} of {attrgetter(axis)(whole)}": attrgetter(axis)
        for axis, name in (("heads", "heads"), ("parts", "MLP"))
        if any(attrgetter(axis)(row) != attrgetter(axis)(whole) for row in plan.rows)
    }
    share = [] if narrow else ["share"]  # there is no room for all in 80 columns
    for column in ("stage", "steps", *share, "size", "keep", *narrow, "layers' FLOPs", "model's FLOPs"):
        table.add_column(column, justify="right", no_wrap=column == "steps")
    for row in plan.rows:
        table.add_row(
            str(row.stage),
            f"{row.start:,} – {row.stop - 1:,}",
            *(f"{(row.stop - row.start) / plan.steps:.1%}" for _ in share),
            f"{row.size:.2f}".removesuffix(".00"),
            _keep(row.keep),
            *(str(count(row)) for count in narrow.values()),
            f"{row.layers_flops:.3f}",
            f"{row.model_flops:.3f}",
        )
    table.add_section()
    table.add_row(
        "all",
        f"0 – {plan.steps - 1:,}",
        *("100%" for _ in share),
        f"{plan.average:.2f}".removesuffix(".00"),
        *("" for _ in ("keep", *narrow)),
        f"{plan.relative_layers:.3f}",
        f"{plan.relative_model:.3f}",
    )
    table.caption = (
        f"FLOPs relative to full training; {plan.flops:.3g} in all instead of {plan.full_flops:.3g}: "
        f"{1 - plan.relative_model:.1%} saved, at most {plan.speedup:.2f}× faster "
        f"(layers alone: {1 / plan.relative_layers:.2f}×)"
    )
    return table


def measurement_table(measured: "Measurement") -> Table:
    """The measurement for a terminal."""
    table = Table(title=f"measured on {measured.device}")
    for column in ("stage", "steps", "seconds per step", "tokens/s", "time"):
        table.add_column(column, justify="right")
    for row in measured.stages:
        rate = measured.batch * measured.length / row.step_seconds
        table.add_row(
            str(row.stage),
            f"{row.steps:,}",
            f"{row.step_seconds:.3f}" if row.step_seconds < 10 else f"{row.step_seconds:,.0f}",
            f"{rate:,.0f}",
            duration(row.hours * 3600),
        )
    table.add_section()
    table.add_row("all", f"{sum(row.steps for row in measured.stages):,}", "", "", duration(measured.hours * 3600))
    memory = f"Peak memory {measured.peak_memory / 2**30:.2f} GiB."
    if measured.timed_batch != measured.batch:
        memory = (
            f"Scaled up from batches of {measured.timed_batch} instead of {measured.batch} sequences, since a whole "
            f"step is slow here; peak memory with the smaller batch: {measured.peak_memory / 2**30:.2f} GiB."
        )
    missing = "" if measured.gpu_found else "No GPU was found: this is the time on the CPU. "
    table.caption = f"{missing}{memory} Evaluations and checkpoints are not counted."
    return table


def _keep(keep: tuple[float, ...]) -> str:
    """The keep probabilities of the layers that may be dropped: one number, or the range."""
    free = sorted({round(p, 4) for p in keep if p < 1})
    if not free:
        return "1"
    return f"{free[0]:.3g}" if len(free) == 1 else f"{free[0]:.3g} – {free[-1]:.3g}"
