"""Options that several commands share. Their help lists methods, families and sizes, without importing torch."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from raptr.methods import METHODS
from raptr.models.registry import FAMILIES, sizes_help

SCHEDULE_HELP = (
    "Layers that run in each stage, such as 6-8-10-12, or an axis (depth, heads, mlp) and its sizes, such as "
    "mlp=768-1536-3072; repeatable. [default: recommended]"
)
ScheduleOption = Annotated[list[str] | None, typer.Option(metavar="[AXIS=]SIZES", help=SCHEDULE_HELP)]
LengthsOption = Annotated[
    str | None, typer.Option(help="Lengths of the stages: equal, or proportional (to 1, 2, 3, …).")
]
AverageOption = Annotated[
    float | None,
    typer.Option(
        help="Choose the stages' lengths so that this many layers run on average; for pld and layer-dropout: this "
        "fraction of the layers."
    ),
]
FullStartOption = Annotated[
    int | None, typer.Option(help="Train the full model for this many steps first, taken from the last stage.")
]
MethodOption = Annotated[
    str | None,
    typer.Option(help=f"The training method: {', '.join(METHODS)}, or auto: the best in the nearest measurement."),
]
FamilyOption = Annotated[str | None, typer.Option(help=f"The kind of model: {', '.join(FAMILIES)}.")]
SizeOption = Annotated[str | None, typer.Option(help=f"The model's size ({sizes_help()}).")]
TargetOption = Annotated[
    float | None,
    typer.Option(help="Find schedules, on one axis or several, with at most this fraction of full training's FLOPs."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Any other setting, such as method.scaling=sqrt or optimizer.idle=zero; repeatable.",
    ),
]
StepsOption = Annotated[int | None, typer.Option(help="Optimizer steps.")]


class Commands(TyperGroup):
    """The commands. Their help leaves out types that say nothing: <bool> of flags, <list[Path]> of arguments.

    The error for an unknown option names the commands that have it, and --set if the command takes any setting.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:  # typer exports no name for this exception
            if hasattr(error, "possibilities") and hasattr(error, "option_name"):
                self._explain(error)
            raise

    def _explain(self, error: Any) -> None:
        having = [name for name, command in self.commands.items() if error.option_name in _options(command)]
        if 0 < len(having) <= 3:  # an option of most commands, such as --out, has another name in this one
            error.message += f". It is an option of raptr {', '.join(having)}"
            error.possibilities = None  # typer would suggest options of similar spelling
        if "--set" in _options(error.ctx.command):
            error.message += ". Any setting can be given with --set SECTION.KEY=VALUE"

    def get_params(self, ctx: Any) -> Any:
        return _plain(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _plain(command.get_params(ctx))
        return command


def _options(command: Any) -> list[str]:
    return [option for param in command.params for option in param.opts]


def _plain(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        if param.nargs == -1:  # an argument; typer would show its type beside its name
            param.display_type_rich = lambda ctx: None
    return params
