"""The results of a comparison: its page, tables and plots, all drawn from its record (record.py) alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group

from raptr.comparison.plot import draw
from raptr.comparison.progress import NAME
from raptr.comparison.record import read_outcomes, read_rows
from raptr.comparison.table import (
    Row,
    denoisers_markdown,
    finals,
    markdown,
    notes,
    rich_table,
    runs_at,
    tasks_markdown,
    timed,
)
from raptr.files import write_text
from raptr.report.plots import save
from raptr.report.scores import Scored, at_chance, draw_scores

MACHINE = ("processor", "gpu", "threads")


def redraw(record: Mapping[str, Any], out: Path) -> None:
    """Write a comparison's page and plots from its record."""
    save(picture(record), out / f"{NAME}.png")
    tasks = out / f"{NAME}-tasks.png"
    if judged(record):
        save(tasks_picture(record), tasks)
    else:
        tasks.unlink(missing_ok=True)  # left by an earlier command that had a section `evaluate`
    write_text(out / f"{NAME}.md", _page(record, read_rows(record)))


def picture(record: Mapping[str, Any]) -> Any:
    """Return the figure of a comparison's losses."""
    return draw(read_rows(record), read_outcomes(record), record["full_flops"])


def tasks_picture(record: Mapping[str, Any]) -> Any:
    """Return the figure of scores on tasks, and of their average against the held-out loss."""
    table = judged(record)
    models = [
        Scored(row.label, row.loss.mean if row.loss else None, row.scores, _constants(record, row)) for row in table
    ]
    single = _single(table)
    within = [] if len(single) == len(table) else ["pretraining seeds"]
    return draw_scores(models, " or ".join(within + ([_within(record)] if single else [])))


def judged(record: Mapping[str, Any]) -> list[Row]:
    """Return each entry's row at its best learning rate, for the entries that have scores on tasks."""
    return [row for row in finals(read_rows(record)) if row.scores]


def _single(table: Sequence[Row]) -> list[Row]:
    """Return the rows with one scored model; their errors are that model's own."""
    return [row for row in table if all(score.n == 1 for score in row.scores.values())]


def _within(record: Mapping[str, Any]) -> str:
    """Return what a single model's interval is taken over. Only scores from fine-tuning have a learning rate."""
    tuned = any("rate" in cell for run in read_outcomes(record) for cell in run.scores.values())
    return "fine-tuning seeds" if tuned else "examples"


def _models(record: Mapping[str, Any], row: Row) -> list[Mapping[str, Mapping[str, Any]]]:
    """Return the scores of each scored model of a row."""
    return [run.scores for run in runs_at(read_outcomes(record), row.label, row.peak) if run.scores]


def _constants(record: Mapping[str, Any], row: Row) -> dict[str, float]:
    return {name: cell["constant"] for name, cell in _models(record, row)[0].items()}


def shown(record: Mapping[str, Any]) -> Group:
    """Return the final table of a comparison for the terminal."""
    table = read_rows(record)
    scores = [about_scores(record)] if judged(record) else []
    caption = " ".join([record["budget"], *notes(table), *scores])
    return rich_table(finals(table), f"Comparison: {_title(record)}", caption)


def _title(record: Mapping[str, Any]) -> str:
    finished, planned = record["finished"], record["planned"]
    return f"{finished} runs" if finished == planned else f"PARTIAL: {finished} of {planned} runs"


def _page(record: Mapping[str, Any], table: list[Row]) -> str:
    parts = [f"# Comparison: {_title(record)}", record["budget"]]
    times = "times are training alone" if timed(table) else "runs were made several at once, so no times are given"
    parts.append(f"FLOPs are the whole model's, relative to full training over all its steps; {times}.")
    parts += ["## Each entry at its best learning rate", markdown(finals(table)).rstrip(), *notes(table)]
    parts.append(f"![each entry's final loss, and losses at every learning rate]({NAME}.png)")
    if any(row.denoisers for row in table):
        parts += ["## By denoiser", denoisers_markdown(finals(table)).rstrip()]
    if judged(record):
        parts += ["## Judged by tasks", tasks_markdown(finals(table)).rstrip(), about_scores(record)]
        parts.append(f"![scores on tasks, and their average against the held-out loss]({NAME}-tasks.png)")
    if len(table) > len(finals(table)):
        chosen = "The best learning rate of an entry is chosen by these same losses, on the seeds that all rates have."
        parts += ["## Every learning rate", chosen, markdown(table).rstrip()]
    parts += ["## Where", _where(record["environments"])]
    written = yaml.safe_dump(dict(record["comparison"]), sort_keys=False, allow_unicode=True).rstrip()
    parts += ["## What was asked", f"```yaml\n{written}\n```"]
    return "\n\n".join(parts) + "\n"


def about_scores(record: Mapping[str, Any]) -> str:
    """Explain the scores: their errors, what constant answers score, scores at chance, rates at the edge."""
    table = judged(record)
    sentences, low = [_errors(record, table)], []
    listed = ", ".join(f"{name} {100 * value:.1f}" for name, value in _constants(record, table[0]).items())
    sentences.append(f"The best constant answer scores: {listed}.")
    for row in table:
        models = _models(record, row)
        names = [name for name in models[0] if name in row.scores and _at_chance(row, name, models)]
        low += [f"{row.label} on {', '.join(names)}"] if names else []
    if low:
        sentences.append(f"At chance, not above the constant answer by more than the error: {'; '.join(low)}.")
    cells = [cell for run in read_outcomes(record) for cell in run.scores.values()]
    if edges := sum(bool(cell.get("edge")) for cell in cells):
        sentences.append(
            f"The best fine-tuning rate was the lowest or the highest tried for {edges} of {len(cells)} scores."
        )
    return " ".join(sentences)


def _errors(record: Mapping[str, Any], table: Sequence[Row]) -> str:
    """Explain what the scores are means over, and what their ± means."""
    single = _single(table)
    own = "its error is not known"
    if any(score.interval is not None for row in single for score in row.scores.values()):
        over = f"over the {_within(record)}, not the error over pretraining seeds"
        own = f"± is the 95% interval of that model's score {over}"
    if len(single) == len(table):
        return f"Scores are percent, each of one pretrained model; {own}."
    text = (
        "Scores are percent, means over the pretraining seeds; ± is a 95% interval, the same for all entries with as "
        f"many seeds: from the variance between pretraining seeds, or that over the {_within(record)} where it is "
        "larger."
    )
    labels = "; ".join(row.label for row in single)
    return f"{text} Of some entries one model alone was judged ({labels}); there {own}." if single else text


def _at_chance(row: Row, name: str, models: Sequence[Mapping[str, Mapping[str, Any]]]) -> bool:
    """Return whether each model's score is at chance, or their mean is not above the constant answer by its error."""
    score = row.scores[name]
    mean_at_chance = len(models) > 1 and score.mean - (score.interval or 0.0) <= models[0][name]["constant"]
    return mean_at_chance or all(at_chance(scores[name]) for scores in models)


def _where(environments: Sequence[Mapping[str, Any]]) -> str:
    """List the machines, versions and commits of the runs."""
    shown = ("processor", "gpu", "cores", "threads", "python", "torch", "commit")
    lines = dict.fromkeys(", ".join(f"{key} {e[key]}" for key in shown if e.get(key) is not None) for e in environments)
    text = "\n".join(f"- {line}" for line in lines)
    if len({tuple(e.get(key) for key in MACHINE) for e in environments}) > 1:
        text += "\n\nThe runs were made on different machines: their times do not compare."
    return text
