"""What a person sees of a preparation: a bar while it runs, a table when it is done."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from raptr.data.encoding import Progress
from raptr.data.preparation import Report
from raptr.data.store import SPLITS, TokenStore

NAMES = {"reading": "checking the text", "training": "training the tokenizer", "encoding": "writing tokens"}


@contextmanager
def preparation_bar(console: Console) -> Iterator[Report]:
    """A bar over the bytes of each stage, as a callback for `prepare_corpus`."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TextColumn("{task.fields[counts]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console) as bars:
        tasks = {}

        def show(progress: Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task(NAMES[progress.stage], total=progress.total, counts="")
            counts = f"{progress.documents:,} documents"
            if progress.tokens:
                counts = f"{progress.tokens / 1e6:.1f}M tokens, {progress.rate / 1e6:.2f}M/s"
            bars.update(tasks[progress.stage], completed=progress.read, total=progress.total, counts=counts)

        yield show


def preparation_table(store: TokenStore) -> Table:
    """Domain by domain: weight, documents and tokens on both sides, and what was left out."""
    table = Table(title=f"{store.path}: vocabulary of {store.vocabulary.size:,}")
    for heading in (
        "domain",
        "weight",
        "docs",
        "tokens",
        "held-out docs",
        "held-out tokens",
        "copies dropped",
        "broken",
    ):
        table.add_column(heading, justify="left" if heading == "domain" else "right")
    for part in store.summary():
        counts = [f"{number:,}" for split in SPLITS for number in (part.count(split), part.total(split))]
        table.add_row(part.name, f"{part.weight:.4g}", *counts, f"{part.duplicates:,}", f"{part.broken:,}")
    return table
