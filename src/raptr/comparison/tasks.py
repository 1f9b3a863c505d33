"""A comparison judged by tasks: the section `evaluate` of its file.

    evaluate:
      finetune: {data: glue, tasks: [mnli, qnli, sst2], seeds: 3}       encoders; rates and the recipe's keys too
      fewshot: {data: fewshot, tasks: [paper], shots: [1], examples: 200}      decoders

The model of every run is kept as an export in its folder. When all runs are finished, each entry is judged at its best
learning rate, with every seed; what was judged before is not judged again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from raptr.extras import EVAL, require
from raptr.report.runs import EVALUATION, read_scores
from raptr.settings import nearest, read
from raptr.train.config import Config
from raptr.train.run import RunFolder
from raptr.train.safety import StopRequest

ENCODERS = "mlm"  # the objective of models that are fine-tuned; others go on with a text


@dataclass(frozen=True)
class Finetune:
    """The section `finetune`; what stands beside these keys are the recipe's."""

    data: str
    tasks: tuple[str, ...] = ("mnli", "qnli", "sst2")
    rates: tuple[float, ...] = ()
    seeds: int = 3
    tune: int | None = None


@dataclass(frozen=True)
class Fewshot:
    """The section `fewshot`; attention is that of training unless it is given."""

    data: str
    tasks: tuple[str, ...] = ("paper",)
    shots: tuple[int, ...] = (1,)
    examples: int | None = None
    attention: Literal["causal", "prefix"] | None = None


@dataclass(frozen=True)
class Evaluate:
    """What a comparison asks of its models; nothing where neither is given."""

    finetune: Finetune | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    fewshot: Fewshot | None = None

    def __bool__(self) -> bool:
        return self.finetune is not None or self.fewshot is not None


def read_evaluate(given: Mapping[str, Any], config: Config) -> Evaluate:
    """Check the section before anything is trained: its keys, the data, the extra, and the kind of model."""
    for key in given:
        if key not in ("finetune", "fewshot"):
            raise ValueError(f"evaluate.{key} is no evaluation; {nearest(key, ('finetune', 'fewshot'))}")
    if not given:
        return Evaluate()
    encoders = config.objective.name == ENCODERS
    for key, fits in (("finetune", encoders), ("fewshot", not encoders)):
        if key in given and not fits:
            other = "evaluate.fewshot" if key == "finetune" else "evaluate.finetune"
            raise ValueError(
                f"evaluate.{key} is given, but objective.name is {config.objective.name!r}, whose models it does not "
                f"judge. Use {other}."
            )
    if "fewshot" in given:
        return Evaluate(fewshot=_read_fewshot(given["fewshot"], config))
    finetune, recipe = _read_finetune(given["finetune"])
    return Evaluate(finetune=finetune, recipe=recipe)


def _read_finetune(given: Any) -> tuple[Finetune, dict[str, Any]]:
    from raptr.evaluation.reading import read_task
    from raptr.evaluation.tasks import find_task
    from raptr.evaluation.tuning import Recipe  # imports transformers, which is slow

    own = {entry.name for entry in fields(Finetune)}
    mapping = given if isinstance(given, Mapping) else {}
    recipe = {key: value for key, value in mapping.items() if key in {entry.name for entry in fields(Recipe)} - own}
    rest = {key: value for key, value in mapping.items() if key not in recipe}
    asked = read(Finetune, rest if isinstance(given, Mapping) else given, "evaluate.finetune.")
    read(Recipe, recipe, "evaluate.finetune.")
    for name in asked.tasks:
        read_task(find_task(name), Path(asked.data))
    return asked, recipe


def _read_fewshot(given: Any, config: Config) -> Fewshot:
    from raptr.evaluation.fewshot.suite import find_tasks

    require("evaluate.fewshot", "eval", EVAL)
    asked = read(Fewshot, given, "evaluate.fewshot.")
    if asked.attention == "prefix" and config.objective.name != "ul2":
        raise ValueError(
            f"evaluate.fewshot.attention is prefix, but objective.name is {config.objective.name!r}. Use causal."
        )
    find_tasks(asked.tasks, Path(asked.data))
    return asked


def judge(
    asked: Evaluate, run: Path, config: Config, *, jobs: int, stop: StopRequest, console: Console
) -> dict[str, dict[str, Any]] | None:
    """The scores of a run's model by column, in the order asked for; None where it was asked to stop."""
    before, device = run / EVALUATION, config.train.device
    if asked.finetune is not None:
        from raptr.evaluation.run import finetune
        from raptr.evaluation.tasks import find_task
        from raptr.evaluation.tuning import Recipe

        ask, titles = asked.finetune, []
        for name in ask.tasks:
            task = find_task(name)
            done = finetune(
                run,
                name,
                Path(ask.data),
                before / f"finetune-{task.name}",
                recipe=Recipe(**asked.recipe),
                rates=ask.rates,
                seeds=ask.seeds,
                tune=ask.tune,
                device=device,
                jobs=jobs,
                console=console,
                stop=stop,
            )
            if done.stopped:
                return None
            titles.append(task.title)
        return _chosen(run, titles)
    assert asked.fewshot is not None
    from raptr.evaluation.fewshot.run import fewshot

    ask_shots = asked.fewshot
    attention = ask_shots.attention or ("prefix" if config.objective.name == "ul2" else "causal")
    judged = fewshot(
        [run],
        ask_shots.tasks,
        Path(ask_shots.data),
        before / "fewshot",
        shots=ask_shots.shots,
        examples=ask_shots.examples,
        attention=[attention],
        device=device,
        console=console,
        stop=stop,
    )
    if judged.stopped or judged.record is None:
        return None
    from raptr.evaluation.fewshot.summary import columns

    return _chosen(run, list(columns(judged.record, next(iter(judged.record["models"])))))


def _chosen(run: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    noted = read_scores(run)
    return {name: noted[name] for name in names if name in noted}


def has_model(run: Path) -> bool:
    """Whether the model of a finished run is still there, as an export or in a checkpoint."""
    return (run / "export" / "config.json").is_file() or any(RunFolder(run).checkpoints.glob("step-*"))
