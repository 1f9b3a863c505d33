"""Scores on tasks in a comparison: the section `evaluate` of its YAML file.

    evaluate:
      finetune: {data: glue, tasks: [mnli, qnli, sst2], seeds: 3}       encoders; more keys: `Finetune`
      fewshot: {data: fewshot, tasks: [paper], shots: [1], examples: 200}      decoders

The model of every run is kept as an export in its folder. Each entry is scored at its best learning rate, seed by seed
(progress.py). Finished evaluations are not repeated.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rich.console import Console

from raptr.extras import EVAL, require
from raptr.report.runs import EVALUATION, read_scores
from raptr.settings import nearest, read
from raptr.train.config import Config
from raptr.train.run import RunFolder
from raptr.train.safety import StopRequest

if TYPE_CHECKING:
    from raptr.evaluation.finetuning import Request
    from raptr.evaluation.jobs import Judged

Scores: TypeAlias = dict[str, dict[str, Any]]  # of one model, by column
KINDS = ("finetune", "fewshot")
ENCODERS = "mlm"  # the objective of models that are fine-tuned; all others are decoders


@dataclass(frozen=True)
class Finetune:
    """The section `finetune`. Any further keys in it belong to the recipe (`Recipe`)."""

    data: str
    tasks: tuple[str, ...] = ("mnli", "qnli", "sst2")
    rates: tuple[float, ...] = ()
    seeds: int = 3
    tune: int | None = None
    widen: bool = False
    text: tuple[str, ...] = ()  # text, label, dev: columns and the dev file; looked for if not given
    label: str | None = None
    dev: str | None = None

    def request(self, model: Path, task: str, out: Path, recipe: Mapping[str, Any]) -> "Request":
        """Return the request to fine-tune one model on one task."""
        from raptr.evaluation.finetuning import Request
        from raptr.evaluation.tuning import Recipe  # imports transformers, which is slow

        return Request(
            model,
            task,
            Path(self.data),
            out,
            recipe=Recipe(**recipe),
            rates=self.rates,
            seeds=self.seeds,
            tune=self.tune,
            widen=self.widen,
            texts=self.text,
            label=self.label,
            dev=self.dev,
        )


@dataclass(frozen=True)
class Fewshot:
    """The section `fewshot`; attention is as in training unless it is set."""

    data: str
    tasks: tuple[str, ...] = ("paper",)
    shots: tuple[int, ...] = (1,)
    examples: int | None = None
    attention: Literal["causal", "prefix"] | None = None


@dataclass(frozen=True)
class Evaluate:
    """The evaluations that a comparison asks for; false if it asks for none."""

    finetune: Finetune | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    fewshot: Fewshot | None = None

    def __bool__(self) -> bool:
        return self.finetune is not None or self.fewshot is not None


def read_evaluate(given: Mapping[str, Any], config: Config) -> Evaluate:
    """Read the section, and check its keys, its data, the extra and the models before anything is trained."""
    for key in given:
        if key not in KINDS:
            raise ValueError(f"Unknown section evaluate.{key}; {nearest(key, KINDS)}allowed: {', '.join(KINDS)}")
    if not given:
        return Evaluate()
    kind, other = KINDS if config.objective.name == ENCODERS else reversed(KINDS)
    if other in given:
        raise ValueError(
            f"evaluate.{other} is given, but objective.name is {config.objective.name!r}, whose models it does not "
            f"judge. Use evaluate.{kind}."
        )
    if reason := config.dimensions.unexportable():
        raise ValueError(f"evaluate is given, but the models cannot be evaluated. {reason}")
    if kind == "fewshot":
        return Evaluate(fewshot=_read_fewshot(given["fewshot"], config))
    finetune, recipe = _read_finetune(given["finetune"])
    return Evaluate(finetune=finetune, recipe=recipe)


def _read_finetune(given: Any) -> tuple[Finetune, dict[str, Any]]:
    from raptr.evaluation.tasks import find_task
    from raptr.evaluation.tuning import Recipe  # imports transformers, which is slow

    own = {entry.name for entry in fields(Finetune)}
    mapping = given if isinstance(given, Mapping) else {}
    recipe = {key: value for key, value in mapping.items() if key in {entry.name for entry in fields(Recipe)} - own}
    rest = {key: value for key, value in mapping.items() if key not in recipe}
    asked = read(Finetune, rest if isinstance(given, Mapping) else given, "evaluate.finetune.")
    with _named("evaluate.finetune"):
        read(Recipe, recipe, "evaluate.finetune.")
        tasks = [find_task(name).name for name in asked.tasks]
        _check_list("--tasks", tasks)
        for task in tasks:
            asked.request(Path(), task, Path(), recipe).examples()
    return asked, recipe


def _read_fewshot(given: Any, config: Config) -> Fewshot:
    from raptr.evaluation.fewshot.suite import check, find_tasks

    require("evaluate.fewshot", "eval", EVAL)
    asked = read(Fewshot, given, "evaluate.fewshot.")
    if asked.attention == "prefix" and config.objective.name != "ul2":
        raise ValueError(
            f"evaluate.fewshot.attention is prefix, but objective.name is {config.objective.name!r}. Use causal."
        )
    with _named("evaluate.fewshot"):
        _check_list("--tasks", asked.tasks)
        _check_list("--shots", asked.shots)
        check(asked.shots, asked.examples)
        find_tasks(asked.tasks, Path(asked.data))
    return asked


def _check_list(name: str, listed: Sequence[object]) -> None:
    if not listed or len(set(listed)) < len(listed):
        raise ValueError(f"{name} is {list(listed)}; one or more different ones are allowed")


@contextmanager
def _named(section: str) -> Iterator[None]:
    """Make errors that name a command's option name the setting instead."""
    try:
        yield
    except ValueError as error:
        listed = re.sub("^--(rate|task) is", r"--\1s has", str(error))  # options that name one list element
        raise ValueError(re.sub("^--", f"{section}.", listed)) from None


def judge(
    asked: Evaluate,
    runs: Sequence[Path],
    config: Config,
    *,
    jobs: int,
    stop: StopRequest,
    console: Console,
    on_judged: Callable[[Path, Scores], None],
) -> bool:
    """Score the models of these runs on the tasks; return False if a stop came before all were scored.

    `on_judged` gets each run, with its scores, once it is scored on all tasks. `config` may be that of any of the runs.
    """
    if asked.finetune is not None:
        return _finetune(asked, runs, config, jobs=jobs, stop=stop, console=console, on_judged=on_judged)
    for run in runs:
        scores = _fewshot(asked, run, config, stop=stop, console=console)
        if scores is None:
            return False
        on_judged(run, scores)
    return True


def _finetune(
    asked: Evaluate,
    runs: Sequence[Path],
    config: Config,
    *,
    jobs: int,
    stop: StopRequest,
    console: Console,
    on_judged: Callable[[Path, Scores], None],
) -> bool:
    from raptr.evaluation.run import finetune_all
    from raptr.evaluation.tasks import find_task

    ask = asked.finetune
    assert ask is not None
    tasks = [find_task(name) for name in ask.tasks]
    requests = [
        ask.request(run, task.name, run / EVALUATION / f"finetune-{task.name}", asked.recipe)
        for run in runs
        for task in tasks
    ]
    ended: Counter[Path] = Counter()

    def on_end(request: "Request", _: "Judged") -> None:
        ended[request.model] += 1
        if ended[request.model] == len(tasks):
            on_judged(request.model, _chosen(request.model, [task.title for task in tasks]))

    done = finetune_all(requests, device=config.train.device, jobs=jobs, console=console, stop=stop, on_judged=on_end)
    return not any(judged.stopped for judged in done)


def _fewshot(asked: Evaluate, run: Path, config: Config, *, stop: StopRequest, console: Console) -> Scores | None:
    from raptr.evaluation.fewshot.run import fewshot
    from raptr.evaluation.fewshot.summary import columns

    ask = asked.fewshot
    assert ask is not None
    attention = ask.attention or ("prefix" if config.objective.name == "ul2" else "causal")
    judged = fewshot(
        [run],
        ask.tasks,
        Path(ask.data),
        run / EVALUATION / "fewshot",
        shots=ask.shots,
        examples=ask.examples,
        attention=[attention],
        device=config.train.device,
        console=console,
        stop=stop,
    )
    if judged.stopped or judged.record is None:
        return None
    return _chosen(run, list(columns(judged.record, next(iter(judged.record["models"])))))


def _chosen(run: Path, names: Sequence[str]) -> Scores:
    noted = read_scores(run)
    return {name: noted[name] for name in names if name in noted}


def has_model(run: Path) -> bool:
    """Return whether a finished run still has its model, as an export or in a checkpoint."""
    return (run / "export" / "config.json").is_file() or any(RunFolder(run).checkpoints.glob("step-*"))
