"""The command `raptr study`: it only parses arguments, so that its help needs no torch."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from raptr.failures import importing
from raptr.studies.findings import FINDINGS, findings_table


def study(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(FINDINGS)}.")],
    run: Annotated[Path | None, typer.Argument(help="For stability: the run whose model is studied.")] = None,
    step: Annotated[
        int | None, typer.Option(help="For stability: the step of the checkpoint. [default: the newest]")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Repetitions. [default: the study's]")] = None,
    small: Annotated[bool, typer.Option("--small", help="A smaller setting: minutes on two cores.")] = False,
    steps: Annotated[
        list[int] | None, typer.Option(metavar="<int>", help="For polynomial-length: a length of the runs; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path, typer.Option(help="Where the numbers and the figure go.")] = Path("runs/studies"),
) -> None:
    """Reproduce a table or figure of the paper: numbers as JSON, the figure as PNG. The same command resumes it."""
    with importing():
        from raptr.studies.registry import conduct_named
    console = Console(stderr=True)
    options: dict[str, Any] = {"seeds": seeds, "small": small, "steps": steps or (), "device": device}
    try:
        folder = conduct_named(name, run, out, step=step, **options, console=console)
    except KeyboardInterrupt:
        console.print("stopped; what was finished is kept, and the same command continues")
        raise typer.Exit(3) from None
    Console().print(findings_table(json.loads((folder / "result.json").read_text(encoding="utf-8"))))
    console.print(f"numbers {escape(str(folder / 'result.json'))}", highlight=False)
    console.print(f"figure  {escape(str(folder / f'{name}.png'))}", highlight=False)
