"""What a run shows while it trains, in a terminal and in a file."""

import io
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from raptr.data import TokenStore
from raptr.subnetworks import Shape
from raptr.train import progress
from raptr.train.config import Config
from raptr.train.flops import Flops
from raptr.train.loop import Trainer
from raptr.train.progress import TrainingBar, duration
from raptr.train.run import RunFolder
from tests.train.legs import records

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def bar(output: io.StringIO, *, terminal: bool = False, width: int = 80, device: torch.device = CPU) -> TrainingBar:
    console = Console(file=output, force_terminal=terminal, width=width)
    return TrainingBar(
        console,
        steps=675_000,
        stages=4,
        target=Shape(12, heads=12, parts=4),
        planned=Flops(0, 675_000.0),
        device=device,
    )


def train(store: TokenStore, run: Path, console: Console, **method: str) -> None:
    settings = {"steps": 8, "batch": 4, "eval_samples": 8, "eval_every": 1, "log_every": 1, "device": "cpu"}
    chosen = Config.read(
        {
            "train": settings,
            "method": {"name": "raptr", **method},
            "model": {"width": 16, "heads": 4, "head_size": 4, "mlp": 16},
            "data": {"length": 24, "vocabulary": 600},
        }
    )
    folder = RunFolder(run)
    with folder.opened(chosen):
        Trainer(chosen, folder, store, CPU).train(8, console)


def test_without_a_terminal_each_evaluation_is_a_line(store: TokenStore, tmp_path: Path) -> None:
    output = io.StringIO()
    train(store, tmp_path / "run", Console(file=output, force_terminal=False, width=80))
    lines = output.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [f"step {step} of 8" for step in range(9)]
    for word in ("stage 2 of 4", "4 of 6 layers", "held-out loss", "tokens/s", "left"):
        assert word in lines[3]
    assert [number for number, line in enumerate(lines) if "done" in line] == [2, 4, 6, 8]
    assert "\x1b" not in output.getvalue()


def test_every_reduced_axis_is_shown() -> None:
    shape = Shape(12, heads=12, parts=4)
    assert progress.running({"size": 6, "heads": 9, "parts": 2}, shape) == (
        "6 of 12 layers, 9 of 12 heads, 2 of 4 MLP parts"
    )


@pytest.mark.parametrize("name", ["raptr", "msg"])
def test_lines_and_records_name_what_runs_on_each_reduced_axis(name: str, store: TokenStore, tmp_path: Path) -> None:
    output, sizes = io.StringIO(), {"schedule": "3-4-6-6", "heads": "1-2-2-4", "parts": "1-2-4-4"}
    train(store, tmp_path / "run", Console(file=output, force_terminal=False, width=80), name=name, **sizes)
    shown = [", ".join(line.split(", ")[1:-3]) for line in output.getvalue().splitlines() if "done" in line]
    assert shown == [
        "stage 1 of 4 done, 3 of 6 layers, 1 of 4 heads, 1 of 4 MLP parts",
        "stage 2 of 4 done, 4 of 6 layers, 2 of 4 heads, 2 of 4 MLP parts",
        "stage 3 of 4 done, 6 of 6 layers, 2 of 4 heads",
        "stage 4 of 4 done, 6 of 6 layers",
    ]
    ran = [record for record in records(tmp_path / "run") if record["kind"] == "train"]
    assert [(record.get("heads"), record.get("parts")) for record in ran[1::2]] == [
        (1, 1),
        (2, 2),
        (2, None),
        (None, None),
    ]


def test_several_axes_are_written_shorter_before_they_are_left_out(clock: Clock) -> None:
    with bar(io.StringIO(), terminal=True) as shown:
        for step in (1, 3):
            clock.now += 2
            shown.advance(step, stage=1, counts={"size": 6, "heads": 9, "parts": 2}, spent=step)
        shown.measured(3, loss=10.123, rate=1234.5, spent=3)
        assert "6 of 12 layers, 9 of 12 heads, 2 of 4 MLP parts" in shown.text(120)
        assert "6/12 layers, 9/12 heads, 2/4 MLP parts" in shown.text(90)
        assert "layers" not in shown.text(60)


def test_in_a_terminal_lines_are_for_stages_and_the_bar_for_steps(store: TokenStore, tmp_path: Path) -> None:
    output = io.StringIO()
    train(store, tmp_path / "run", Console(file=output, force_terminal=True, width=80))
    shown = output.getvalue()
    assert shown.count("done") == 4
    assert shown.index("step 0 of 8") < shown.index("stage 1 of 4 done")


def test_step_and_time_left_are_shown_before_the_first_record(clock: Clock) -> None:
    with bar(io.StringIO(), terminal=True) as shown:
        assert shown.text(80) == "step 0 of 675,000  time left: ?"
        shown.advance(1, stage=1, counts={"size": 6}, spent=1.0)
        clock.now += 2
        shown.advance(2, stage=1, counts={"size": 6}, spent=2.0)
        assert shown.text(80) == "step 2 of 675,000  stage 1 of 4  6 of 12 layers  374:59:56 left"


def test_the_bar_shows_the_last_held_out_loss(clock: Clock) -> None:
    with bar(io.StringIO(), terminal=True) as shown:
        for step in (1, 3):
            clock.now += 2
            shown.advance(step, stage=1, counts={"size": 6}, spent=step)
        shown.measured(3, loss=5.25, rate=1234.5, spent=3)
        shown.evaluated(5.5, ended=False)
        assert shown.text(80) == "step 3 of 675,000  6 of 12 layers  loss 5.250  held-out 5.500  187:29:57 left"
        assert "held-out" not in shown.text(60)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_the_line_fits_the_terminal(width: int, clock: Clock) -> None:
    with bar(io.StringIO(), terminal=True, width=width) as shown:
        for step in (99_999, 100_001):
            clock.now += 2
            shown.advance(step, stage=1, counts={"size": 12}, spent=step)
        shown.measured(100_001, loss=10.123, rate=1234.5, spent=100_001)
        text = shown.text(width)
        assert len(text) <= width
        assert text.startswith("step 100,001 of 675,000")
        assert text.endswith("left")
        assert ("tokens/s" in text) == (width > 90)


def test_a_long_run_says_how_long_once(clock: Clock) -> None:
    output = io.StringIO()
    with bar(output) as shown:
        for step in range(1, 9):
            shown.advance(step, stage=1, counts={"size": 12}, spent=step)
            clock.now += 2
    assert output.getvalue().count("16 days more on the CPU") == 1
    assert ("no GPU was found" in output.getvalue()) == (not torch.cuda.is_available())
    assert re.search(r"Memory: [0-9.]+ GiB", output.getvalue())


def test_a_gpu_is_timed_by_what_was_read_back(clock: Clock) -> None:
    output = io.StringIO()
    with bar(output, device=CUDA) as shown:
        for step in range(1, 99):  # asked for, not yet done
            shown.advance(step, stage=1, counts={"size": 12}, spent=step)
            clock.now += 2
        assert "time left: ?" in shown.text(80)
        assert output.getvalue() == ""
        for step in (1, 51):
            shown.measured(step, loss=1.0, rate=1e6, spent=step)
            clock.now += 50
    assert "7.8 days more." in output.getvalue()
    assert f"{674_949 // 3600}:" in shown.text(80)


def test_a_short_run_does_not_say_how_long(clock: Clock) -> None:
    output = io.StringIO()
    with bar(output) as shown:
        for step in range(674_500, 674_600):
            shown.advance(step, stage=4, counts={"size": 12}, spent=step)
            clock.now += 1
    assert output.getvalue() == ""


def test_without_a_terminal_no_ten_minutes_are_silent(clock: Clock) -> None:
    output = io.StringIO()
    with bar(output) as shown:
        for step in (1, 2, 3):
            clock.now += 400
            shown.advance(step, stage=1, counts={"size": 6}, spent=step)
    assert any(line.startswith("step 2 of 675,000, stage 1 of 4") for line in output.getvalue().splitlines())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 seconds"),
        (1.4, "1 second"),
        (1.6, "2 seconds"),
        (40, "40 seconds"),
        (700, "12 minutes"),
        (7200, "2.0 hours"),
        (12.4 * 3600, "12 hours"),
        (1e6, "12 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_where_nothing_tells_the_memory_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress.peak_memory(torch.device("cpu")) > 0
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert progress.peak_memory(torch.device("cpu")) == 0
