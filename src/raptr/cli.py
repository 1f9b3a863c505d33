"""The command line: it only parses. Errors and exit codes are in failures.py.

Help works without torch, matplotlib and transformers, since each command imports them only when it runs.
"""

import os
import platform
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from raptr.data.prepare.console import DOCUMENTS_HELP, next_command, preparation_bar, preparation_table
from raptr.data.prepare.domains import parse_domain, with_valid
from raptr.data.prepare.preparation import VOCABULARY, prepare_corpus
from raptr.data.prepare.reading import DOCUMENTS
from raptr.data.prepare.request import HELD_OUT
from raptr.evaluation.command import fewshot, finetune
from raptr.failures import EXIT_CODES, importing, reported, work_in
from raptr.objectives import SPECIALS, specials_of
from raptr.options import (
    AverageOption,
    Commands,
    FamilyOption,
    FullStartOption,
    LengthsOption,
    MethodOption,
    ScheduleOption,
    SetOption,
    SizeOption,
    StepsOption,
)
from raptr.planning import plan, settled, show
from raptr.recipes import FIRST, RECIPES
from raptr.studies.command import study

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # "rich" would drop text in square brackets
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"raptr {version('raptr')}, torch {version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES)
def raptr(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Progressive subnetwork training: pretrain Transformers with less compute."""


@app.command()
def pretrain(
    recipe: Annotated[
        str, typer.Argument(help=f"The model and its settings to start from: {', '.join(RECIPES)}.")
    ] = "demo",
    run: Annotated[Path | None, typer.Option(help="The folder of the run. [default: runs/RECIPE-METHOD]")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file whose settings replace the recipe's, such as a run's config.yaml.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A folder made by `raptr prepare`, or builtin (the Python standard library).")
    ] = None,
    method: MethodOption = None,
    schedule: ScheduleOption = None,
    lengths: LengthsOption = None,
    average: AverageOption = None,
    full_start: FullStartOption = None,
    init: Annotated[
        str | None,
        typer.Option(help="Start from the model in this Hugging Face folder (model.start): a Llama, or an export."),
    ] = None,
    family: FamilyOption = None,
    size: SizeOption = None,
    steps: StepsOption = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per optimizer step.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    lr: Annotated[float | None, typer.Option(help="The peak learning rate.")] = None,
    isolate_documents: Annotated[
        bool | None, typer.Option("--isolate-documents", help="Keep attention inside documents.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The random seed.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    parallel: Annotated[str | None, typer.Option(help="With torchrun: ddp, fsdp or hsdp. [default: ddp]")] = None,
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic", help="Repeat results bit for bit on a GPU too; slower.")
    ] = None,
    settings: SetOption = None,
    until: Annotated[int | None, typer.Option(help="Save and stop after this step, to continue later.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run if it exists, and start again.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all of the data and compare checksums, not only what has changed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the settings and the plan, train nothing.")] = False,
) -> None:
    """Pretrain a model: without options a tiny BERT, with RaPTr, on the text of the Python standard library.

    The recipe decoder-demo does the same with a tiny decoder. A run that was stopped continues when the same command is
    given again.
    """
    options = {
        "method.name": method,
        "method.schedule": schedule,
        "method.lengths": lengths,
        "method.average": average,
        "method.full_start": full_start,
        "model.family": family,
        "model.size": size,
        "model.start": init,
        "train.steps": steps,
        "train.batch": batch,
        "data.source": data,
        "data.length": length,
        "data.isolate_documents": isolate_documents,
        "optimizer.peak": lr,
        "train.seed": seed,
        "train.device": device,
        "train.parallel": parallel,
        "train.deterministic": deterministic,
    }
    full = settled(recipe, config, options, settings or [], run)
    if until is not None and not 1 <= until <= full.train.steps:
        raise ValueError(f"--until is {until}; a step from 1 to {full.train.steps} (train.steps) is allowed")
    console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")  # only the first process prints
    if dry_run:
        if not console.quiet:
            typer.echo(yaml.safe_dump(full.mapping(), sort_keys=False))
            show(full)
        return
    with importing():
        from raptr.train.loop import pretrain as run_pretraining
        from raptr.train.resolve import default_run
    folder = run or default_run(recipe, full.method["name"])
    with work_in(folder):
        result = run_pretraining(
            full, folder, fresh=fresh, until=until, console=console, verify=verify, export=True, report=True
        )
    if result.step < full.train.steps:
        how = "the same command continues" if result.stopped else "the same command without --until continues"
        saved = f", saved in {folder}" if result.step else ""
        _say(console, f"stopped after step {result.step:,} of {full.train.steps:,}{saved}; {how}")
        raise typer.Exit(3 if result.stopped else 0)
    if result.report is None:  # another process writes it
        return
    console.print(result.report.table)
    _say(console, f"model   {result.model}")
    _say(console, f"report  {result.report.plot}")
    _say(console, f"page    {result.report.page}")


app.command()(plan)


@app.command()
def prepare(
    data: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]PATH[:WEIGHT]",
            help="Text, jsonl or parquet (.gz, .xz, .zst too): a file, folder, glob, or hf:NAME. Repeat for domains.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    vocabulary: Annotated[int, typer.Option(help="Size of the tokenizer that is trained.")] = VOCABULARY,
    objective: Annotated[
        str,
        typer.Option(
            metavar="|".join(SPECIALS), help="What a model learns: mlm for BERT, causal or ul2 for a decoder."
        ),
    ] = "mlm",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Use this tokenizer.json, or its folder, not a new one.")
    ] = None,
    field: Annotated[str, typer.Option(help="The field of jsonl and parquet that holds the text.")] = "text",
    documents: Annotated[str | None, typer.Option(metavar="|".join(DOCUMENTS), help=DOCUMENTS_HELP)] = None,
    held_out: Annotated[float, typer.Option(help="The fraction of documents kept for evaluation.")] = HELD_OUT,
    valid: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]PATH", help="Text to keep for evaluation instead; once for each domain."),
    ] = None,
    deduplicate: Annotated[bool, typer.Option("--deduplicate", help="Drop exact copies of documents.")] = False,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Count broken lines instead of stopping.")] = False,
    workers: Annotated[int | None, typer.Option(help="Threads. [default: all cores]")] = None,
) -> None:
    """Turn text into a tokenizer and token shards that `raptr pretrain --data FOLDER` trains on.

    Several domains are mixed by their weights: --data wiki=PATH:17 --data web=PATH:57. A preparation that was
    stopped continues when the same command is given again.
    """
    console = Console(stderr=True)
    with work_in(out), preparation_bar(console, out) as bar:
        store = prepare_corpus(
            with_valid([parse_domain(text) for text in data], valid or []),
            out,
            vocabulary=vocabulary,
            specials=specials_of(objective),
            tokenizer=tokenizer,
            field=field,
            documents=documents,
            held_out=held_out,
            deduplicate=deduplicate,
            skip_broken=skip_broken,
            workers=workers,
            progress=bar,
            say=partial(_say, console),
        )
    console.print(preparation_table(store))
    with importing():
        import torch

        from raptr.train.config import Config
    recipe = FIRST[objective][torch.cuda.is_available()]
    config = Config.read(RECIPES[recipe]())
    length, window = config.data.length, config.objective.kind.window(config.data.length)
    _say(console, next_command(store, recipe, length, window))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    layers: Annotated[
        int | None, typer.Option(help="Export only this many layers: the first, the last and others evenly between.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write. [default: RUN/export, with --layers RUN/export-N-layers]")
    ] = None,
    step: Annotated[int | None, typer.Option(help="The step of the checkpoint. [default: the newest]")] = None,
) -> None:
    """Write a run's model as a folder that `AutoModel` of transformers loads."""
    with importing():
        from raptr.train.exporting import export as write_export
    folder = write_export(run, out, layers=layers, step=step)
    _say(Console(stderr=True), f"model   {folder}")


app.command()(study)


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="The comparison, in YAML; examples/compare.yaml is one.")],
    out: Annotated[Path | None, typer.Option(help="Where runs and tables go. [default: runs/NAME-OF-FILE]")] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Continue from this record: its runs count as finished, and new ones are added to it."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    keep_models: Annotated[
        bool, typer.Option("--keep-models", help="Keep the last checkpoint of every run, which is dropped otherwise.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(help="Runs at once, for models too small to fill a GPU; no times are given then.")
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and their FLOPs, train nothing.")] = False,
) -> None:
    """Compare training methods on equal terms: the same data order, seeds and learning-rate grid, equal steps or FLOPs.

    The file names the shared settings, the seeds, the learning rates, the budget and the methods. Full training runs
    at its whole length and at a reduced one, each to the end of its decay. Writes compare.md, compare.json and
    compare.png. A comparison that was stopped continues when the same command is given again; with --record it needs
    only that file, not the run folders.
    """
    with importing():
        from raptr.comparison import compare as run_comparison
        from raptr.comparison import read_comparison, read_file
    comparison = read_file(file)
    if dry_run:
        Console().print(read_comparison(comparison, device=device).table())
        return
    console = Console(stderr=True)
    folder = out or Path("runs") / file.stem
    with work_in(folder):
        done = run_comparison(
            comparison, folder, record=record, device=device, keep_models=keep_models, jobs=jobs, console=console
        )
    if done.table is not None:
        Console().print(done.table)
        for kind in ("md", "json", "png"):
            path = record if record is not None and kind == "json" else folder / f"compare.{kind}"
            console.print(f"{kind:<8}{escape(str(path))}", highlight=False)
    if done.stopped:
        judged = ", not all of them evaluated on tasks" if done.finished == done.runs else ""
        console.print(f"stopped with {done.finished} of {done.runs} runs finished{judged}; the same command continues")
        raise typer.Exit(3)


app.command()(finetune)
app.command()(fewshot)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, such as runs/*; folders that are no runs are left out.")
    ],
    out: Annotated[Path, typer.Option(help="Where to write the page, the plot and the tables.")] = Path("runs/report"),
) -> None:
    """Compare runs: a table, plots of losses and scores, and a page to explore losses, speed and settings in."""
    with importing():
        from raptr.report import write_report
    others = [path for path in runs if path.is_dir() and not (path / "config.yaml").is_file()]
    written = write_report([path for path in runs if path not in others] or runs, out)
    console = Console()
    console.print(written.table)
    if others:
        _say(console, f"left out, as no run (config.yaml is missing): {', '.join(map(str, others))}")
    _say(console, f"plot    {written.plot}")
    if written.scores is not None:
        _say(console, f"scores  {written.scores}")
    _say(console, f"page    {written.page}")


def _say(console: Console, text: str) -> None:
    """Print a line verbatim: without markup, and without line breaks, so that a path can be copied."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    """Run the command line."""
    with reported():
        app(prog_name="raptr")
