"""Reports from run folders: reading what a run wrote, the table's numbers and what the plot shows."""

import ast
import json
import math
import random
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console

import raptr.report
from raptr.files import locked
from raptr.report import write_report
from raptr.report.page import render
from raptr.report.plots import draw_losses, save, smooth
from raptr.report.runs import read_run
from raptr.report.tables import dicts, markdown, rich_table, summary
from raptr.report.units import FLOP_PREFIXES, counted, duration, short, step_time, time_unit

LAYERS = 12


def make_run(
    folder: Path,
    *,
    schedule: str | None = None,
    steps: int = 1000,
    every: int = 10,
    eval_every: int = 100,
    floor: float = 3.2,
) -> Path:
    """Write a plausible run folder; a schedule makes it a RaPTr run with equal stages."""
    folder.mkdir(parents=True)
    sizes = [int(size) for size in schedule.split("-")] if schedule else [LAYERS]
    method = {"name": "raptr", "schedule": schedule} if schedule else {"name": "full"}
    config = {"method": method, "train": {"steps": steps, "seed": 0, "batch": 32}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "environment.json").write_text(json.dumps([{"python": "3.11"}]))
    (folder / "metrics.jsonl").touch()
    layers_done = 0
    for step in range(steps + 1):
        # The record after `step` steps describes step number `step - 1`.
        stage = max(0, step - 1) * len(sizes) // steps
        layers_done += sizes[stage] if step else 0
        full = floor + 1.8 * math.exp(-3 * step / steps) + 4.4 * math.exp(-40 * step / steps)
        gap = 0.06 * (LAYERS - sizes[stage])
        cost = {
            "tokens": 4096 * step,
            "flops": 10**12 * (layers_done + 3 * step),
            "flops_layers": 10**12 * layers_done,
            "seconds": round(0.01 * (layers_done + 3 * step), 3),
        }
        if step and step % every == 0:
            record = {"kind": "train", "step": step, "stage": stage + 1, "stages": len(sizes)}
            record |= {"size": sizes[stage], "lr": 1e-3, "grad_norm": 1.0, **cost}
            append(folder, {**record, "loss": full + gap + random.Random(step).gauss(0, 0.1)})
        if step % eval_every == 0:
            append(folder, {"kind": "eval", "step": step, "loss": full + 0.4 * gap, **cost})
    return folder


def append(folder: Path, record: Mapping[str, Any] | str) -> None:
    """Append a record, or text as it is, to a run's metrics."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(record if isinstance(record, str) else json.dumps(record) + "\n")


def train_record(step: int, **values: Any) -> dict[str, Any]:
    record = {"kind": "train", "step": step, "stage": 1, "stages": 1, "size": 12, "loss": 5.0, "lr": 1e-3}
    return record | {"tokens": step, "flops": step, "flops_layers": step, "seconds": 1.0} | values


def eval_record(step: int, **values: Any) -> dict[str, Any]:
    record = {"kind": "eval", "step": step, "loss": 5.0, "tokens": step, "flops": step}
    return record | {"flops_layers": step, "seconds": 1.0} | values


def empty_run(folder: Path) -> Path:
    """A run folder whose metrics hold nothing yet."""
    make_run(folder, steps=1)
    (folder / "metrics.jsonl").write_text("")
    return folder


def panels(figure: Figure) -> tuple[Axes, Axes]:
    left, right = figure.axes
    return left, right


def lines(axes: Axes, kind: str) -> list[Line2D]:
    """The lines of a kind (`eval`, `train`, `stage`) in the order of the runs."""
    return [line for line in axes.lines if line.get_gid() == kind][::-1]


def data(line: Line2D) -> tuple[list[float], list[float]]:
    x, y = line.get_data()
    return np.asarray(x, dtype=float).tolist(), np.asarray(y, dtype=float).tolist()


# Reading


def test_two_reports_in_one_folder_are_refused(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "report"
    out.mkdir()
    with locked(out, "held"), pytest.raises(ValueError, match=r"out is .*report', where another process writes"):
        write_report([run], out)
    assert not list(out.iterdir())
    assert write_report([run], out).page.exists()


def test_a_run_is_read_whole(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", schedule="6-8-10-12", steps=400))
    assert (run.name, run.method, run.schedule) == ("a", "raptr", "6-8-10-12")
    assert run.config["train"]["steps"] == 400
    assert run.environment == {"python": "3.11"}
    assert [record.step for record in run.evals] == [0, 100, 200, 300, 400]
    assert [record.step for record in run.train] == list(range(10, 401, 10))
    assert (run.train[-1].size, run.train[-1].stages, run.train[-1].lr) == (12, 4, 1e-3)
    assert run.last.tokens == 400 * 4096
    assert run.ignored == ()


def test_stages_end_where_the_record_of_the_next_follows(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", schedule="6-8-12", steps=300))
    assert [(t.step, t.stage) for t in run.transitions] == [(100, 1), (200, 2)]
    assert [t.flops for t in run.transitions] == [100 * 9e12, 100 * 9e12 + 100 * 11e12]


def test_a_torn_last_line_is_dropped_without_being_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=100)
    append(folder, json.dumps(train_record(110))[:-9])
    run = read_run(folder)
    assert run.train[-1].step == 100
    assert run.ignored == ()


def test_a_last_line_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=100)
    append(folder, json.dumps(train_record(110)))
    assert read_run(folder).train[-1].step == 110


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "train", "step": 1\n',
        "[1, 2]\n",
        '{"step": 10}\n',
        json.dumps(train_record(10, loss="low")) + "\n",
        json.dumps({"kind": "eval", "step": 10}) + "\n",
        json.dumps(eval_record(10, sizes=[3, 6.6])) + "\n",
        json.dumps(eval_record(10, sizes={"many": 6.6})) + "\n",
        json.dumps(train_record(-10)) + "\n",
        json.dumps(train_record(10, stage=-1)) + "\n",
        json.dumps(train_record(10, seconds=-1.0)) + "\n",
        json.dumps(train_record(10, seconds=math.nan)) + "\n",
        json.dumps(train_record(10, flops=math.inf)) + "\n",
        json.dumps(train_record(10, tokens=10**400)) + "\n",
        json.dumps(train_record(10, tokens=10**60)) + "\n",
        json.dumps(train_record(10**30)) + "\n",
        json.dumps(train_record(10, size=10**400)) + "\n",
        json.dumps(train_record(10, loss=10**400)) + "\n",
        json.dumps(train_record(10, lr="fast")) + "\n",
        json.dumps(train_record(10)).replace("5.0", "1" * 5000) + "\n",
        "[" * 100_000 + "\n",
        '{"kind": "train", "step": ' + '{"a": ' * 100_000 + "\n",
        '{"kind": ["train"]}\n',
        "\0\n",
    ],
    ids=lambda line: line[:60],
)
def test_malformed_lines_are_ignored_and_counted(tmp_path: Path, line: str) -> None:
    folder = empty_run(tmp_path / "a")
    append(folder, train_record(5))
    append(folder, line)
    append(folder, train_record(20))
    run = read_run(folder)
    assert [record.step for record in run.train] == [5, 20]
    assert run.ignored == (2,)


@pytest.mark.parametrize("loss", ["1e400", "-1e400", "NaN", "Infinity", "1e308", "-1e308", "1e-400", "-5"])
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_report_of_absurd_losses_is_written(tmp_path: Path, kind: str, loss: str) -> None:
    folder = make_run(tmp_path / "a", schedule="6-12", steps=20)
    for step in (21, 22):
        record = train_record(step) if kind == "train" else eval_record(step, domains={"d": 2.5}, sizes={"6": 5.0})
        append(folder, json.dumps(record).replace("5.0", loss) + "\n")
    report = write_report([folder, make_run(tmp_path / "b", steps=20)], tmp_path / "report")
    assert read_run(folder).ignored == ()
    assert json.loads(report.json.read_text())[0]["steps"] == 22
    assert report.plot.stat().st_size > 10_000


def test_a_run_of_nothing_but_malformed_lines_says_where_they_are(tmp_path: Path) -> None:
    folder = empty_run(tmp_path / "a")
    append(folder, "\n[1]\n")
    with pytest.raises(ValueError, match=r"a has no records.*metrics\.jsonl.*line 2"):
        read_run(folder)


def test_blank_lines_and_unknown_kinds_are_no_fault(tmp_path: Path) -> None:
    folder = empty_run(tmp_path / "a")
    append(folder, train_record(5))
    append(folder, "\n")
    append(folder, {"kind": "note", "text": "resumed"})
    run = read_run(folder)
    assert len(run.train) == 1
    assert run.ignored == ()


def test_the_last_record_of_a_kind_and_step_wins_after_a_resume(tmp_path: Path) -> None:
    folder = empty_run(tmp_path / "a")
    for step in (10, 20, 30):
        append(folder, train_record(step, loss=9.0))
    append(folder, eval_record(20, loss=8.0))
    append(folder, train_record(20, loss=4.0, grad_norm=None))
    append(folder, eval_record(20, loss=3.0, sizes={"3": 6.6}))
    run = read_run(folder)
    assert [(record.step, record.loss) for record in run.train] == [(10, 9.0), (20, 4.0), (30, 9.0)]
    assert [(record.step, record.loss, record.sizes) for record in run.evals] == [(20, 3.0, {3: 6.6})]


def test_where_several_starts_ran(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=10)
    starts = [
        {"step": 0, "data": "f", "gpu": None, "threads": 2},
        {"step": 4, "data": "f", "gpu": "H200", "threads": 2},
    ]
    (folder / "environment.json").write_text(json.dumps([*starts, {**starts[1], "step": 6}]))
    assert read_run(folder).environment == {"gpu": "None, then H200", "threads": 2}


def test_runs_on_different_data_are_named(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name) for name in ("old", "one", "same", "other")]
    for folder, data in zip(folders[1:], ("aa", "aa", "bb"), strict=True):
        (folder / "environment.json").write_text(json.dumps([{"step": 0, "data": data}]))
    old, one, same, other = map(read_run, folders)
    assert "different data" in markdown(summary([old, one, other]))
    assert "different data" not in markdown(summary([old, one, same]))


@pytest.mark.parametrize("file", ["config.yaml", "environment.json", "metrics.jsonl"])
def test_a_folder_without_a_file_is_refused_by_its_name(tmp_path: Path, file: str) -> None:
    folder = make_run(tmp_path / "a", steps=10)
    (folder / file).unlink()
    with pytest.raises(ValueError, match=rf"{folder}.*{file}"):
        read_run(folder)


def test_what_is_no_folder_or_holds_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path / "nothing")):
        read_run(tmp_path / "nothing")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'a'}.*metrics\.jsonl"):
        read_run(empty_run(tmp_path / "a"))


@pytest.mark.parametrize(
    ("file", "text", "language"),
    [
        ("config.yaml", "a: [1", "YAML"),
        ("config.yaml", "- 1", "mapping.*list"),
        ("environment.json", "{", "JSON"),
        ("environment.json", '{"a":' * 100_000, "JSON"),
        ("config.yaml", "[" * 10_000, "YAML"),
        ("config.yaml", "a: \udcff", "YAML"),
        ("environment.json", "[]", "list"),
        ("environment.json", "[3]", "list"),
        ("environment.json", '{"python": "3.11"}', "list"),
    ],
)
def test_unreadable_settings_are_refused(tmp_path: Path, file: str, text: str, language: str) -> None:
    folder = make_run(tmp_path / "a", steps=10)
    (folder / file).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=rf"{file}.*{language}"):
        read_run(folder)


def test_a_schedule_names_every_axis(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "config.yaml").write_text("method: {name: raptr, schedule: 6-9-12, heads: null, parts: 1-2-4}")
    assert read_run(folder).schedule == "6-9-12, MLP 1-2-4"


def test_a_schedule_given_as_a_list_reads_like_one_given_as_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=10)
    (folder / "config.yaml").write_text("method: {name: raptr, schedule: [6, 8, 12]}")
    assert read_run(folder).schedule == "6-8-12"


# Tables


def test_rows_hold_results_and_costs(tmp_path: Path) -> None:
    staged = read_run(make_run(tmp_path / "staged", schedule="6-8-10-12"))
    full = read_run(make_run(tmp_path / "full"))
    row, base = summary([staged, full])
    assert (row.name, row.method, row.schedule, row.steps) == ("staged", "raptr", "6-8-10-12", 1000)
    assert row.eval_loss == staged.evals[-1].loss
    # 100 train records: the last 5% are five.
    assert row.train_loss == pytest.approx(sum(record.loss for record in staged.train[-5:]) / 5)
    assert row.tokens == 4096 * 1000
    assert row.flops == 12e15
    assert row.relative_flops == pytest.approx(12 / 15)
    assert row.relative_flops_layers == pytest.approx(9 / 12)
    assert row.seconds == 120.0
    assert row.tokens_per_second == pytest.approx(4096 * 1000 / 120)
    assert (base.relative_flops, base.schedule, row.relative_to) == (1.0, None, "full")


def test_costs_are_relative_to_the_largest_where_steps_differ(tmp_path: Path) -> None:
    full = read_run(make_run(tmp_path / "full", steps=100))
    longer = read_run(make_run(tmp_path / "longer", schedule="6-12", steps=200))
    rows = summary([full, longer])
    assert {row.relative_to for row in rows} == {"longer"}
    assert rows[0].relative_flops == pytest.approx(1500 / 2400)


def test_rows_leave_open_what_the_records_do_not_tell(tmp_path: Path) -> None:
    folder = empty_run(tmp_path / "a")
    append(folder, eval_record(0, seconds=0.0))
    (row,) = summary([read_run(folder)])
    assert (row.train_loss, row.relative_flops, row.tokens_per_second) == (None, None, None)
    (folder / "metrics.jsonl").write_text(json.dumps(train_record(1)) + "\n")
    (row,) = summary([read_run(folder)])
    assert (row.train_loss, row.eval_loss) == (5.0, None)


def test_runs_of_one_name_are_told_apart_by_their_parents(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / parent / "full", steps=10)) for parent in ("a", "b")]
    assert [row.name for row in summary(runs)] == ["a/full", "b/full"]


def test_markdown_has_a_cell_for_every_column(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "six|twelve", schedule="6-12", steps=100)
    append(folder, "torn{\n")
    runs = [read_run(make_run(tmp_path / "full", steps=100)), read_run(folder)]
    table = markdown(summary(runs)).splitlines()
    assert table[0].startswith("| run | method | schedule | steps | train loss | held-out loss |")
    assert table[2].startswith("| full | full | – | 100 | ")
    assert table[3].startswith(r"| six\|twelve | raptr | 6-12 | 100 | ")
    assert table[3].endswith(" | 410k | 1.2P | 0.80 | 0.75 | 12s | 34.1k |")
    assert any(re.search(r"relative to full\b", line) for line in table)
    lines = len((folder / "metrics.jsonl").read_text().splitlines())
    assert any(re.search(rf"ignored in six\\\|twelve: 1 .*metrics\.jsonl, line {lines}\b", line) for line in table)


def test_names_are_no_html_in_markdown(tmp_path: Path) -> None:
    names = ["<b>bold</b>", "[x](javascript:alert(1))", "a&b", "*star*_under_`code`"]
    runs = [read_run(make_run(tmp_path / name.replace("/", "-"), steps=10)) for name in names]
    text = markdown(summary(runs))
    assert "<" not in text
    assert "&lt;b&gt;bold&lt;-b&gt;" in text
    assert r"\[x\](javascript:alert(1))" in text
    assert "a&amp;b" in text
    assert r"\*star\*\_under\_\`code\`" in text


def test_one_run_alone_is_relative_to_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "six", schedule="6-12", steps=100)
    (folder / "config.yaml").write_text("method: {name: raptr, schedule: 6-12}\ntrain: {steps: 400}\n")
    table = markdown(summary([read_run(folder)]))
    assert "relative" not in table
    assert re.search(r"^six .*100 of 400", table, re.MULTILINE)


def test_the_terminal_table_fits_80_characters_and_takes_names_literally(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name, schedule="6-8-10-12", steps=20)) for name in ("[red]a", "b", "c")]
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    with console.file:
        console.print(rich_table(summary(runs)))
        text = console.export_text()
    assert "[red]a" in text
    assert text.count("6-8-10-12") == 3
    assert "layers only, relative" in text


def test_many_runs_are_lines_that_fit_80_characters(tmp_path: Path) -> None:
    names = [f"run-{letter}" for letter in "abcdefg"]
    runs = [read_run(make_run(tmp_path / name, schedule="6-8-10-12", steps=20)) for name in names]
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    with console.file:
        console.print(rich_table(summary(runs)))
        lines = console.export_text().splitlines()
    for name, row in zip(names, summary(runs), strict=True):
        assert row.eval_loss is not None
        assert sum(name in line and f"{row.eval_loss:.3f}" in line for line in lines) == 1


def test_json_has_no_nan(tmp_path: Path) -> None:
    folder = empty_run(tmp_path / "a")
    append(folder, train_record(1, loss=math.nan))
    append(folder, eval_record(1, loss=math.inf))
    (row,) = dicts(summary([read_run(folder)]))
    assert (row["train_loss"], row["eval_loss"], row["steps"]) == (None, None, 1)
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (999_960, "1M"), (40_960, "41k"), (1.234e9, "1.23B"), (5e15, "5,000T")],
)
def test_counts_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_flops_have_their_own_prefixes() -> None:
    assert short(2.5e15, FLOP_PREFIXES, " ") == "2.5 P"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4s"), (59.4, "59s"), (59.7, "1m 00s"), (192, "3m 12s"), (3599.8, "1h 00m"), (7500, "2h 05m")],
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (3.2e-5, "32 µs"), (0.04213, "42.1 ms"), (0.99999, "1 s"), (1.254, "1.25 s"), (95.0, "95 s")],
)
def test_times_of_steps_have_three_digits(seconds: float, text: str) -> None:
    assert step_time(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [(0, "seconds"), (119, "seconds"), (120, "minutes"), (7200, "hours"), (2 * 86400, "days")],
)
def test_a_plot_of_times_has_a_fitting_unit(seconds: float, unit: str) -> None:
    assert time_unit(seconds)[1] == unit


def test_layers_are_counted_in_words() -> None:
    assert [counted(size, "layer") for size in (1, 6, 7.25)] == ["1 layer", "6 layers", "7.25 layers"]


# Plots


def test_both_panels_hold_the_held_out_losses(tmp_path: Path) -> None:
    runs = [
        read_run(make_run(tmp_path / "full")),
        read_run(make_run(tmp_path / "staged", schedule="6-8-10-12")),
    ]
    left, right = panels(draw_losses(runs))
    for axes, position, divisor in ((left, "step", 1), (right, "flops", 1e15)):
        assert len(lines(axes, "eval")) == 2
        for run, line in zip(runs, lines(axes, "eval"), strict=True):
            x, y = data(line)
            assert x == pytest.approx([getattr(record, position) / divisor for record in run.evals])
            assert y == [record.loss for record in run.evals]
    assert "PFLOP" in right.get_xlabel()
    assert left.get_ylim() == right.get_ylim()


def test_training_losses_and_stages_share_their_runs_colour(tmp_path: Path) -> None:
    runs = [
        read_run(make_run(tmp_path / "full")),
        read_run(make_run(tmp_path / "staged", schedule="6-8-10-12")),
    ]
    left, right = panels(draw_losses(runs))
    for axes in (left, right):
        colours = [line.get_color() for line in lines(axes, "eval")]
        assert len(set(colours)) == 2
        assert [line.get_color() for line in lines(axes, "train")] == colours
        assert {line.get_color() for line in lines(axes, "stage")} == {colours[1]}
    assert sorted(data(line)[0][0] for line in lines(left, "stage")) == [250, 500, 750]
    flops = [2.25, 2.25 + 2.75, 2.25 + 2.75 + 3.25]
    assert sorted(data(line)[0][0] for line in lines(right, "stage")) == pytest.approx(flops)


def test_the_early_cliff_is_cut_and_the_end_is_shown(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "full"))
    low, high = panels(draw_losses([run]))[0].get_ylim()
    assert run.evals[0].loss > high > run.evals[1].loss
    assert low < run.evals[-1].loss


def test_a_divergence_does_not_squash_the_plot(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "full")
    append(folder, eval_record(1000, loss=1e9))
    append(folder, train_record(990, loss=math.nan))
    run = read_run(folder)
    low, high = panels(draw_losses([run]))[0].get_ylim()
    assert 0 < low < high < 1.2 * run.evals[0].loss


def test_one_staged_run_has_its_sizes_above_the_panels(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "staged", schedule="6-8-10-12"))
    for axes in panels(draw_losses([run])):
        assert [text.get_text() for text in axes.texts] == [f"{size} layers" for size in (6, 8, 10, 12)]


def test_the_legend_takes_names_literally_and_tells_the_end(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name, steps=100)) for name in ("_a", "$b$")]
    (legend,) = draw_losses(runs).legends
    loss = runs[0].evals[-1].loss
    assert [text.get_text() for text in legend.get_texts()] == [
        f"_a: {loss:.3f} at 1.5 PFLOP",
        f"$b$: {loss:.3f} at 1.5 PFLOP",
    ]
    assert not any(text.get_parse_math() for text in legend.get_texts())


def test_many_runs_keep_room_for_the_curves(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "full", steps=100))
    figure = draw_losses([replace(run, name=f"a rather long name of run {index}") for index in range(40)])
    figure.draw_without_rendering()
    assert all(axes.get_position().height > 0.4 for axes in figure.axes)
    assert figure.legends[0].get_texts()[-1].get_text() == "and 29 more"


def test_a_run_without_evaluation_or_without_training_is_drawn(tmp_path: Path) -> None:
    folder = empty_run(tmp_path / "a")
    append(folder, eval_record(0, loss=9.0))
    save(draw_losses([read_run(folder)]), tmp_path / "start.png")
    (folder / "metrics.jsonl").write_text(json.dumps(train_record(1, loss=math.nan)) + "\n")
    save(draw_losses([read_run(folder)]), tmp_path / "train.png")
    assert (tmp_path / "start.png").stat().st_size > 0
    assert (tmp_path / "train.png").stat().st_size > 0


def test_smoothing_averages_within_a_stage_and_keeps_gaps() -> None:
    assert smooth([1, 2, 3, 4, 5, 60], [1, 1, 1, 1, 1, 2]) == [2.0, 2.5, 3.0, 3.5, 4.0, 60.0]
    gap = smooth([1.0, math.nan, 3.0], [1, 1, 1])
    assert gap[::2] == [2.0, 2.0]
    assert math.isnan(gap[1])


def test_a_plot_of_no_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        draw_losses([])


# The whole report


def test_a_report_is_a_page_a_plot_and_two_tables(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "full", steps=200),
        make_run(tmp_path / "staged", schedule="6-12", steps=200),
    ]
    report = write_report(folders, tmp_path / "deep" / "out")
    assert {path.name for path in (tmp_path / "deep" / "out").iterdir()} == {
        "report.html",
        "losses.png",
        "table.md",
        "table.json",
    }
    header = report.plot.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:24]) == (1600, 650)
    rows = summary([read_run(folder) for folder in folders])
    assert json.loads(report.json.read_text()) == dicts(rows)
    assert report.markdown.read_text() == markdown(rows)
    assert report.page.read_text() == render([read_run(folder) for folder in folders])
    assert len(report.table.columns) == 3


def test_a_strangers_folder_stays_as_it_is(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", steps=20), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("not ours")
    (out / "scores.png").write_text("not ours either")
    with pytest.raises(ValueError, match=rf"out is .*{out.name}.*notes\.txt"):
        write_report([run], out)
    assert sorted(path.name for path in out.iterdir()) == ["notes.txt", "scores.png"]


def test_notes_beside_a_report_are_no_obstacle(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", steps=20), tmp_path / "out"
    write_report([run], out)
    (out / "notes.txt").write_text("what we saw")
    write_report([run], out)
    assert (out / "notes.txt").exists()


def test_a_report_of_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run folder"):
        write_report([], tmp_path / "out")


def test_the_report_imports_neither_training_nor_torch() -> None:
    imported = set()
    for file in Path(raptr.report.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or ".")
    assert "matplotlib.figure" in imported
    inside = {name for name in imported if name.split(".")[0] in ("raptr", "torch", "") or name == "."}
    assert inside
    assert all(name.startswith(("raptr.report.", "raptr.files")) for name in inside)
