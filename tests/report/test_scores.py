"""Scores that evaluations noted in runs' folders: read, averaged and drawn."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from raptr.report import write_report
from raptr.report.runs import read_run, read_scores, told_apart
from raptr.report.scores import AVERAGE, Scored, at_chance, draw_scores, scored
from raptr.report.statistics import Mean, shown
from tests.report.test_report import make_run


def test_what_was_noted_is_read_and_what_is_damaged_is_left_out(tmp_path: Path) -> None:
    assert read_scores(tmp_path) == {}
    folder = tmp_path / "evaluation"
    folder.mkdir()
    cell = {"score": 0.8, "interval": None, "constant": 0.5}
    (folder / "finetune-sst2.json").write_text(json.dumps({"model": "x", "columns": {"SST-2": cell}}))
    (folder / "half.json").write_text('{"columns": {"RTE"')
    (folder / "list.json").write_text("[1]")
    assert read_scores(tmp_path) == {"SST-2": cell}


def test_scores_made_in_another_way_have_a_column_of_their_own(tmp_path: Path) -> None:
    runs = []
    for name, made in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "z")):
        make_run(folder := tmp_path / name, steps=20)
        (folder / "evaluation").mkdir()
        cell = {"score": 0.9, "interval": None, "constant": 0.5, "made": made}
        shared = {"score": 0.8, "interval": None, "constant": 0.5, "made": "all"}
        (folder / "evaluation" / "scores.json").write_text(json.dumps({"columns": {"SST-2": cell, "MNLI": shared}}))
        runs.append(folder)
    found = [tuple(run.scores) for run in told_apart([read_run(run) for run in runs])]
    assert found == [("SST-2", "MNLI"), ("SST-2 (2)", "MNLI"), ("SST-2", "MNLI"), ("SST-2 (3)", "MNLI")]
    page = write_report(runs, tmp_path / "report").page.read_text()
    assert "SST-2 (2): other data, or another recipe, than SST-2." in page


def test_an_average_has_the_error_of_independent_scores() -> None:
    cells = {
        "a": {"score": 0.6, "interval": 0.03, "constant": 0.5},
        "b": {"score": 0.8, "interval": 0.04, "constant": 0.4},
    }
    judged = scored("run", 2.0, cells)
    assert judged.average("ab").mean == pytest.approx(0.7)
    assert judged.average("ab").interval == pytest.approx(0.025)
    assert judged.average("b") == Mean(0.8, 0.04, 1)
    assert judged.constants == {"a": 0.5, "b": 0.4}
    assert scored("run", 2.0, {**cells, "c": {"score": 0.7, "constant": 0.1}}).average("abc").interval is None
    own = Scored("entry", 2.0, {"a": Mean(0.6, None, 2), AVERAGE: Mean(0.9, 0.1, 2)})
    assert own.average("a") == Mean(0.9, 0.1, 2)


def test_chance_is_what_the_evaluation_found() -> None:
    cell = {"score": 0.52, "interval": 0.01, "constant": 0.5}
    assert not at_chance(cell)
    assert at_chance({**cell, "interval": 0.03})
    assert at_chance({**cell, "chance": True})
    assert not at_chance({**cell, "interval": 0.03, "chance": False})


def test_a_correlation_below_zero_has_its_bar() -> None:
    for score, bottom in ((-0.1, -16.5), (0.1, 0)):
        left, _ = draw_scores([Scored("x", 2.0, {"CoLA": Mean(score, 0.05, 3)})], "the seeds").axes
        assert left.get_ylim()[0] == pytest.approx(bottom)


def test_zero_has_no_minus() -> None:
    assert shown(Mean(-0.0004, 0.1, 3), 1, factor=100, sign="+") == "+0.0 ± 10.0"
    assert shown(Mean(-0.004, None, 1), 1, factor=100) == "-0.4"


def points(axes: Axes) -> list[list[float]]:
    """Where the points with error bars stand."""
    drawn: list[Any] = axes.containers
    return [np.asarray(one.lines[0].get_xydata())[0].tolist() for one in drawn]


def test_the_picture_has_a_bar_for_each_score_and_a_point_for_each_average() -> None:
    whole = {"a": Mean(0.6, 0.1, 3), "b": Mean(0.8, None, 1)}
    models = [Scored("part", 1.0, {"a": whole["a"]}), Scored("x", 2.0, whole, {"a": 0.5}), Scored("y", None, whole)]
    left, right = draw_scores(models, "the seeds").axes
    assert [bar.get_height() for bar in left.patches] == pytest.approx([60, 60, 80, 60, 80])  # type: ignore[attr-defined]
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["a", "b"]
    assert points(right) == [pytest.approx([1.0, 60]), pytest.approx([2.0, 60])]  # of the task that all have
    assert right.get_title() == "average score (a) against held-out loss"
    _, right = draw_scores(models[1:], "the seeds").axes
    assert points(right) == [pytest.approx([2.0, 70])]
    assert right.get_title() == "average score against held-out loss"
    _, right = draw_scores([models[0], Scored("z", 3.0, {"b": whole["b"]})], "the seeds").axes
    assert not right.axison
    assert right.get_title().startswith("no average")
