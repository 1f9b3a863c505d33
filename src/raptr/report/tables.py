"""One row per run, with its results and its costs: as a rich table, as Markdown and as JSON-ready dicts.

Costs are also given relative to one run, the same for the whole table: full training if all runs took equally many
steps, otherwise the run that cost most, because a ratio to full training of another length mixes two effects.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from raptr.report.columns import Column, escaped, fixed, markdown_table
from raptr.report.runs import Run, labels, malformed
from raptr.report.units import FLOP_PREFIXES, duration, plain, short

FINAL_SHARE = 0.05
SIDE_BY_SIDE = 4  # at most this many runs fit side by side in 80 characters
MAIN = ("run", "steps", "held-out loss", "FLOPs, relative", "time", "tokens/s")


@dataclass(frozen=True)
class Row:
    """A run's results and costs; None if its records do not have them."""

    name: str
    method: str
    schedule: str | None
    data: str | None
    steps: int
    planned: int | None
    train_loss: float | None
    eval_loss: float | None
    eval_loss_mixture: float | None
    eval_perplexity: float | None
    eval_bits_per_byte: float | None
    eval_domains: Mapping[str, float]
    eval_denoisers: Mapping[str, float]
    eval_sizes: Mapping[int, float]
    tokens: int
    flops: float
    flops_layers: float
    relative_flops: float | None
    relative_flops_layers: float | None
    relative_to: str
    seconds: float
    tokens_per_second: float | None
    ignored: int
    ignored_lines: str


_RESULTS: tuple[Column[Row], ...] = (
    Column("run", lambda row: row.name, text=True),
    Column("method", lambda row: row.method, text=True),
    Column("schedule", lambda row: row.schedule or "–", text=True),
    Column("steps", lambda row: f"{row.steps:,}"),
    Column("train loss", lambda row: fixed(row.train_loss, 3)),
    Column("held-out loss", lambda row: fixed(row.eval_loss, 3)),
)
_COSTS: tuple[Column[Row], ...] = (
    Column("tokens", lambda row: short(row.tokens)),
    Column("FLOPs", lambda row: short(row.flops, FLOP_PREFIXES)),
    Column("FLOPs, relative", lambda row: fixed(row.relative_flops, 2)),
    Column("layers only, relative", lambda row: fixed(row.relative_flops_layers, 2)),
    Column("time", lambda row: duration(row.seconds)),
    Column("tokens/s", lambda row: "–" if row.tokens_per_second is None else short(row.tokens_per_second)),
)


def summary(runs: Sequence[Run]) -> list[Row]:
    """Return one row per run, in the same order."""
    if not runs:
        return []
    names = labels(runs)
    base = _base(runs)
    reference = runs[base].last
    rows = []
    for name, run in zip(names, runs, strict=True):
        last = run.last
        final = run.train[-math.ceil(FINAL_SHARE * len(run.train)) :] if run.train else ()
        rows.append(
            Row(
                name=name,
                method=run.method,
                schedule=run.schedule,
                data=run.data,
                steps=last.step,
                planned=run.planned,
                train_loss=sum(record.loss for record in final) / len(final) if final else None,
                eval_loss=run.evals[-1].loss if run.evals else None,
                eval_loss_mixture=run.evals[-1].loss_mixture if run.evals else None,
                eval_perplexity=run.evals[-1].perplexity if run.evals else None,
                eval_bits_per_byte=run.evals[-1].bits_per_byte if run.evals else None,
                eval_domains=run.evals[-1].domains if run.evals else {},
                eval_denoisers=run.evals[-1].denoisers if run.evals else {},
                eval_sizes=run.evals[-1].sizes if run.evals else {},
                tokens=last.tokens,
                flops=last.flops,
                flops_layers=last.flops_layers,
                relative_flops=_ratio(last.flops, reference.flops),
                relative_flops_layers=_ratio(last.flops_layers, reference.flops_layers),
                relative_to=names[base],
                seconds=last.seconds,
                tokens_per_second=_ratio(last.tokens, last.seconds),
                ignored=len(run.ignored),
                ignored_lines=malformed(run.ignored),
            )
        )
    return rows


def rich_table(rows: Sequence[Row]) -> Table:
    """Return a table for the terminal: a column per run or, for many runs, a line per run with the main numbers."""
    table = Table(box=box.SIMPLE_HEAD, caption=Text(" ".join(notes(rows))), caption_justify="left")
    if len(rows) > SIDE_BY_SIDE:
        shown = [column for column in table_columns(rows) if column.heading in MAIN]
        for column in shown:
            table.add_column(column.heading, justify="left" if column.text else "right", overflow="fold")
        for row in rows:
            table.add_row(*(Text(column.cell(row)) for column in shown))
        table.caption = Text(" ".join([*notes(rows), "The page and table.md have all columns."]))
        return table
    # Text, not str, so that a name such as `raptr[6-8]` is not read as markup.
    name, *others = table_columns(rows)
    table.add_column(name.heading, no_wrap=True)
    for row in rows:
        table.add_column(Text(name.cell(row)), justify="right", overflow="fold")
    for column in others:
        table.add_row(column.heading, *(Text(column.cell(row)) for row in rows))
    return table


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, with its notes below."""
    table = markdown_table(table_columns(rows), rows)
    return "\n".join([table, *(f"{escaped(note)}\n" for note in notes(rows))])


def dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as JSON-ready dicts."""
    return [plain(asdict(row)) for row in rows]


def table_columns(rows: Sequence[Row]) -> list[Column[Row]]:
    """Return the columns: results (also by domain, denoiser and size, if recorded), then costs."""
    domains = dict.fromkeys(domain for row in rows for domain in row.eval_domains)
    denoisers = dict.fromkeys(denoiser for row in rows for denoiser in row.eval_denoisers)
    sizes = dict.fromkeys(size for row in rows for size in row.eval_sizes)
    judged: list[Column[Row]] = []
    if any(row.eval_loss_mixture is not None for row in rows):
        judged.append(Column("  by mixture weight", lambda row: fixed(row.eval_loss_mixture, 3)))
    if any(row.eval_perplexity is not None for row in rows):
        judged.append(Column("  perplexity", lambda row: fixed(row.eval_perplexity, 2)))
    if any(row.eval_bits_per_byte is not None for row in rows):
        judged.append(Column("  bits per byte", lambda row: fixed(row.eval_bits_per_byte, 3)))
    judged += [Column(f"  on {d}", lambda row, d=d: fixed(row.eval_domains.get(d), 3)) for d in domains]  # type: ignore[misc]
    judged += [Column(f"  of {d}", lambda row, d=d: fixed(row.eval_denoisers.get(d), 3)) for d in denoisers]  # type: ignore[misc]
    judged += [Column(f"  {s} layers", lambda row, s=s: fixed(row.eval_sizes.get(s), 3)) for s in sizes]  # type: ignore[misc]
    costs = _COSTS if len(rows) > 1 else [column for column in _COSTS if "relative" not in column.heading]
    return [*_RESULTS, *judged, *costs]


def _base(runs: Sequence[Run]) -> int:
    """Return the index of the run that costs are relative to."""
    full = next((index for index, run in enumerate(runs) if run.method == "full"), None)
    if full is not None and all(run.last.step == runs[full].last.step for run in runs):
        return full
    return max(range(len(runs)), key=lambda index: runs[index].last.flops)


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what a reader must know about the table, as sentences."""
    sentences = []
    if len(rows) > 1:
        sentences.append(f"Costs are relative to {rows[0].relative_to}.")
    if len({row.data for row in rows if row.data is not None}) > 1:
        sentences.append("The runs have different data, so their losses do not compare.")
    if any(row.eval_loss_mixture is not None for row in rows):
        sentences.append("The held-out loss counts all windows alike; by mixture weight it counts domains by weight.")
    sentences += [
        f"{row.name} is not finished: its last record is of step {row.steps:,} of {row.planned:,}."
        for row in rows
        if row.planned is not None and row.steps < row.planned
    ]
    sentences += [
        f"Malformed lines ignored in {row.name}: {row.ignored} (metrics.jsonl, {row.ignored_lines})."
        for row in rows
        if row.ignored
    ]
    return sentences


def _ratio(value: float, base: float) -> float | None:
    return value / base if base > 0 else None
