"""Rows over seeds, the best rate, what is called chance, and the chart."""

import io
from statistics import median, stdev
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

from raptr.evaluation.run import COLUMNS
from raptr.evaluation.summary import Row, at_chance, best_rate, draw, notes, rich_table, rows, standard_error


def job(rate: float, seed: int, value: float | None) -> dict[str, Any]:
    scores = None if value is None else {"accuracy": value}
    return {"rate": rate, "seed": seed, "scores": scores, "diverged": 3 if value is None else None}


def best(jobs: list[dict[str, Any]]) -> list[float]:
    return [row.rate for row in rows(jobs, ["accuracy"]) if row.best]


def test_a_row() -> None:
    values = [0.7, 0.8, 0.81]
    (row,) = rows([job(1e-5, seed, value) for seed, value in enumerate(values)], ["accuracy"])
    assert row.means["accuracy"] == pytest.approx(0.77)
    assert row.median == median(values)
    assert row.deviation == pytest.approx(stdev(values))
    assert row.interval == pytest.approx(4.303 * stdev(values) / 3**0.5)  # Student's t for three seeds
    assert (row.best, row.edge, row.seeds, row.diverged) == (True, False, 3, 0)


def test_two_seeds_have_a_deviation() -> None:
    (row,) = rows([job(1e-5, 0, 0.7), job(1e-5, 1, 0.9)], ["accuracy"])
    assert row.deviation == pytest.approx(0.02**0.5)


def test_one_seed_has_no_interval() -> None:
    (row,) = rows([job(1e-5, 0, 0.7)], ["accuracy"])
    assert (row.interval, row.deviation, row.median) == (None, None, 0.7)


def test_the_best_rate_has_the_best_mean_not_the_best_seed() -> None:
    jobs = [job(1, 0, 0.9), job(1, 1, 0.5), job(2, 0, 0.8), job(2, 1, 0.8), job(3, 0, 0.7), job(3, 1, 0.7)]
    assert best(jobs) == [2]
    assert not next(row for row in rows(jobs, ["accuracy"]) if row.best).edge
    assert next(row for row in rows(jobs[:4], ["accuracy"]) if row.best).edge


def test_rates_are_compared_on_the_seeds_that_all_have() -> None:
    assert best([job(1, 0, 0.6), job(1, 1, 0.9), job(2, 0, 0.7)]) == [2]


def test_a_rate_that_diverged_is_never_the_best() -> None:
    jobs = [job(1, 0, 0.6), job(1, 1, 0.6), job(2, 0, 0.9), job(2, 1, None)]
    assert best(jobs) == [1]
    assert [row.diverged for row in rows(jobs, ["accuracy"])] == [0, 1]
    assert best([job(1, 0, None)]) == []


def row_of(mean: float, interval: float | None) -> Row:
    return Row(1e-5, 3, {"accuracy": mean}, None, mean, interval, 0, best=True, edge=False)


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ({1: [0.8, 0.8, 0.8], 2: [0.7, 0.7, 0.9]}, 1),
        ({1: [0.7, 0.8, 0.8], 2: [0.8, 0.5, 0.5], 3: [0.1]}, 1),  # one job more, far below, changes nothing
        ({1: [0.7, 0.8, 0.8], 2: [0.8, 0.5, 0.5], 3: [0.9]}, 3),  # on the seed that it has it is the best
        ({1: [0.7], 2: [0.9, 0.5, 0.5], 3: [0.8]}, 2),  # as `--tune 1` leaves it
        ({1: [0.7, 0.9], 2: [0.8, 0.6, 0.9], 3: [0.5]}, 1),
        ({1: [0.9, None], 2: [0.8, 0.8]}, 2),
        ({1: [0.58, 0.58], 2: [0.58, 0.58], 3: [0.58, 0.58]}, 3),  # at chance: higher rates may learn
        ({1: [1.0], 2: [1.0], 3: [1.0]}, 2),  # there is nothing to gain
        ({1: [0.6], 2: [0.8], 3: [0.8]}, 2),
        ({1: [None], 2: [None]}, None),
    ],
)
def test_the_best_rate_is_compared_on_shared_seeds(scores: dict[float, list[float | None]], best: float | None) -> None:
    jobs = {rate: [job(rate, seed, value) for seed, value in enumerate(own)] for rate, own in scores.items()}
    assert best_rate(jobs, "accuracy") == best


@pytest.mark.parametrize(
    ("mean", "interval", "examples", "chance"),
    [
        (0.597, None, 100, True),  # 1.96 standard errors of 0.05
        (0.599, None, 100, False),
        (0.52, 0.001, 100, True),  # within the error of a dev set of 100
        (0.52, 0.001, 100_000, False),
        (0.60, 0.12, 100_000, True),  # within the error over seeds
        (0.70, 0.12, 100, False),
        (0.58, None, 100, True),
    ],
)
def test_chance(mean: float, interval: float | None, examples: int, chance: bool) -> None:
    assert at_chance(row_of(mean, interval), "accuracy", 0.5, examples) == chance


def test_the_error_of_a_score() -> None:
    """That of a high correlation is far smaller than that of none."""
    random = np.random.default_rng(0)
    for true in (0.0, 0.9):
        x = random.normal(size=(2000, 100))
        y = true * x + (1 - true**2) ** 0.5 * random.normal(size=x.shape)
        found = [np.corrcoef(*pair)[0, 1] for pair in zip(x, y, strict=True)]
        assert standard_error("pearson", true, 100) == pytest.approx(np.std(found), rel=0.06)
    assert standard_error("accuracy", 0.9, 100) == pytest.approx(0.03)
    assert standard_error("accuracy", 1.0, 400) == 0


def record(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "task": "sst2",
        "metrics": ["accuracy"],
        "model": {"name": "$a_b$"},
        "data": {"dev": {"examples": 1000}},
        "baseline": {"accuracy": 0.5},
        "rows": [vars(row) for row in rows(jobs, ["accuracy"])],
        "jobs": jobs,
    }


def test_notes_name_the_best_rate_its_error_and_the_edge() -> None:
    said = " ".join(notes(record([job(1e-5, 0, 0.8), job(3e-5, 0, 0.9)]), 1000))
    assert all(part in said for part in ("3e-05", "1,000", "0.9 points", "--widen or --rate"))
    assert "chance" not in said
    for score in (0.51, 0.3):  # far below is no better
        alone = " ".join(notes(record([job(1e-5, 0, score)]), 1000))
        assert "chance: it is not above" in alone
        assert "Best rate" not in alone  # nothing was chosen
    assert "diverged" in " ".join(notes(record([job(1e-5, 0, None)]), 1000))


def test_the_chart_begins_at_the_constant_answer_and_shows_whole_intervals() -> None:
    axes = draw(record([job(r, s, v) for r, s, v in ((1, 0, 0.6), (1, 1, 0.62), (2, 0, 0.7), (2, 1, 0.8))])).axes[0]
    assert [bar.get_y() for bar in axes.patches] == [50, 50]  # type: ignore[attr-defined]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([11, 25])  # type: ignore[attr-defined]
    low, high = axes.get_ylim()
    assert low <= 50
    assert high == 100  # the interval of two seeds is wider than what is possible
    assert axes.get_title() == "$a_b$ on sst2"


def test_the_table_has_a_row_for_each_rate_and_the_constant_answer() -> None:
    table = rich_table(record([job(1e-5, 0, 0.8), job(3e-5, 0, None)]))
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["1e-05", "3e-05", "constant"]
    assert cells[2] == ["80.00", "–", "50.00"]
    assert "1 diverged" in str(cells[1][1])


def test_names_in_brackets_are_shown_as_they_stand() -> None:
    made = record([job(1e-5, 0, 0.8)]) | {"model": {"name": "a[/b][bold]c"}}
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(rich_table(made))
    assert "a[/b][bold]c on sst2" in console.export_text()
    with Progress(*COLUMNS, console=console) as bar:
        bar.add_task("a[/b][bold]c", total=1)
    assert "a[/b][bold]c" in console.export_text()
