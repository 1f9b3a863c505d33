"""What the terminal shows of a plan and of a run that starts: costs, measured times, and advice on the method."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from raptr.data.order import CYCLE, quotas
from raptr.methods import Method
from raptr.train import advice
from raptr.train.advice import AUTO, SAME, Measured, Place, named
from raptr.train.config import BUILTIN, Config
from raptr.train.plan import Plan, plan_run
from raptr.train.progress import duration
from raptr.train.run import RunFolder

OFTEN = 10  # times that a run reads its text, above which the held-out loss should be watched

if TYPE_CHECKING:  # measure imports the training loop, which a plan does not need
    from raptr.train.measure import Measurement


def show_plan(config: Config, measured: "Measurement | None", *, as_json: bool) -> None:
    """Print what a run costs, its measured time if there is one, and advice on its method, as tables or as JSON."""
    planned = plan_run(config)
    if as_json:
        record = planned.json() | {"advice": advised(config)} | ({"measured": asdict(measured)} if measured else {})
        print(json.dumps(record, indent=2), flush=True)
        return
    Console().print(plan_table(planned))
    if measured is not None:
        Console().print(measurement_table(measured))
    for line in [*advised(config), *_repetition(config)]:
        Console().print(line, highlight=False, markup=False, soft_wrap=True)


def say_start(config: Config, run: Path, console: Console, *, fresh: bool) -> None:
    """Print where a run is, advice on its method, what text it reads, and whether it goes without a GPU."""
    lines = [f"run     {run}", *(f"method  {line}" for line in _of_start(config, RunFolder(run), fresh=fresh))]
    if config.data.source == BUILTIN:
        lines.append("text    the Python standard library (--data FOLDER trains on yours)")
    lines += [f"text    {line}" for line in _repetition(config)]
    if config.train.device == "auto" and config.train.resolve_device().type == "cpu":
        lines.append("device  the CPU, since no GPU was found")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _repetition(config: Config) -> list[str]:
    """Return a line about how much prepared text a run has, and how often it reads it; none if it cannot be read."""
    if config.data.source in (None, BUILTIN):
        return []
    try:
        domains = config.prepared(config.data.source).domains
    except (ValueError, OSError):  # a finished run needs no text, any other is refused when it opens it
        return []
    read, unique = config.train.steps * config.train.batch * config.data.length, sum(d.total("train") for d in domains)
    shares = quotas([domain.weight for domain in domains])
    passes = {d.name: read * share / CYCLE / d.total("train") for d, share in zip(domains, shares, strict=True)}
    least, most = min(passes, key=passes.__getitem__), max(passes, key=passes.__getitem__)
    ends = "" if len(passes) == 1 else f" ({least} {_times(passes[least])}, {most} {_times(passes[most])})"
    line = f"The text has {unique:,} tokens, which this run reads {_times(read / unique)}{ends}."
    often = " Watch the held-out loss, or take fewer --steps or more text." if passes[most] > OFTEN else ""
    return [line + often]


def _times(count: float) -> str:
    return "less than 0.1 times" if count < 0.1 else f"{count:.1f} times" if count < 10 else f"{count:,.0f} times"


def _of_start(config: Config, run: RunFolder, *, fresh: bool) -> list[str]:
    """Return the lines about the method: advice for a new run, what `auto` means for one that is resumed."""
    if fresh or not run.config.is_file() or not run.begun():
        return advised(config)
    if config.method["name"] != AUTO:
        return []
    method = config.following(run.read()).method
    return [f"The run began with {method['name']} {method.get('schedule', '')}".rstrip() + " and goes on with it."]


def advised(config: Config) -> list[str]:
    """Return advice on a run: what `auto` chose, or a better method; an early decay; why there will be no export."""
    place, steps = advice.place_of(config), config.train.steps
    best, method = advice.best_for(config), config.make_method()
    lines = []
    if config.method["name"] == AUTO:
        lines = _choice(config, place, best)
    elif best is not None and best.place.near(place) and config.model.start is None:
        lines = _note(place, advice.plain_settings(method), steps, best)
    unexportable = config.dimensions.unexportable()
    return [*lines, *_early_decay(config, method), *([f"Note: {unexportable}"] if unexportable else [])]


def _choice(config: Config, place: Place, found: Measured | None) -> list[str]:
    """Return what `auto` chose, on which measurement, what it costs, and how far this run is from that measurement."""
    if found is None:
        nearest = min((row.place for row in advice.table()), key=place.distance)
        reason = f"At {nearest} no method that was measured ended below full training with the same FLOPs."
        return [f"auto chose full. {reason}", *_far(place, nearest)]
    steps, planned = config.train.steps, plan_run(config)
    settings = found.settings(place, steps)
    assert settings is not None
    measured = "it" if settings == found.method else named(found.method)
    cost = f"It costs {planned.relative_model:.2f} of the FLOPs of full training of the same {steps:,} steps."
    if found.longer > SAME:
        cost += (
            f" By the measured ratio they compare with {steps / found.longer:,.0f} steps of full training; "
            f"--steps {math.ceil(steps * found.longer)} would compare with {steps:,}."
        )
    also = "" if found.to_full.below else f", {found.to_reduced} full training with as few FLOPs"
    return [
        f"auto chose {named(settings)}: at {found.place} {measured} ended {found.to_full} full training, with "
        f"{found.flops:.2f} of its FLOPs and {found.longer:.2f} times its steps{also} ({_seeds(found)}, record "
        f"{found.record}).",
        cost,
        *_far(place, found.place),
    ]


def _early_decay(config: Config, method: Method) -> list[str]:
    """Return a note if the learning rate falls over a step and 1% of the run before a schedule's last stage begins."""
    start, last = method.steps - config.optimizer.decay_steps(method.steps), method.phases()[-1].start
    if "schedule" not in method.own_settings() or last - start <= max(1, 0.01 * method.steps):
        return []
    return [
        f"Note: the learning rate falls from step {start:,} on, and the last stage begins at step {last:,}. The paper "
        f"lowers it in the last stage only: --set optimizer.decay={(method.steps - last) / method.steps:.3g}."
    ]


def _note(place: Place, own: dict[str, Any], steps: int, found: Measured) -> list[str]:
    """Return a note if, by the measurements, the best method ended below the method of this run."""
    better, end = f"Note: at {found.place} {named(found.method)} ended", f"--method auto takes {found.method['name']}."
    if own["name"] == "full":
        note = f"{better} {found.to_full} full training, with {found.flops:.2f} of its FLOPs ({_seeds(found)}); {end}"
        return [note] if found.to_full.below else []
    ours = advice.matching(place, own, steps, advice.table())
    if ours is None or ours.to_reduced.low <= found.to_reduced.high:
        return []
    return [
        f"{better} {found.to_reduced} full training with the same FLOPs ({_seeds(found)}), {named(ours.method)} ended "
        f"{ours.to_reduced} it ({_seeds(ours)}); {end}"
    ]


def _far(place: Place, measured: Place) -> list[str]:
    """Return a note if the measurement is far from this run, or has other initial weights."""
    if not measured.near(place):
        kinds = ["" if measured.learns_as(place) else f", {at.family} with {at.objective}" for at in (measured, place)]
        far = f"That measurement is far: {measured}{kinds[0]}; your run has {place}{kinds[1]}"
        return [f"{far}, so the choice is a guess."]
    if measured.init != place.init:
        return [f"That was measured with model.init {measured.init}; your run has {place.init}."]
    return []


def _seeds(row: Measured) -> str:
    return "one seed, preliminary" if row.to_full.seeds == 1 else f"{row.to_full.seeds} seeds"


def plan_table(plan: Plan) -> Table:
    """Return the plan as a table for the terminal."""
    table = Table(title=f"{plan.method}: {plan.layers} layers, {plan.steps:,} steps")
    whole = plan.rows[-1]
    narrow = {
        axis: f"{name}\nof {getattr(whole, axis)}"
        for axis, name in (("heads", "heads"), ("parts", "MLP"))
        if any(getattr(row, axis) != getattr(whole, axis) for row in plan.rows)
    }
    share = [] if narrow else ["share"]  # 80 columns have no room for all
    for column in ("stage", "steps", *share, "size", "keep", *narrow.values(), "layers'\nFLOPs", "model's\nFLOPs"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in plan.rows:
        table.add_row(
            str(row.stage),
            f"{row.start:,} – {row.stop - 1:,}",
            *(f"{(row.stop - row.start) / plan.steps:.1%}" for _ in share),
            f"{row.size:.2f}".removesuffix(".00"),
            _keep(row.keep),
            *(str(getattr(row, axis)) for axis in narrow),
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
    """Return the measurement as a table for the terminal."""
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
    peak = f"{measured.peak_memory / 2**30:.2f} GiB" if measured.peak_memory else "unknown"
    memory = f"Peak memory {peak}."
    if measured.timed_batch != measured.batch:
        memory = (
            f"Scaled up from batches of {measured.timed_batch} instead of {measured.batch} sequences, since a whole "
            f"step is slow here; peak memory with the smaller batch: {peak}."
        )
    missing = "" if measured.gpu_found else "No GPU was found: this is the time on the CPU. "
    table.caption = f"{missing}{memory} Evaluations and checkpoints are not counted."
    return table


def _keep(keep: tuple[float, ...]) -> str:
    """Return the keep probabilities of the layers that may be dropped, as one number or a range."""
    free = sorted({round(p, 4) for p in keep if p < 1})
    if not free:
        return "1"
    return f"{free[0]:.3g}" if len(free) == 1 else f"{free[0]:.3g} – {free[-1]:.3g}"
