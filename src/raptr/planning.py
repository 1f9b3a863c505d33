"""The command `raptr plan`: parsing only, so that the help needs no torch; and what other commands share with it."""

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
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 675_000,
    method: MethodOption = "raptr",
    lengths: LengthsOption = None,
    average: AverageOption = None,
    full_start: FullStartOption = None,
    target_flops: TargetOption = None,
    family: FamilyOption = None,
    size: SizeOption = None,
    batch: Annotated[int, typer.Option(help="Sequences per optimizer step.")] = 256,
    length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 128,
    settings: SetOption = None,
    timed: Annotated[
        bool, typer.Option("--measure", help="Time some steps here: how long the run will take, and its memory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the stages of a run before it starts: steps, layers, FLOPs and savings; with --measure also the time.

    The model is a BERT of size base unless --family or --size is given; a decoder is of size 100m. With
    --set model.start=FOLDER it is the one in the folder.
    """
    named = {"model.family": family, **dict(parse_setting(entry) for entry in settings or [])}
    if size is None and named.get("model.start") is None:
        size = planned_size(named["model.family"])
    given = {
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
        "data.vocabulary": None if {"data.source", "model.start"} & named.keys() else 30_000,
    }
    show(settled(None, None, method, given, settings or [], None), target_flops, timed=timed, as_json=as_json)


def show(config: "Config", target: float | None = None, *, timed: bool = False, as_json: bool = False) -> None:
    """Print what a run costs, or with a target the schedules that meet it."""
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
    recipe: str | None, file: Path | None, method: str | None, given: dict[str, Any], sets: list[str], run: Path | None
) -> "Config":
    """The configuration of a command, from a recipe, a file and options (train/resolve.py)."""
    with importing():
        from raptr.train.resolve import resolve
    return resolve(recipe, file, method, given, sets, run)
