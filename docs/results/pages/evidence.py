"""The page of the queue: each comparison's question, its command, and its table or that it was not run yet."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from docs.results.pages.contract import Page, Records, table
from evidence.queue import LEAST, QUEUE, Item, read_queue
from raptr.comparison.outcomes import FULL, REDUCED
from raptr.comparison.record import read_rows
from raptr.comparison.results import about_scores, judged, tasks_picture
from raptr.comparison.table import Row, denoisers_markdown, finals, markdown, notes, tasks_markdown
from raptr.report.statistics import Mean, mean, shown

ITEMS = read_queue(Path(__file__).parents[3] / QUEUE)


def sections(records: Records) -> str:
    """Return a section for each comparison, in the order of the queue."""
    return "\n\n".join(_section(item, records[item.name]) for item in ITEMS)


def _section(item: Item, record: Mapping[str, Any] | None) -> str:
    command = f"raptr compare {item.file} --record {item.record} --jobs {item.jobs}"
    head = [f"### {item.name}", f"**{item.question}** {item.means}", f"```\n{command}\n```"]
    return "\n\n".join([*head, *(["**Not run yet.**"] if record is None else _found(item.name, record))])


def _found(name: str, record: Mapping[str, Any]) -> list[str]:
    """Describe a comparison's results: its progress, what was trained and where, and each entry at its best rate."""
    rows = read_rows(record)
    best = finals(rows)
    finished, planned = record["finished"], record["planned"]
    sentences = [f"{finished} runs." if finished == planned else f"**Partial: {finished} of {planned} runs.**"]
    if max(row.loss.n if row.loss else 0 for row in best) < 2:
        sentences.append("**One seed: preliminary.**")
    full = next((run for run in record["runs"] if run["label"] == FULL), None)
    if full is not None:
        sentences.append(
            f"{full['layers']} layers of width {full['width']}; full training sees {full['tokens'] / 1e6:,.0f} million "
            f"tokens, {full['tokens_per_weight']:.3g} per weight of the layers, {full['epochs']:.2g} times the text."
        )
    sentences.append(f"{record['budget']} {'; '.join(dict.fromkeys(map(_where, record['environments'])))}.")
    rates = Counter(row.label for row in rows)
    if record["comparison"].get("widen") and finished < planned and min(rates[row.label] for row in best) < LEAST:
        sentences.append("**The search for learning rates has not ended**: entries do not compare yet.")
    denoisers = (
        ["Held-out loss by denoiser:", denoisers_markdown(best).rstrip()] if any(row.denoisers for row in best) else []
    )
    return [" ".join(sentences), markdown(best).rstrip(), *notes(best), *denoisers, *_judged(name, record, best)]


def _judged(name: str, record: Mapping[str, Any], best: Sequence[Row]) -> list[str]:
    """Describe the scores on tasks, for comparisons that judge models by tasks."""
    scored, missing = judged(record), [row.label for row in best if not row.scores]
    if not scored:
        return []
    seeds = sorted({score.n for row in scored for score in row.scores.values()})
    models = f"{' or '.join(map(str, seeds))} {'seed' if seeds == [1] else 'seeds'}"
    sentences = [f"Judged by tasks as the comparison's file says, with models of {models} each."]
    sentences += [f"**Partial: not judged yet are {'; '.join(missing)}.**"] if missing else []
    picture = f"![scores on tasks, and their average against the held-out loss]({_figure(name)})"
    return [" ".join([*sentences, about_scores(record)]), tasks_markdown(best).rstrip(), picture]


def _figure(name: str) -> str:
    return f"evidence/{name}-tasks.png"


def _draw(name: str, records: Records) -> Figure | None:
    record = records[name]
    return tasks_picture(record) if record is not None and judged(record) else None


def _where(environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "commit") if environment[name])
    return f"{environment['gpu'] or environment['processor']}, {versions}"


def control(records: Records) -> str:
    """Tabulate runs repeated on an independent code path: a comparison's entries, and their differences to
    `full (reduced)`, or to `full` if only that was repeated.
    """
    runs = records[CONTROL]
    if runs is None:
        return "**Not run yet.**"
    rows = []
    for comparison in dict.fromkeys(run["comparison"] for run in runs):
        of_entry: dict[str, dict[int, Any]] = {}
        for run in runs:
            if run["comparison"] == comparison:
                of_entry.setdefault(run["entry"], {})[run["seed"]] = run
        for entry, by_seed in of_entry.items():
            rows.append(
                [comparison, entry, *(shown(_mean(by_seed.values(), key), 4) for key in PATHS), _count(by_seed)]
            )
        base = next((label for label in (REDUCED, FULL) if label in of_entry), None)
        for entry, by_seed in of_entry.items():
            of_base = {} if base is None else of_entry[base]
            pairs = {seed: (run, of_base[seed]) for seed, run in by_seed.items() if seed in of_base}
            if entry != base and pairs:
                differences = [shown(_difference(pairs.values(), key), 4, sign="+") for key in PATHS]
                rows.append([comparison, f"**{entry} minus {base}**", *differences, _count(pairs)])
    return table(["comparison", "entry", "independent path", "record", "seeds"], rows)


PATHS = ("loss", "record")  # of a run: by the independent path, and in the comparison's record


def _mean(runs: Iterable[Mapping[str, Any]], key: str) -> Mean | None:
    values = [run[key] for run in runs]
    return None if None in values else mean(values)


def _difference(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], key: str) -> Mean | None:
    values = [(one[key], other[key]) for one, other in pairs]
    return None if any(None in pair for pair in values) else mean(one - other for one, other in values)


def _count(by_seed: Mapping[int, Any]) -> str:
    return "one, preliminary" if len(by_seed) == 1 else str(len(by_seed))


CONTROL = "control"
PAGE = Page(
    "results/evidence",
    {item.name: str(item.record) for item in ITEMS} | {CONTROL: "docs/results/evidence/control.json"},
    {"queue": sections, "control": control},
    {_figure(item.name): partial(_draw, item.name) for item in ITEMS},
)
