"""The commands `raptr finetune` and `raptr fewshot`: only parsing, so that their help needs no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from raptr.evaluation.fewshot.suite import GROUPS
from raptr.evaluation.fewshot.suite import TASKS as FEWSHOT_TASKS
from raptr.evaluation.tasks import TASKS
from raptr.extras import EVAL, require
from raptr.failures import importing, work_in

if TYPE_CHECKING:
    from raptr.evaluation.jobs import Judged


def finetune(
    model: Annotated[Path, typer.Argument(help="A run, an export, or any encoder's folder of Hugging Face.")],
    task: Annotated[str, typer.Option(help=f"One of: {', '.join(TASKS)}.")],
    data: Annotated[Path, typer.Option(help="The folder with train and dev files, tsv or jsonl; or GLUE's folder.")],
    out: Annotated[Path | None, typer.Option(help="Where results go. [default: runs/finetune/MODEL-TASK]")] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            metavar="<float>",
            help="A learning rate to try; repeatable. [default: 1e-5, 2e-5, 3e-5, 5e-5; with a width of up to 512 "
            "also 1e-4, 3e-4]",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds at each learning rate.")] = 3,
    tune: Annotated[
        int | None,
        typer.Option(help="Compare rates on this many seeds; the others run at the best rate. [default: all]"),
    ] = None,
    widen: Annotated[
        bool, typer.Option("--widen", help="Halve and double rates until the best lies inside those tried.")
    ] = False,
    epochs: Annotated[int, typer.Option(help="Passes over the training examples.")] = 3,
    batch: Annotated[int, typer.Option(help="Examples per step.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens per example; longer ones are cut.")] = 128,
    dropout: Annotated[float, typer.Option(help="Dropout in fine-tuning, whatever the model was trained with.")] = 0.1,
    examples: Annotated[int | None, typer.Option(help="Train on this many examples. [default: all]")] = None,
    leading_space: Annotated[
        bool, typer.Option("--leading-space", help="Put a space before each text, for byte-level tokenizers.")
    ] = False,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="The column of a text; given twice for two. [default: looked for]"),
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column of the label. [default: looked for]")] = None,
    dev: Annotated[str | None, typer.Option(help="The dev file, such as dev_mismatched. [default: looked for]")] = None,
    jobs: Annotated[
        int, typer.Option(help="Fine-tunings at once, as one joined model: for models too small to fill a GPU.")
    ] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Fine-tune an encoder on a task at several learning rates and seeds, and score it on the dev set.

    Writes finetune.json and finetune.png. After a stop or a kill, the same command continues with the missing jobs.
    """
    with importing():
        from raptr.evaluation.finetuning import Request
        from raptr.evaluation.run import finetune_all
        from raptr.evaluation.summary import rich_table
        from raptr.evaluation.tuning import Recipe
    console = Console(stderr=True)
    recipe = Recipe(
        epochs=epochs, batch=batch, dropout=dropout, length=length, examples=examples, leading_space=leading_space
    )
    request = Request(
        model,
        task,
        data,
        out,
        recipe=recipe,
        rates=rate or (),
        seeds=seeds,
        tune=tune,
        widen=widen,
        texts=text or (),
        label=label,
        dev=dev,
    )
    with work_in(out or Path("runs/finetune")):
        (done,) = finetune_all([request], device=device, jobs=jobs, console=console)
    if done.record is not None:
        Console().print(rich_table(done.record))
    _leave(console, done, "finetune")


def fewshot(
    models: Annotated[
        list[Path],
        typer.Argument(help="Runs, exports, or decoders' folders of Hugging Face; the first is the reference."),
    ],
    data: Annotated[Path, typer.Option(help="The folder with the tasks' files, jsonl, plain or compressed.")],
    tasks: Annotated[
        str, typer.Option(help=f"Tasks or groups, with commas: {', '.join((*GROUPS, *FEWSHOT_TASKS))}.")
    ] = "paper",
    shots: Annotated[str, typer.Option(help="Numbers of exemplars before each example, with commas.")] = "1,5",
    examples: Annotated[int | None, typer.Option(help="Score this many examples of each task. [default: all]")] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="causal or prefix; repeatable. [default: causal, with UL2 models both]"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where results go. [default: runs/fewshot/MODELS]")] = None,
    batch: Annotated[int, typer.Option(help="Prompts at once.")] = 16,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Score decoders on few-shot tasks from local files, through lm-eval; also bits per byte of the gold answers.

    Several models are compared, paired by example. Writes fewshot.json and fewshot.png. After a stop or a kill, the
    same command continues with the missing jobs.
    """
    require("raptr fewshot", "eval", EVAL)
    try:
        counts = [int(count) for count in shots.split(",")]
    except ValueError:
        raise ValueError(f"--shots is {shots!r}; whole numbers with commas between them are allowed, as 1,5") from None
    with importing():
        from raptr.evaluation.fewshot.run import fewshot as run_fewshot
        from raptr.evaluation.fewshot.summary import rich_tables
    console = Console(stderr=True)
    with work_in(out or Path("runs/fewshot")):
        done = run_fewshot(
            models,
            [name.strip() for name in tasks.split(",")],
            data,
            out,
            shots=counts,
            examples=examples,
            attention=attention or (),
            batch=batch,
            device=device,
            console=console,
        )
    if done.record is not None:
        Console().print(rich_tables(done.record))
    _leave(console, done, "fewshot")


def _leave(console: Console, done: "Judged", name: str) -> None:
    """Print where the files are; exit with code 3 after a stop."""
    for kind in ("json", "png") if done.record is not None else ():
        console.print(f"{kind:<8}{done.folder / f'{name}.{kind}'}", highlight=False, markup=False, soft_wrap=True)
    if done.stopped:
        console.print(f"stopped with {done.finished} of {done.planned} jobs finished; the same command continues")
        raise typer.Exit(3)
