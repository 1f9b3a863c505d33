"""The results pages: their tables are those of the records beside them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from docs.results import redraw
from docs.results.pages import axes as axes_page
from docs.results.pages import evidence, which
from docs.results.pages.contract import Page, fixed, ranged, rate, short, table, with_deviation, with_interval
from evidence.measured import full_training, measurements
from raptr.comparison.record import read_rows
from raptr.comparison.table import finals
from raptr.train.advice import Place


@pytest.mark.parametrize("page", redraw.PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_those_of_its_records(page: Page) -> None:
    text = (redraw.DOCS / f"{page.name}.md").read_text(encoding="utf-8")
    assert redraw.redrawn(page, text) == text


def test_figures_are_drawn_from_the_records() -> None:
    drawn = [name for page in redraw.PAGES for name, draw in page.figures.items() if draw(redraw.records(page))]
    assert {"boolean.png", "linear.png", "polynomial-length.png", "polynomial-length-small.png"} <= set(drawn)
    for name in drawn:
        assert (redraw.RESULTS / name).exists()


def test_every_page_with_a_marked_table_is_listed() -> None:
    pages = [*redraw.DOCS.rglob("*.md"), *redraw.ROOT.glob("*.md")]
    marked = {path for path in pages if "<!-- table:" in path.read_text(encoding="utf-8")}
    assert marked == {(redraw.DOCS / f"{page.name}.md").resolve() for page in redraw.PAGES if page.tables}


def test_the_queue_says_what_is_a_lead_partial_or_not_run() -> None:
    none = dict.fromkeys(item.name for item in evidence.ITEMS)
    assert evidence.sections(none).count("Not run yet") == len(evidence.ITEMS)
    record = redraw.records(evidence.PAGE)["long-12x256"]
    whole = evidence.sections({**none, "long-12x256": record})
    assert "26 runs" in whole
    assert "One seed" not in whole
    first = {**record, "runs": [run for run in record["runs"] if run["seed"] == 0], "finished": 16}
    part = evidence.sections({**none, "long-12x256": first})
    assert "16 of 26 runs" in part
    assert "One seed" in part


def judged(
    record: dict[str, Any], labels: Sequence[str], once: Sequence[str] = (), interval: float | None = 0.01
) -> dict[str, Any]:
    """The record as if the models of these entries had been judged: the lower the loss, the higher the scores.

    Of the entries in `once` only the model of seed 0.
    """

    def cell(run: dict[str, Any], above: float) -> dict[str, Any]:
        score = above + 0.9 - 0.1 * run["loss"]
        chosen = {"metric": "accuracy", "rate": 1e-4, "edge": above == 0}
        return {"score": score, "constant": 0.5, "interval": interval, "n": 3, **chosen}

    runs = [
        {**run, "scores": {"MNLI": cell(run, 0.0), "SST-2": cell(run, 0.1)}}
        if run["label"] in labels and run["peak"] == 0.002 and (run["label"] not in once or run["seed"] == 0)
        else run
        for run in record["runs"]
    ]
    return {**record, "runs": runs}


def test_scores_on_tasks_are_shown_and_drawn_from_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = redraw.records(evidence.PAGE)["long-12x256"]
    labels = ["full", "full (reduced)", "raptr, sqrt"]
    whole = {
        **dict.fromkeys(item.name for item in evidence.ITEMS),
        "control": None,
        "long-12x256": judged(record, labels),
    }
    shown = evidence.sections(whole)
    assert "| entry | FLOPs | held-out loss | MNLI | SST-2 | Avg. |" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("| full |") and line.count("|") == 7]
    assert line.split("|")[2:7:4] == [" 1.000 ", " 70.2 ± 0.2 "]  # costs, and the average of 65.2 and 75.2
    assert "not judged yet are raptr, none; stacking" in shown
    assert "3 seeds" in shown
    assert "9 of 18 scores" in shown  # rates at the edge
    assert "](evidence/long-12x256-tasks.png)" in shown
    assert "| MNLI |" not in evidence.sections({**whole, "long-12x256": record})

    drawn = {name: draw(whole) for name, draw in evidence.PAGE.figures.items()}
    (name,) = [name for name, figure in drawn.items() if figure is not None]
    assert name == "evidence/long-12x256-tasks.png"
    left, right = drawn[name].axes  # type: ignore[union-attr]
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["MNLI", "SST-2"]
    assert len(left.patches) == len(labels) * 2
    assert len(left.containers) == len(labels) * 4  # each bar and its interval
    assert len(right.containers) == len(labels)
    assert "loss" in right.get_xlabel()

    monkeypatch.setattr(redraw, "ROOT", tmp_path)  # and as `make results` does it
    monkeypatch.setattr(redraw, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(redraw, "RESULTS", tmp_path / "docs" / "results")
    monkeypatch.setattr(redraw, "MEASURED", tmp_path / "measured.json")
    monkeypatch.setattr(redraw, "PAGES", (evidence.PAGE,))
    (tmp_path / "docs" / "results" / "evidence").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "evidence.md").write_text(
        "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in evidence.PAGE.tables)
    )
    place = tmp_path / evidence.PAGE.records["glue-12x256"]
    place.write_text(json.dumps(judged(record, labels)))
    redraw.main()
    assert (tmp_path / "docs" / "results" / "evidence" / "glue-12x256-tasks.png").read_bytes().startswith(b"\x89PNG")
    assert "(evidence/glue-12x256-tasks.png)" in (tmp_path / "docs" / "results" / "evidence.md").read_text()


def test_scores_of_one_model_have_the_error_of_its_own_evaluation() -> None:
    record, labels = redraw.records(evidence.PAGE)["long-12x256"], ["full", "raptr, sqrt"]
    none = dict.fromkeys(item.name for item in evidence.ITEMS)

    def made(once: Sequence[str], interval: float | None = 0.01) -> tuple[str, Figure]:
        records = {**none, "long-12x256": judged(record, labels, once, interval)}
        drawn = evidence.PAGE.figures["evidence/long-12x256-tasks.png"](records)
        assert drawn is not None
        return evidence.sections(records), drawn

    shown, drawn = made(labels)
    (line,) = [line for line in shown.splitlines() if line.startswith("| full |") and line.count("|") == 7]
    assert line.split("|")[4:7] == [" 65.2 ± 1.0 ", " 75.2 ± 1.0 ", " 70.2 ± 0.7 "]  # 1.0·√2 / 2 for the average
    own = (
        "± is the 95% interval of that model's score over the fine-tuning seeds, not the error over pretraining seeds."
    )
    assert "with models of 1 seed each." in shown
    assert f"Scores are percent, each of one pretrained model; {own}" in shown
    assert "intervals over fine-tuning seeds," in drawn.axes[0].get_title()
    assert len(drawn.axes[0].containers) == 2 * 4  # each bar and its interval

    shown, drawn = made(["raptr, sqrt"])
    assert "with models of 1 or 3 seeds each." in shown
    assert "or that over the fine-tuning seeds where it is larger. Of some entries" in shown
    assert "Scores are percent, means over the pretraining seeds; ± is a 95% interval, the same for all" in shown
    assert f"Of some entries one model alone was judged (raptr, sqrt); there {own}" in shown
    assert "intervals over pretraining seeds or fine-tuning seeds," in drawn.axes[0].get_title()

    shown, _ = made(labels, interval=None)
    assert "each of one pretrained model; its error is not known." in shown
    assert "one pretrained model" not in made([])[0]


def test_scores_at_a_rate_that_is_no_longer_the_best_are_not_shown() -> None:
    record = judged(redraw.records(evidence.PAGE)["long-12x256"], ["full"])
    runs = [{**run, "loss": 9.0} if "scores" in run else run for run in record["runs"]]
    records = {**dict.fromkeys(item.name for item in evidence.ITEMS), "long-12x256": {**record, "runs": runs}}
    assert "MNLI" not in evidence.sections(records).split("### long-12x256")[1].split("###")[0]
    assert evidence.PAGE.figures["evidence/long-12x256-tasks.png"](records) is None


def test_advice_does_not_rest_on_runs_made_to_be_judged() -> None:
    record = redraw.records(evidence.PAGE)["long-12x256"]
    assert measurements({"long-12x256": record})
    with_tasks = {**record, "comparison": {**record["comparison"], "evaluate": {"finetune": {"data": "glue"}}}}
    assert not measurements({"glue-12x256": with_tasks})


def test_the_control_stands_beside_the_record() -> None:
    assert "Not run yet" in evidence.control({"control": None})
    run = {"comparison": "long", "entry": "raptr, none", "seed": 0, "loss": 2.66, "record": 2.65}
    reduced = {**run, "entry": "full (reduced)", "loss": 2.58, "record": 2.6}
    shown = evidence.control({"control": [run, reduced]})
    assert "| long | raptr, none | 2.6600 | 2.6500 | one, preliminary |" in shown
    assert "| long | **raptr, none minus full (reduced)** | +0.0800 | +0.0500 | one, preliminary |" in shown
    second = [{**run, "seed": 1, "loss": 2.68}, {**reduced, "seed": 1, "record": None}]
    shown = evidence.control({"control": [run, reduced, *second, {**run, "comparison": "other"}]})
    assert "| long | raptr, none | 2.6700 ± 0.1271 | 2.6500 ± 0.0000 | 2 |" in shown
    assert "| long | **raptr, none minus full (reduced)** | +0.0900 ± 0.1271 | – | 2 |" in shown
    assert "| other | raptr, none | 2.6600 | 2.6500 | one, preliminary |" in shown


PAGE = Page(name="a", records={}, tables={"one": lambda _: "| 1 |"})


def test_a_table_is_written_between_its_marks_and_stays() -> None:
    once = redraw.redrawn(PAGE, "before\n\n<!-- table: one -->\nold\n<!-- end -->\n\nafter\n")
    assert once == "before\n\n<!-- table: one -->\n\n| 1 |\n\n<!-- end -->\n\nafter\n"
    assert redraw.redrawn(PAGE, once) == once


@pytest.mark.parametrize("text", ["no mark", "<!-- table: two -->\n<!-- end -->", "<!-- table: one -->\nno end"])
def test_a_table_without_its_mark_or_function_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a\.md.*one"):
        redraw.redrawn(PAGE, text)


def test_main_writes_only_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redraw, "ROOT", tmp_path)
    monkeypatch.setattr(redraw, "DOCS", tmp_path)
    monkeypatch.setattr(redraw, "RESULTS", tmp_path)
    monkeypatch.setattr(redraw, "MEASURED", tmp_path / "measured.json")
    monkeypatch.setattr(redraw, "PAGES", (PAGE,))
    page = tmp_path / "a.md"
    page.write_text("<!-- table: one -->\n<!-- end -->\n", encoding="utf-8")
    redraw.main()
    written = page.stat().st_mtime_ns
    assert "| 1 |" in page.read_text(encoding="utf-8")
    redraw.main()
    assert page.stat().st_mtime_ns == written


def test_numbers_are_written_short() -> None:
    assert [short(value) for value in (0, 0.00018, 0.0564, 1.5, 246.1, 12_345, 4.4e-16)] == [
        "0.0",
        "1.8e-4",
        "0.056",
        "1.5",
        "246",
        "12,345",
        "4.4e-16",
    ]
    assert (fixed(-0.371, 2), fixed(-0.001, 2)) == ("−0.37", "0.00")
    assert (rate(0.006), rate(1.5e-3)) == ("6e-3", "1.5e-3")
    assert (with_deviation((0.0242, 0.0077)), with_deviation((None, None))) == ("0.0242 ± 0.008", "diverged")
    signed = [with_interval(mean, interval, sign=True) for mean, interval in ((-0.0004, 0.01), (0.02, None))]
    assert signed == ["+0.000 ± 0.010", "+0.020"]
    assert (with_interval(-0.5, 0.25, 1), with_interval(2.0, None)) == ("−0.5 ± 0.2", "2.000")
    assert ranged({"mean": -0.371, "low": -0.377, "high": -0.365}) == "−0.37 (−0.38 to −0.36)"
    assert table(["a", "b"], [["1", ""]]) == "| a | b |\n|---|---|\n| 1 |  |"


LONG = Place("bert", "mlm", "bert", 12, 256, 4, 4, 20.0)


def test_the_advice_is_drawn_with_few_records_and_with_many() -> None:
    found = redraw.records(which.PAGE)
    few = {name: record if name == "long-12x256" else None for name, record in found.items()}
    for records in (few, found):
        rows = which.take(records).splitlines()[2:]
        figure = which.picture(records)
        assert len(figure.axes) == len({row.split("|")[1] for row in rows})
    assert "`stacking 6-8-10-12`" in which.take(few)
    assert "`raptr` +0.071 ± 0.024" in which.take(few)
    assert "0.069 ± 0.030 above full training with 0.76 of its FLOPs" in which.answer(few)
    assert "0.030 ± 0.029 below full training with as few FLOPs (3 seeds)." in which.answer(few)
    assert "`progressive-stacking`" in which.limits(few)  # not measured
    assert "length; causal language modelling; UL2." in which.limits(few)
    unfinished = found | {"causal-12x256": None}
    assert "UL2, whose search for learning rates has not ended ([ul2-12x256]" in which.limits(unfinished)
    assert "examples/long.yaml" in which.commands(few)
    assert "evidence/" not in which.commands(few)


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (6, 3), (7, 3)])
def test_a_panel_for_each_model_and_its_notes_inside(count: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    records = {"long-12x256": redraw.records(evidence.PAGE)["long-12x256"]}
    ((place, full),) = full_training(records).items()
    places = [replace(place, width=64 * (number + 1), tokens_per_weight=40.0) for number in range(count)]
    rows = [replace(row, place=here, steps=2 * row.full_steps) for here in places for row in measurements(records)]
    monkeypatch.setattr(which, "measurements", lambda _: rows)
    monkeypatch.setattr(which, "full_training", lambda _: dict.fromkeys(places, full))
    figure = which.picture({})
    figure.draw_without_rendering()
    assert len(figure.axes) == count
    assert len({round(axes.get_position().x0, 3) for axes in figure.axes}) == columns
    for axes in figure.axes:
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["40"]
        boxes = [note.get_window_extent() for note in axes.texts]
        assert len(boxes) >= 2
        assert all(axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1 for box in boxes)
        assert all(axes.bbox.y0 < box.y0 and box.y1 < axes.bbox.y1 for box in boxes)


def test_notes_in_the_picture_of_the_advice_do_not_overlap() -> None:
    figure = which.picture(redraw.records(which.PAGE))
    figure.draw_without_rendering()
    assert any(len(axes.texts) > 1 for axes in figure.axes)
    for axes in figure.axes:
        boxes = [note.get_window_extent() for note in axes.texts]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
        assert len(axes.get_xticks()) == len(figure.axes[0].get_xticks())


def test_where_nothing_pays_full_training_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    found = redraw.records(which.PAGE)
    rows = [row for row in measurements(found) if row.method["name"] == "raptr" and row.place.factor(LONG) < 2]
    monkeypatch.setattr(which, "measurements", lambda _: rows)
    assert "| `full` |" in which.take({})
    assert which.answer({}) == ""


def six_layers() -> dict[str, Any]:
    """The records of the axes with 6 layers alone, two entries as they were while learning rates were searched."""
    found = redraw.records(axes_page.PAGE)
    records = {name: record if name.endswith("-6x256") else None for name, record in found.items()}
    for name, label in (("mlp-6x256", "raptr, mlp"), ("axes-75-6x256", "depth and heads")):
        runs = found[name]["runs"]
        begun = [run for run in runs if run["label"] != label or (run["seed"] == 0 and run["peak"] in (0.002, 0.004))]
        records[name] = {**found[name], "runs": begun}
    return {name: record and without(record, " skipped") for name, record in records.items()}


def without(record: dict[str, Any], later: str) -> dict[str, Any]:
    """The record without the runs of entries on heads and parts whose labels end so."""
    runs = [run for run in record["runs"] if not (run["label"].startswith("raptr") and run["label"].endswith(later))]
    return {**record, "runs": runs}


def axes_tables(records: dict[str, Any]) -> dict[str, str]:
    return {name: made(records) for name, made in axes_page.PAGE.tables.items()}


def searched(record: dict[str, Any], label: str, above: float) -> dict[str, Any]:
    """The record with three learning rates and three seeds of an entry, its losses `above` full training's."""
    full = {run["seed"]: run["loss"] for run in record["runs"] if (run["label"], run["peak"]) == ("full", 0.002)}
    (run, *_) = [run for run in record["runs"] if run["label"] == label]
    others = [other for other in record["runs"] if other["label"] != label]
    runs = [{**run, "peak": 0.002, "seed": seed, "loss": full[seed] + above} for seed in range(3)]
    runs += [{**run, "peak": peak, "seed": 0, "loss": full[0] + above + 0.1} for peak in (0.001, 0.004)]
    return {**record, "runs": [*others, *runs]}


def test_the_tables_of_the_axes_have_every_entry_of_their_records() -> None:
    records = six_layers()
    tables = axes_tables(records)
    some, less = tables["joint"].split("0.688 of the FLOPs")
    for name, shown in (("axes-75-6x256", some), ("axes-67-6x256", less)):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()]
        for row in finals(read_rows(records[name])):
            assert row.loss is not None
            (line,) = [line for line in lines if line and line[0].strip("`") == row.label]
            assert line[3].rstrip("\\*") == with_interval(row.loss.mean, row.loss.interval, 4)
            assert not row.edge or line[3].endswith("*")
            assert line[4] == ("one, preliminary" if row.loss.n == 1 else f"{row.loss.n}")
            if row.to_reduced is not None:
                assert line[6] == with_interval(row.to_reduced.mean, row.to_reduced.interval, sign=True)
    heads = {row.label: row.loss for row in finals(read_rows(records["heads-6x256"]))}
    for label, loss in (("msg, heads", "2.07"), ("raptr, heads", "1.84")):
        start = f"| {label} | heads 2-3-4 | 0.916 |"
        (shown,) = [line for line in tables["paper"].splitlines() if line.startswith(start)]
        mean = heads[label]
        assert mean is not None
        assert with_interval(mean.mean, mean.interval, 4) in shown
        assert shown.endswith(f"| {loss} |")
    exponents = tables["scale"].splitlines()[2:]
    assert [line.split("|")[1].strip() for line in exponents] == ["0", "0.5", "1"]
    assert ["**yes**" in line for line in exponents] == [True, False, False]


def test_axes_that_were_not_run_are_said_to_be_missing() -> None:
    none = dict.fromkeys(axes_page.PAGE.records)
    assert set(axes_tables(none).values()) == {"**Not run yet.**"}
    assert axes_page.picture(none) is None

    tables = axes_tables(six_layers() | {"axes-67-6x256": None, "heads-6x256": None})
    assert tables["joint"].count("| not run yet | 0 |") == 7  # full training, reduced, and five more at 0.67
    assert "| msg, heads | heads 2-3-4 | 0.916 | – | not run yet | 0 | – | – | 2.07 |" in tables["paper"]
    assert "- **Heads** (0.92 of the FLOPs): RaPTr was not run yet; MSG's growth was not run yet." in tables["answer"]
    assert "| raptr, heads, idle heads skipped |" in tables["paper"]


def test_axes_with_one_seed_are_called_preliminary_and_drawn_hollow() -> None:
    records = six_layers()
    first = {
        name: record and {**record, "runs": [run for run in record["runs"] if run["seed"] == 0]}
        for name, record in records.items()
    }
    tables = axes_tables(first)
    ran = [line for line in tables["paper"].splitlines()[2:] if "not run yet" not in line]
    assert len(ran) >= 5
    assert all("| one, preliminary |" in line for line in ran)
    assert "±" in axes_tables(records)["answer"]
    assert "±" not in tables["answer"]

    for some in (records, first):
        drawn = fills(some)
        assert drawn["depth and heads"] == drawn["raptr, mlp"] == "none"
        assert drawn["msg, heads"] == drawn["heads and mlp"] == ("none" if some is first else "full")


def drawn_points(records: dict[str, Any]) -> list[Line2D]:
    """The points of the figure, from its first panel to its last."""
    figure = axes_page.picture(records)
    assert figure is not None
    return [line for panel in figure.axes for line in panel.lines if line.get_marker() in ("o", "s")]


def fills(records: dict[str, Any]) -> dict[str, str]:
    """How the point of each entry is filled."""
    return {str(line.get_gid()): str(line.get_fillstyle()) for line in drawn_points(records)}


def test_the_picture_of_the_axes_has_a_panel_for_each_budget_and_marks_what_is_searched() -> None:
    records = six_layers()
    figure = axes_page.picture(records)
    assert figure is not None
    figure.draw_without_rendering()
    assert [panel.get_title(loc="left").split(", ")[1][:4] for panel in figure.axes] == ["0.92", "0.77", "0.69"]
    names = [tick.get_text() for tick in figure.axes[1].get_yticklabels()]
    assert {"depth and heads *", "raptr, mlp *", "msg, mlp", "depth", "heads and mlp"} <= set(names)
    for panel in figure.axes:
        (line,) = [line for line in panel.lines if line.get_gid() == "full"]  # full training of all FLOPs
        assert np.asarray(line.get_xdata())[0] < 0
        boxes = [tick.get_window_extent() for tick in panel.get_yticklabels()]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))

    both = {name: records[name.replace("12x256", "6x256")] for name in records}  # as if 12 layers were run, too
    drawn = axes_page.picture(both)
    assert drawn is not None
    assert len(drawn.axes) == 6
    assert axes_tables(both)["joint"].count("**6 layers of width 256**") == 2


def test_what_is_said_of_the_axes_follows_the_record() -> None:
    records = six_layers()
    width = "**The MLP's width** (0.77 of the FLOPs): RaPTr "
    assert (
        f"{width}0.064 below (one seed, preliminary; learning rate still searched);" in axes_tables(records)["answer"]
    )
    for above, ended in ((0.15, "0.026 ± 0.007 above;"), (-0.15, "0.274 ± 0.007 below;")):
        tables = axes_tables(records | {"mlp-6x256": searched(records["mlp-6x256"], "raptr, mlp", above)})
        assert f"{width}{ended}" in tables["answer"]
    shown = {str(line.get_gid()): np.asarray(line.get_xdata())[0] for line in drawn_points(records)}
    for row in finals(read_rows(records["heads-6x256"])):
        if row.to_reduced is not None and row.label != "full":
            assert shown[row.label] == pytest.approx(row.to_reduced.mean)
