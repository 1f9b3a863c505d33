"""Rows, paired differences and averages against numbers worked out by hand."""

import io
import math
import re
from typing import Any

import pytest
from rich.console import Console

from raptr.evaluation.fewshot.summary import draw, notes, ratio, rich_tables, summed_up


def job(model: str, scores: list[float], task: str = "boolq", **other: Any) -> dict[str, Any]:
    constant = other.pop("constant", [1.0, 0.0] * (len(scores) // 2))
    bits = other.pop("bits", [8.0] * len(scores))
    return {
        "model": model,
        "attention": "causal",
        "task": task,
        "shots": 1,
        "metric": "acc",
        "scores": {"acc": sum(scores) / len(scores)},
        "constant": {"answer": "yes", "scores": {"acc": 0.5}},
        "cut": 0,
        "examples": [
            {"score": score, "constant": fixed, "nats": bit * math.log(2), "bytes": 4}
            for score, fixed, bit in zip(scores, constant, bits, strict=True)
        ],
        **other,
    }


def record(*jobs: dict[str, Any]) -> dict[str, Any]:
    return {"models": {}, "not_run": ["quac"], **summed_up(jobs)}


def test_a_row_and_its_difference() -> None:
    first, second = summed_up([job("a", [1, 0, 0, 0]), job("b", [1, 1, 1, 0], bits=[4, 8, 8, 8])])["rows"]
    assert first["score"] == {"mean": 0.25, "interval": pytest.approx(3.182 * 0.5 / 2)}
    assert first["bits_per_byte"]["mean"] == 2
    assert (first["compared_with"], second["compared_with"]) == (None, "a")
    deviation = math.sqrt(4 / 12)  # of 0, 1, 1, 0
    assert second["difference"] == {"mean": 0.5, "interval": pytest.approx(3.182 * deviation / 2)}
    assert second["bits_difference"]["mean"] == pytest.approx(-0.25)


def test_other_attention_is_not_compared() -> None:
    rows = summed_up([job("a", [1, 0]), job("a", [1, 0], attention="prefix"), job("b", [1, 0], attention="prefix")])
    assert [row["compared_with"] for row in rows["rows"]] == [None, None, "a"]


@pytest.mark.parametrize(
    ("scores", "constant", "chance"),
    [
        ([1.0] * 40, [1.0, 0.0] * 20, False),
        ([1.0, 0.0] * 20, [1.0, 0.0] * 20, True),
        ([1.0] * 22 + [0.0] * 18, [1.0, 0.0] * 20, True),
        ([0.0] * 40, [0.0] * 40, True),
        ([1.0] * 40, [0.0] * 40, False),
        ([1.0], [0.0], True),  # one example says nothing
    ],
)
def test_chance(scores: list[float], constant: list[float], chance: bool) -> None:
    (row,) = summed_up([job("a", scores, constant=constant)])["rows"]
    assert row["chance"] == chance


def test_equal_scores_have_the_error_of_the_rule_of_three() -> None:
    (row,) = summed_up([job("a", [0.0] * 60)])["rows"]
    assert row["score"] == {"mean": 0.0, "interval": pytest.approx(0.05)}


def test_a_ratio_of_sums() -> None:
    found = ratio([2, 6], [1, 3])
    assert found == {"mean": 2, "interval": pytest.approx(0)}  # both have the same ratio
    assert ratio([2, 2], [1, 3])["mean"] == 1


def test_superglue_is_one_task_of_the_average() -> None:
    jobs = [job("a", [1, 1, 0, 0]), job("a", [1, 1, 1, 1], "cb"), job("a", [0, 0, 0, 1], "triviaqa")]
    group, whole = summed_up(jobs)["averages"]
    assert (group["name"], group["score"]["mean"]) == ("superglue", 0.75)
    assert group["chance"]
    assert not summed_up([job("a", [1.0] * 40, task) for task in ("boolq", "cb")])["averages"][0]["chance"]
    assert (whole["name"], whole["score"]["mean"]) == ("Avg.", 0.5)
    halves = [row["score"]["interval"] for row in summed_up(jobs)["rows"]]
    assert group["score"]["interval"] == pytest.approx(math.hypot(halves[0], halves[1]) / 2)
    assert whole["score"]["interval"] == pytest.approx(math.hypot(group["score"]["interval"], halves[2]) / 2)


def test_averages_are_over_the_tasks_that_all_models_have() -> None:
    jobs = [job(m, [1, 0], t) for m, t in (("a", "drop"), ("b", "drop"), ("a", "coqa"), ("b", "coqa"), ("a", "webqs"))]
    assert [one["tasks"] for one in summed_up(jobs)["averages"]] == [["drop", "coqa"]] * 2


def test_notes_say_chance_cuts_and_what_was_not_run() -> None:
    said = " ".join(notes(record(job("a", [1, 0, 0, 0], cut=3), job("b", [1.0, 0.0] * 2))))
    assert "All scores are at chance" in said
    assert "boolq 3 of 4 (1-shot)" in said
    assert "quac" in said
    assert "differences are paired by example" in said
    assert "differences" not in " ".join(notes(record(job("a", [1, 0, 0, 0]))))  # of one model
    said = " ".join(notes(record(job("a", [1.0] * 40), job("b", [1.0, 0.0] * 20))))
    assert "1 of 2 scores are at chance" in said
    many = [job("a", [1.0, 0.0] * 20, task) for task in map(str, range(30))]
    assert "luck" in " ".join(notes(record(job("a", [1.0] * 40), *many)))


def test_the_table_and_the_chart() -> None:
    found = record(
        job("[a]", [1, 1, 0, 0]), job("b", [1, 1, 1, 0]), job("[a]", [1, 0], "drop"), job("b", [1, 0], "drop")
    )
    tables: list[Any] = list(rich_tables(found).renderables[:2])
    scores, bits = (
        {str(column.header): [str(cell) for cell in column.cells] for column in table.columns} for table in tables
    )
    assert [str(table.title) for table in tables] == [
        "1-shot, score in %; differences to [a]",
        "1-shot, bits/byte; differences to [a]",
    ]
    assert scores["task"] == ["boolq", "acc", "n 4", "drop", "acc", "n 2", "Avg.", "mean"]
    assert scores["model"] == [*["[a]", "b", "best constant answer"] * 2, "[a]", "b"]
    assert scores["score, %"][0].startswith("50.0 ± ")
    assert scores["score, %"][2] == "50.0"
    assert scores["difference"][0] == "–"
    assert scores["difference"][1].startswith("+25.0 ± ")
    assert bits["task"] == ["boolq", "", "drop", "", "Avg.", ""]
    assert bits["model"] == ["[a]", "b"] * 3
    assert bits["bits/byte"][0] == "2.000 ± 0.000"
    axes = draw(found).axes
    assert [tick.get_text() for tick in axes[0].get_xticklabels()] == ["boolq", "drop", "Avg."]
    assert [bar.get_height() for bar in axes[0].patches] == pytest.approx([50, 75, 50, 50, 50, 62.5])  # type: ignore[attr-defined]


def test_the_table_of_one_model_breaks_no_word_in_80_columns() -> None:
    tasks = ("boolq", "cb", "storycloze")
    many = [1.0, 0.0] * 3000
    jobs = [job("decoder-demo-raptr", many, task, metric="exact_match", bits=[1.0, 20.0] * 3000) for task in tasks]
    for one in jobs:
        one["constant"]["scores"]["exact_match"] = 1.0
    found = record(*jobs)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rich_tables(found).renderables[0])
    shown = console.export_text()
    for word in ("decoder-demo-raptr, 1-shot", "superglue", "storycloze", "score, %", "constant", "bits/byte"):
        assert word in shown
    assert re.search(r"storycloze +exact_match +6,000 +50\.0 ± 1\.3 +100\.0 +chance +2\.625 ± 0\.06\d", shown)


@pytest.mark.parametrize("attention", [["causal"], ["prefix"], ["causal", "prefix"]])
def test_the_tables_of_several_models_break_no_word_in_80_columns(attention: list[str]) -> None:
    names = ("full", "decoder-mini-raptr", "progressive stacking")
    tasks = ("boolq", "cb", "lambada_cloze")
    right, wrong, bits = [1.0] * 5 + [0.0] * 5, [0.0] * 5 + [1.0] * 5, [1.0, 200.0] * 5
    jobs = [
        job(name, right if name == "full" else wrong, task, metric="exact_match", attention=kind, bits=bits)
        for name in names
        for kind in attention
        for task in tasks
    ]
    for one in jobs:
        one["constant"]["scores"]["exact_match"] = 0.5
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rich_tables(record(*jobs)))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    for word in (*tasks, "superglue", "exact_match", "n 10", "decoder-mini-raptr", "stacking", "difference", "chance"):
        assert re.search(rf"[ │]{re.escape(word)}[ ,│]", shown), word
    assert re.search(r"│ +50\.0 ± \d+\.\d │ +\+0\.0 ± \d+\.\d │", shown)
