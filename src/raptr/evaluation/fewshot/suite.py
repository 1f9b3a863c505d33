"""The few-shot tasks by name, and which data files they read. No torch and no lm-eval.

A task is a file for lm-eval in `tasks/`. `lm-eval --include_path` accepts the same files, with the data folder as
`--metadata`. Tables show the first metric of a task.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from raptr.evaluation.reading import file_named
from raptr.settings import nearest

FOLDER = Path(__file__).parent / "tasks"
SUPERGLUE = ("boolq", "cb", "copa", "rte", "wic", "wsc", "multirc", "record")
# The paper's twelve tasks in its order; SuperGLUE counts as one of them, the mean of its eight tasks.
PAPER = (
    *("triviaqa", "webqs", "nq_open", "tydiqa", "squadv2", "drop", "coqa", "quac", "lambada", "storycloze"),
    *("hellaswag", *SUPERGLUE),
)
GROUPS = {"paper": PAPER, "superglue": SUPERGLUE}
TASKS = (*PAPER, "lambada_cloze")


class _Plain(yaml.SafeLoader):
    """A YAML loader that reads `!function a.b` as text."""


_Plain.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))  # type: ignore[arg-type]


@cache
def task_file(name: str) -> Mapping[str, Any]:
    """Return the content of a task's file, with functions as their names."""
    settings = yaml.load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), Loader=_Plain)
    assert isinstance(settings, dict)
    return settings


def sources(name: str, folder: Path) -> tuple[Path | None, Path | None]:
    """Return a task's file of examples and its file of exemplars in a folder; None for a missing one."""
    kwargs = task_file(name)["dataset_kwargs"]
    return file_named(folder, kwargs["files"]), file_named(folder, kwargs.get("exemplars", ()))


def check(shots: Sequence[int], examples: int | None, batch: int = 1) -> None:
    """Refuse numbers that are too small for an evaluation."""
    for count in shots:
        if count < 0:
            raise ValueError(f"--shots has {count}; whole numbers from 0 on are allowed")
    for name, value in (("examples", examples), ("batch", batch)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; a whole number from 1 on is allowed")


def find_tasks(names: Sequence[str], folder: Path) -> tuple[list[str], list[str]]:
    """Return the requested tasks, and the tasks of requested groups for which the folder has no data.

    A task that is requested by its own name must have its data.
    """
    if not folder.is_dir():
        raise ValueError(f"--data is {str(folder)!r}, which is not a folder; name the folder with the tasks' files")
    available: list[str] = []
    absent: list[str] = []
    for name in names:
        if name not in (known := (*GROUPS, *TASKS)):
            raise ValueError(f"--tasks has {name!r}; {nearest(name, known)}allowed: {', '.join(known)}")
        for member in GROUPS.get(name, (name,)):
            if sources(member, folder)[0] is not None:
                available.append(member)
            elif member == name:
                raise ValueError(_missing(member, folder))
            else:
                absent.append(member)
    if not available:
        raise ValueError(_missing(absent[0], folder))
    return list(dict.fromkeys(available)), list(dict.fromkeys(absent))


def _missing(name: str, folder: Path) -> str:
    files = task_file(name)["dataset_kwargs"]["files"]
    return (
        f"{folder} has no data for the task {name}; {' or '.join(f'{stem}.jsonl' for stem in files)} is expected, "
        "plain or compressed"
    )
