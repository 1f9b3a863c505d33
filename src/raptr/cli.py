"""The command line: parsing only.

Exit codes: 0 done; 1 a run that diverged; 2 bad input, one sentence says what; 3 stopped by SIGTERM or Ctrl-C, saved,
and the same command goes on; 130 interrupted where there was nothing to save.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from raptr.comparison import compare as run_comparison
from raptr.comparison import read_comparison, read_file
from raptr.data.console import preparation_bar, preparation_table
from raptr.data.domains import parse_domain, with_valid
from raptr.data.preparation import VOCABULARY, prepare_corpus
from raptr.data.request import HELD_OUT
from raptr.methods import METHODS
from raptr.models.bert import SIZES
from raptr.recipes import RECIPES
from raptr.report import write_report
from raptr.settings import load_yaml, nearest
from raptr.studies import NAMES as STUDIES
from raptr.studies import conduct_named, findings_table
from raptr.train.config import Config
from raptr.train.loop import pretrain as run_pretraining
from raptr.train.plan import plan as make_plan
from raptr.train.safety import Diverged

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Progressive subnetwork training: pretrain Transformers with less compute.",
)

ScheduleOption = Annotated[
    str | None, typer.Option(help="Sizes of the stages in layers, such as 6-8-10-12. [default: recommended]")
]
LengthsOption = Annotated[str | None, typer.Option(help="Stage lengths: equal or proportional.")]
AverageOption = Annotated[
    float | None,
    typer.Option(help="Fit to this average: layers (schedules), or a fraction of them (pld, layer-dropout)."),
]
FullStartOption = Annotated[int | None, typer.Option(help="Steps of full training at the start.")]
MethodOption = Annotated[str | None, typer.Option(help=f"One of: {', '.join(METHODS)}.")]
SizeOption = Annotated[str | None, typer.Option(help=f"The model: {', '.join(SIZES)}.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Any other setting, such as method.scaling=sqrt or optimizer.idle=zero; repeatable.",
    ),
]
StepsOption = Annotated[int | None, typer.Option(help="Optimizer steps.")]


@app.command()
def pretrain(
    recipe: Annotated[str, typer.Argument(help=f"A named run: {', '.join(RECIPES)}.")] = "demo",
    run: Annotated[Path | None, typer.Option(help="The run's folder. [default: runs/RECIPE-METHOD]")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file whose settings replace the recipe's.")] = None,
    data: Annotated[str | None, typer.Option(help="A folder made by `raptr prepare`, or builtin.")] = None,
    method: MethodOption = None,
    schedule: ScheduleOption = None,
    lengths: LengthsOption = None,
    average: AverageOption = None,
    full_start: FullStartOption = None,
    size: SizeOption = None,
    steps: StepsOption = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per optimizer step.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    lr: Annotated[float | None, typer.Option(help="The peak learning rate.")] = None,
    isolate_documents: Annotated[
        bool | None, typer.Option("--isolate-documents", help="Keep attention inside documents.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of everything random.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic", help="The same bits every time on a GPU too, at a cost in speed.")
    ] = None,
    settings: SetOption = None,
    until: Annotated[int | None, typer.Option(help="Stop after this many steps in all, saved.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace the run if it exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show settings and plan, train nothing.")] = False,
) -> None:
    """Pretrain a model: by default a tiny BERT with RaPTr, on text that every machine has.

    A run that was stopped goes on where it was when the same command is given again.
    """
    given = {
        "method.schedule": schedule,
        "method.lengths": lengths,
        "method.average": average,
        "method.full_start": full_start,
        "model.size": size,
        "train.steps": steps,
        "train.batch": batch,
        "data.source": data,
        "data.length": length,
        "data.isolate_documents": isolate_documents,
        "optimizer.peak": lr,
        "train.seed": seed,
        "train.device": device,
        "train.deterministic": deterministic,
    }
    full = _resolve(recipe, config, method, given, settings or [])
    console = Console(stderr=True)
    if dry_run:
        typer.echo(yaml.safe_dump(full.mapping(), sort_keys=False))
        _show_plan(full, as_json=False)
        return
    if until is not None and until < 1:
        raise ValueError(f"until is {until}; a whole number from 1 on is allowed")
    folder = run or Path("runs") / f"{recipe}-{full.method['name']}"
    result = run_pretraining(full, folder, fresh=fresh, until=until, console=console)
    if result.step < full.train.steps:
        how = "the same command" if result.stopped else "without --until the same command"
        console.print(f"stopped after step {result.step:,} of {full.train.steps:,}, saved; {how} goes on")
        raise typer.Exit(3 if result.stopped else 0)
    report = write_report([folder], folder / "report")
    console.print(report.table)
    try:
        model = _export(folder)
    except ValueError as error:  # a trained model that no stock class can hold is still a trained model
        console.print(f"no export: {escape(str(error))}", highlight=False)
        model = folder / "checkpoints" / f"step-{result.step}"
    console.print(f"model   {escape(str(model))}", highlight=False)
    console.print(f"report  {escape(str(report.plot))}", highlight=False)
    console.print(f"page    {escape(str(report.page))}", highlight=False)


@app.command()
def plan(
    schedule: Annotated[
        str | None, typer.Argument(help="Sizes of the stages, such as 6-8-10-12. [default: recommended]")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Depth of the model. [default: the size's]")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 100_000,
    method: Annotated[str, typer.Option(help=f"One of: {', '.join(METHODS)}.")] = "raptr",
    lengths: LengthsOption = None,
    average: AverageOption = None,
    full_start: FullStartOption = None,
    size: Annotated[str, typer.Option(help=f"The model: {', '.join(SIZES)}.")] = "base",
    batch: Annotated[int, typer.Option(help="Sequences per optimizer step.")] = 256,
    length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 128,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show a schedule's stages: steps, sizes, keep probabilities, FLOPs and savings, before a GPU is spent."""
    given = {
        "method.schedule": schedule,
        "method.lengths": lengths,
        "method.average": average,
        "method.full_start": full_start,
        "model.size": size,
        "model.layers": layers,
        "train.steps": steps,
        "train.batch": batch,
        "data.length": length,
        "data.vocabulary": 30_000,
        "optimizer.idle": "zero",  # a plan allows every axis; the policy costs no FLOPs
    }
    _show_plan(_resolve(None, None, method, given, settings or []), as_json=as_json)


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
    tokenizer: Annotated[Path | None, typer.Option(help="Use this tokenizer.json instead of training one.")] = None,
    field: Annotated[str, typer.Option(help="The field of jsonl and parquet that holds the text.")] = "text",
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
    stopped goes on where it was when the same command is given again.
    """
    console = Console(stderr=True)
    with preparation_bar(console) as bar:
        store = prepare_corpus(
            with_valid([parse_domain(text) for text in data], valid or []),
            out,
            vocabulary=vocabulary,
            tokenizer=tokenizer,
            field=field,
            held_out=held_out,
            deduplicate=deduplicate,
            skip_broken=skip_broken,
            workers=workers,
            progress=bar,
            say=lambda text: console.print(text, highlight=False, markup=False),
        )
    console.print(preparation_table(store))
    console.print(f"next    raptr pretrain --data {escape(str(out))}", highlight=False)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    layers: Annotated[int | None, typer.Option(help="Export a part of this many layers, unscaled.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to. [default: RUN/export]")] = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint. [default: the newest]")] = None,
) -> None:
    """Write a run's model as a folder that `AutoModel` of transformers loads."""
    folder = _export(run, out, layers=layers, step=step)
    Console(stderr=True).print(f"model   {escape(str(folder))}", highlight=False)


@app.command()
def study(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(STUDIES)}.")],
    run: Annotated[Path | None, typer.Argument(help="For stability: the run whose model is studied.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Repetitions. [default: the study's]")] = None,
    small: Annotated[bool, typer.Option("--small", help="A smaller setting: minutes on two cores.")] = False,
    steps: Annotated[
        list[int] | None, typer.Option(help="For polynomial-length: a length of the runs; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path, typer.Option(help="Where the numbers and the figure go.")] = Path("runs/studies"),
) -> None:
    """Compute a table or figure of the paper: numbers as JSON, the figure as PNG. Stopped, it goes on where it was."""
    console = Console(stderr=True)
    given: dict[str, Any] = {"seeds": seeds, "small": small, "steps": steps or (), "device": device}
    try:
        folder = conduct_named(name, run, out, **given, console=console)
    except KeyboardInterrupt:
        console.print("stopped; what was finished is kept, and the same command goes on")
        raise typer.Exit(3) from None
    Console().print(findings_table(json.loads((folder / "result.json").read_text(encoding="utf-8"))))
    console.print(f"numbers {escape(str(folder / 'result.json'))}", highlight=False)
    console.print(f"figure  {escape(str(folder / f'{name}.png'))}", highlight=False)


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="The comparison, in YAML; examples/compare.yaml is one.")],
    out: Annotated[Path | None, typer.Option(help="Where runs and tables go; runs/NAME-OF-FILE if not given.")] = None,
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
    at its whole length and at a reduced one, fully decayed. Leaves compare.md, compare.json and compare.png; a
    comparison that was stopped goes on where it was when the same command is given again.
    """
    given = read_file(file)
    if dry_run:
        Console().print(read_comparison(given, device=device).table())
        return
    console = Console(stderr=True)
    folder = out or Path("runs") / file.stem
    done = run_comparison(given, folder, device=device, keep_models=keep_models, jobs=jobs, console=console)
    if done.table is not None:
        Console().print(done.table)
        for kind in ("md", "json", "png"):
            console.print(f"{kind:<8}{escape(str(folder / f'compare.{kind}'))}", highlight=False)
    if done.stopped:
        console.print(f"stopped with {done.finished} of {done.runs} runs finished; the same command goes on")
        raise typer.Exit(3)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="Where to write the page, the plot and the tables.")] = Path("runs/report"),
) -> None:
    """Compare runs: a table, a plot of their losses, and a page to explore losses, speed and settings in."""
    written = write_report(runs, out)
    console = Console()
    console.print(written.table)
    console.print(f"plot    {escape(str(written.plot))}", highlight=False)
    console.print(f"page    {escape(str(written.page))}", highlight=False)


def _export(run: Path, out: Path | None = None, *, layers: int | None = None, step: int | None = None) -> Path:
    from raptr.train.exporting import export as write_export  # imports transformers, which is slow

    return write_export(run, out, layers=layers, step=step)


def _show_plan(config: Config, *, as_json: bool) -> None:
    dimensions = config.model.build(config.data.vocabulary_size(), config.data.length)
    made = make_plan(
        config.make_method(dimensions),
        dimensions,
        sequences=config.train.batch,
        length=config.data.length,
        masked=config.data.masked,
    )
    if as_json:
        typer.echo(json.dumps(made.json(), indent=2))
    else:
        Console().print(made.table())


def _resolve(
    recipe: str | None, file: Path | None, method: str | None, given: dict[str, Any], sets: list[str]
) -> Config:
    """Recipe, then file, then options: the later replaces the earlier."""
    merged: dict[str, Any] = {}
    if recipe is not None:
        if recipe not in RECIPES:
            raise ValueError(f"recipe is {recipe!r}; {nearest(recipe, RECIPES)}allowed: {', '.join(RECIPES)}")
        merged = dict(RECIPES[recipe]())
    for section, values in _read_file(file).items() if file else ():
        replaced = section == "method" and "name" in values  # another method's settings do not carry over
        merged[section] = values if replaced else {**merged.get(section, {}), **values}
    if method is not None and method != merged.get("method", {}).get("name"):
        merged["method"] = {"name": method}
    for entry in sets:
        name, separator, text = entry.partition("=")
        if not separator or name.count(".") != 1:
            raise ValueError(f"--set is {entry!r}; SECTION.KEY=VALUE is allowed, such as method.scaling=sqrt")
        given = {**given, name: yaml.safe_load(text)}
    for name, value in given.items():
        if value is not None:
            section, key = name.split(".")
            merged[section] = {**merged.get(section, {}), key: value}
    return Config.read(merged)


def _read_file(path: Path) -> dict[str, dict[str, Any]]:
    try:
        read = load_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config {str(path)!r} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(read, dict) or not all(isinstance(values, dict) for values in read.values()):
        raise ValueError(f"config {str(path)!r} is no mapping of sections; see config.yaml of any run")
    return read


def main() -> None:
    """Run the command line; what a user got wrong is said in one sentence."""
    warnings.showwarning = _show_warning
    try:
        app(prog_name="raptr")
    except ValueError as error:
        message, code = str(error), 2
    except OSError as error:
        message, code = f"{error.filename or 'a file'}: {error.strerror or error}", 2
    except Diverged as error:
        message, code = str(error), 1
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    else:
        return
    print(f"raptr: {message}", file=sys.stderr)
    sys.exit(code)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as a sentence: where in the code it arose helps no user."""
    print(f"raptr: warning: {message}", file=sys.stderr)
