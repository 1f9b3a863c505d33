"""The tables of fewshot.md."""

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from docs.results.pages.contract import Page, Records, fixed, short, table, with_interval
from raptr.evaluation.fewshot.summary import draw

MISSING = "**Not run yet.**"
PERPLEXITY = "lambada"  # the task whose perplexity is shown


def scores(records: Records) -> str:
    """Tabulate every model's score on every task; a score at chance is in brackets."""
    record = records["result"]
    if record is None:
        return MISSING
    rows = []
    for key, by_model in _tasks(record):
        one = next(iter(by_model.values()))
        constant = 100 * one["score"]["mean"] - 100 * one["above_constant"]["mean"]
        cells = [_score(by_model.get(model)) for model in record["models"]]
        rows.append([key[0], str(key[1]), one["metric"], str(one["n"]), fixed(constant, 1), *cells])
    for key, by_model in _averages(record):
        rows.append([key[0], str(key[1]), "mean", "–", "–", *(_score(by_model[model]) for model in record["models"])])
    return table(["task", "shots", "metric", "n", "constant answer", *record["models"]], rows)


def bits(records: Records) -> str:
    """Tabulate the bits per byte of the gold answers: the first model's, and the other models' difference to it."""
    record = records["result"]
    if record is None:
        return MISSING
    first, *others = record["models"]
    rows = []
    for key, by_model in [*_tasks(record), *_averages(record)]:
        cells = [_value(by_model[first]["bits_per_byte"], 3)]
        cells += [_value(by_model[model]["bits_difference"], 3, sign=True) for model in others]
        rows.append([key[0], str(key[1]), *cells])
    return table(["task", "shots", first, *(f"{model}, difference" for model in others)], rows)


def perplexity(records: Records) -> str:
    """Tabulate LAMBADA without exemplars: the perplexity of the last word, and how often it is guessed."""
    record = records["lambada"]
    if record is None:
        return MISSING
    rows = [
        [
            row["model"],
            row["attention"],
            f"{row['n']:,}",
            short(row["scores"]["perplexity"], 3),
            _value(row["bits_per_byte"], 3),
            _value(row["bits_difference"], 3, sign=True) if row["bits_difference"] else "–",
            _percent(row["score"]),
        ]
        for row in record["rows"]
        if row["task"] == PERPLEXITY
    ]
    head = ["model", "attention", "examples", "perplexity of the last word", "bits per byte", "difference to the first"]
    return table([*head, "accuracy, %"], rows)


def chart(records: Records) -> Figure | None:
    """Draw the chart that the command draws."""
    return None if records["result"] is None else draw(records["result"])


def _tasks(record: dict[str, Any]) -> Iterator[tuple[tuple[str, int], dict[str, dict[str, Any]]]]:
    """Yield each task and number of exemplars with its rows by model."""
    for key in dict.fromkeys((row["task"], row["shots"]) for row in record["rows"]):
        yield key, {row["model"]: row for row in record["rows"] if (row["task"], row["shots"]) == key}


def _averages(record: dict[str, Any]) -> Iterator[tuple[tuple[str, int], dict[str, dict[str, Any]]]]:
    """Yield each mean over tasks and number of exemplars with its rows by model."""
    for key in dict.fromkeys((row["name"], row["shots"]) for row in record["averages"]):
        yield key, {row["model"]: row for row in record["averages"] if (row["name"], row["shots"]) == key}


def _score(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"({_percent(row['score'])})" if row["chance"] else _percent(row["score"])


def _percent(value: dict[str, float]) -> str:
    return with_interval(100 * value["mean"], 100 * value["interval"], 1)


def _value(value: dict[str, float], digits: int, *, sign: bool = False) -> str:
    return with_interval(value["mean"], value["interval"], digits, sign=sign)


PAGE = Page(
    "results/fewshot",
    {"result": "docs/results/fewshot.json", "lambada": "docs/results/fewshot-lambada.json"},
    {"scores": scores, "bits": bits, "perplexity": perplexity},
    {"fewshot.png": chart},
)
