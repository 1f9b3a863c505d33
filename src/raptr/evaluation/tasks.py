"""Tasks by name: the columns of their texts, the number of labels, and the metrics. No torch.

GLUE (Wang et al., 2018) is distributed in several forms with different names of columns; each task lists those that it
accepts. `classification` is any task on one or two texts, in files with columns for the texts and for the label.
"""

from dataclasses import dataclass
from typing import final

from raptr.settings import nearest

SENTENCES = ("sentence1", "sentence2")
LABELS = ("label", "gold_label", "score")  # names of the label's column; the first one that a file has is taken


@final
@dataclass(frozen=True)
class Task:
    """A task. `texts` lists choices of columns for its one or two texts; the first choice that a file has is taken."""

    name: str
    texts: tuple[tuple[str, ...], ...]
    labels: int | None  # how many there must be; None: any number from two on
    metrics: tuple[str, ...] = ("accuracy",)  # the first chooses the learning rate
    folder: str = ""  # its name in GLUE's download
    regression: bool = False
    unnamed: tuple[str, ...] = ()  # the columns of a tsv file without a header

    @property
    def title(self) -> str:
        return self.folder or self.name


_TASKS = (
    Task("mnli", (("premise", "hypothesis"), SENTENCES), 3, folder="MNLI"),
    Task("qnli", (("question", "sentence"), SENTENCES), 2, folder="QNLI"),
    Task("sst2", (("sentence",),), 2, folder="SST-2"),
    Task("rte", (("premise", "hypothesis"), SENTENCES), 2, folder="RTE"),
    Task(
        "cola",
        (("sentence",),),
        2,
        metrics=("matthews", "accuracy"),
        folder="CoLA",
        unnamed=("source", "label", "mark", "sentence"),
    ),
    Task(
        "stsb", (SENTENCES,), None, metrics=("pearson-spearman", "pearson", "spearman"), folder="STS-B", regression=True
    ),
    Task(
        "classification",
        (
            ("premise", "hypothesis"),
            ("question", "sentence"),
            SENTENCES,
            ("text1", "text2"),
            ("text_a", "text_b"),
            ("sentence",),
            ("text",),
        ),
        None,
    ),
)
TASKS = {task.name: task for task in _TASKS}


def find_task(name: str) -> Task:
    """Return the task with this name; capitals, hyphens and underscores do not matter, so SST-2 is sst2."""
    task = TASKS.get(name.lower().replace("-", "").replace("_", ""))
    if task is None:
        raise ValueError(f"--task is {name!r}; {nearest(name, TASKS)}allowed: {', '.join(TASKS)}")
    return task
