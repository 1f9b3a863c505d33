"""The command `raptr plan`, and functions that other commands share with it.

Only parsing happens here, so help needs no torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from raptr.failures import importing
from raptr.models.registry import planned_size
from raptr.options import (
    SCHEDULE_HELP,
    AverageOption,
    FamilyOption,
    FullStartOption,
    LengthsOption,
    MethodOption,
    SetOption,
    SizeOption,
    TargetOption,
)
from raptr.strict_yaml import parse_setting

if TYPE_CHECKING:
    from raptr.train.config import Config


def plan(
    schedule: Annotated[list[str] | None, typer.Argument(metavar="[AXIS=]SIZES", help=SCHEDULE_HELP)] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model. [default: as in --size]")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps. [default: 675000]")] = None,
    method: MethodOption = None,
    lengths: LengthsOption = None,
    average: AverageOption = None,
    full_start: FullStartOption = None,
    target_flops: TargetOption = None,
    family: FamilyOption = None,
    size: SizeOption = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per optimizer step. [default: 256]")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per sequence. [default: 128]")] = None,
    settings: SetOption = None,
    timed: Annotated[
        bool, typer.Option("--measure", help="Time some steps here: how long the run will take, and its memory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the stages of a run before it starts: steps, layers, FLOPs and savings; with --measure also the time.

    The model is a BERT of size base unless --family or --size is given; a decoder is of size 100m. With
    --set model.start=FOLDER it is the model in that folder. The method is raptr unless --method is given.
    """
    options: dict[str, Any] = {
        "method.name": method,
        "method.schedule": schedule,
        "method.lengths": lengths,
        "method.average": average,
        "method.full_start": full_start,
        "model.family": family,
        "model.size": size,
        "model.layers": layers,
        "train.steps": steps,
        "train.batch": batch,
        "data.length": length,
    }
    named = {name: value for name, value in options.items() if value is not None}
    named |= dict(parse_setting(entry) for entry in settings or [])
    defaults: dict[str, Any] = {"method.name": "raptr", "train.steps": 675_000, "train.batch": 256, "data.length": 128}
    if named.get("model.start") is None:
        defaults["model.size"] = planned_size(named.get("model.family"))
    if named.keys().isdisjoint({"data.source", "model.start"}):
        defaults["data.vocabulary"] = 30_000
    options |= {name: value for name, value in defaults.items() if name not in named}
    show(settled(None, None, options, settings or [], None), target_flops, timed=timed, as_json=as_json)


def show(config: "Config", target: float | None = None, *, timed: bool = False, as_json: bool = False) -> None:
    """Print what a run costs; with `target`, schedules that cost at most this fraction of full training's FLOPs."""
    with importing():
        from raptr.train.console import show_plan
        from raptr.train.targets import show_targets

        if timed:
            from raptr.train.measure import measure
    if target is not None:
        show_targets(config, target, timed=timed, as_json=as_json)
        return
    show_plan(config, measure(config, Console(stderr=True)) if timed else None, as_json=as_json)


def settled(
    recipe: str | None, file: Path | None, given: dict[str, Any], sets: list[str], run: Path | None
) -> "Config":
    """Return the configuration that a recipe, a file and options give for a command (train/resolve.py)."""
    with importing():
        from raptr.train.resolve import resolve
    return resolve(recipe, file, given, sets, run)
