"""What a preparation shows on the terminal: a progress bar while it runs, a table when it is done."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from raptr.data.prepare.encoding import Progress
from raptr.data.prepare.preparation import Report
from raptr.data.prepare.workfolder import work_folder
from raptr.data.store import SPLITS, TokenStore

NAMES = {"reading": "checking the text", "training": "training the tokenizer", "encoding": "writing tokens"}
DOCUMENTS_HELP = "What of a text file is one document. [default: the file; where it is the only one: a paragraph]"
SHORTEST = 8  # the fewest tokens of a sequence


@contextmanager
def preparation_bar(console: Console, out: Path) -> Iterator[Report]:
    """Yield a callback for `prepare_corpus` that shows a progress bar over the bytes of each stage.

    On Ctrl-C, print that the same command continues and exit with code 3; if nothing was saved, pass the interrupt on.
    """
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TextColumn("{task.fields[counts]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}

    bars = Bars(*columns, console=console)

    def show(progress: Progress) -> None:
        if not tasks:
            bars.start()
        if progress.stage not in tasks:
            tasks[progress.stage] = bars.add_task(NAMES[progress.stage], total=progress.total, counts="")
        counts = f"{progress.documents:,} documents"
        if progress.tokens:
            counts = f"{progress.tokens / 1e6:.1f}M tokens, {progress.rate / 1e6:.2f}M/s"
        bars.update(tasks[progress.stage], completed=progress.read, total=progress.total, counts=counts)

    try:
        try:
            yield show
        finally:
            if tasks:  # otherwise it would print an empty line
                bars.stop()
    except KeyboardInterrupt:
        if not work_folder(out).exists():
            raise
        console.print("stopped; the same command continues")
        raise SystemExit(3) from None


def preparation_table(store: TokenStore) -> Table:
    """Make a table of the domains: weight, documents and tokens of both splits, and what was left out, if anything."""
    columns: dict[str, list[str]] = {"weight": [f"{domain.weight:.4g}" for domain in store.domains]}
    for split, kept in zip(SPLITS, ("", "held-out "), strict=True):
        columns[f"{kept}docs"] = [f"{domain.count(split):,}" for domain in store.domains]
        columns[f"{kept}tokens"] = [f"{domain.total(split):,}" for domain in store.domains]
    left_out = {
        "copies dropped": [domain.duplicates for domain in store.domains],
        "broken": [domain.broken for domain in store.domains],
    }
    columns |= {heading: [f"{count:,}" for count in counts] for heading, counts in left_out.items() if any(counts)}
    table = Table(title=Text(f"{store.path}: vocabulary of {store.vocabulary.size:,}"))
    table.add_column("domain", overflow="fold")
    for heading in columns:
        table.add_column(heading, justify="right", overflow="fold")  # a narrow terminal must not cut numbers
    for domain, *cells in zip([domain.name for domain in store.domains], *columns.values(), strict=True):
        table.add_row(Text(domain), *cells)
    return table


def next_command(store: TokenStore, recipe: str, length: int, window: int) -> str:
    """Return the command that trains on the prepared data in a new run, with advice if it has too little text.

    `length` is the sequence length of the recipe, `window` the number of raw tokens that such a sequence is made of.
    """
    command = ["raptr", "pretrain", recipe, "--data", str(store.path), "--run", f"runs/{store.path.resolve().name}"]
    tokens = store.longest_window()
    longest = tokens - (window - length)
    if longest >= length:
        return f"next    {shlex.join(command)}"
    few = f"A domain has only {tokens} tokens in a row to train on or to hold out; more text or --held-out can help."
    return few if longest < SHORTEST else f"{few}\nnext    {shlex.join([*command, '--length', str(longest)])}"
