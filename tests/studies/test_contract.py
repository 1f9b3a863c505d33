"""What every study shares: the device, an orderly stop, and a summary in the terminal."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from raptr.cli import app
from raptr.files import locked
from raptr.studies.boolean import BOOLEAN
from raptr.studies.contract import conduct
from raptr.studies.findings import FINDINGS, findings, findings_table
from raptr.studies.registry import STUDIES

QUIET = Console(quiet=True)


def test_cuda_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for study in STUDIES.values():
        with pytest.raises(ValueError, match=r"device is cuda.*cpu"):
            conduct(study, tmp_path, seeds=1, small=True, device="cuda", console=QUIET)
    with pytest.raises(ValueError, match=r"device.*tpu.*auto, cpu, cuda"):
        conduct(BOOLEAN, tmp_path, seeds=1, small=True, device="tpu", console=QUIET)


@pytest.mark.parametrize("seeds", [0, 10**30])
def test_seeds_that_are_refused(seeds: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"seeds is {seeds}; .*1 to 1000"):
        conduct(BOOLEAN, tmp_path, seeds=seeds, small=True, device="cpu", console=QUIET)
    with pytest.raises(ValueError, match=rf"steps is {seeds}; "):
        conduct(STUDIES["polynomial-length"], tmp_path, seeds=1, small=True, device="cpu", console=QUIET, steps=[seeds])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "linear").mkdir()
    (tmp_path / "linear" / "linear.png").write_text("mine")
    with pytest.raises(ValueError, match=r"out is '.*linear', a folder without a study that holds linear\.png"):
        conduct(STUDIES["linear"], tmp_path, seeds=1, small=False, device="cpu", console=QUIET)
    assert [path.name for path in (tmp_path / "linear").iterdir()] == ["linear.png"]


def test_other_settings_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    folder = conduct(BOOLEAN, tmp_path, seeds=2, small=True, device="cpu", console=QUIET)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=r"boolean-small has jobs with other settings \(seeds: was 2, now 1\).*--out"):
        conduct(BOOLEAN, tmp_path, seeds=1, small=True, device="cpu", console=QUIET)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_two_studies_in_one_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "boolean-small").mkdir()
    with locked(tmp_path / "boolean-small", "held"), pytest.raises(ValueError, match=r"out is .* another process"):
        conduct(BOOLEAN, tmp_path, seeds=2, small=True, device="cpu", console=QUIET)
    conduct(BOOLEAN, tmp_path, seeds=2, small=True, device="cpu", console=QUIET)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_study_says_that_the_same_command_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "raptr", "study", "boolean", "--out", str(tmp_path), "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "boolean"
    await_that(lambda: any(folder.glob("job-*.json")), process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "same command" in " ".join(said.split())
    assert "Traceback" not in said
    assert not (folder / "result.json").exists()


def await_that(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    """Wait up to a minute for something that a process does."""
    for _ in range(1200):
        if condition():
            return
        assert process.poll() is None
        time.sleep(0.05)
    raise AssertionError("nothing happened")


def test_every_study_has_findings() -> None:
    assert FINDINGS.keys() == {*STUDIES, "stability"}


def test_the_command_ends_with_what_came_out(tmp_path: Path) -> None:
    environment = {**os.environ, "COLUMNS": "160"}
    arguments = ["study", "boolean", "--small", "--seeds", "1", "--out", str(tmp_path), "--device", "cpu"]
    done = CliRunner().invoke(app, arguments, env=environment)
    assert done.exit_code == 0
    result = json.loads((tmp_path / "boolean-small" / "result.json").read_text(encoding="utf-8"))
    for finding in findings(result):
        assert finding.number in done.stdout, finding


def loss(mean: float | None) -> dict[str, Any]:
    return {"loss": (mean, None if mean is None else 0.25)}


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (
            {"study": "polynomial", "methods": {"full": loss(1.5), "raptr": loss(None), "pld": {"loss": (2.5, 0.0)}}},
            [("full", "1.5 ± 0.25"), ("raptr", "diverged"), ("pld", "2.5")],
        ),
        (
            {"study": "polynomial-length", "lengths": [{"steps": 4000, "methods": {"pld-matched": loss(2.0)}}]},
            [("pld-matched, 4,000", "2 ± 0.25")],
        ),
        (
            {
                "study": "linear",
                "setting": {"widths": [100, 400], "shared": ["spread"]},
                "cases": [
                    {
                        "width": width,
                        "shared": "spread",
                        "architecture": "residual + norm",
                        "tau": 0.25,
                        "gap_exponent": {"mean": -0.68, "low": -0.69, "high": -0.67},
                    }
                    for width in (100, 400)
                ],
            },
            [("τ = 0.25", "−0.68 (−0.69 to −0.67)")],
        ),
        (
            {
                "study": "scaling",
                "setting": {"widths": [64, 256], "depth": 24, "sizes": [6, 8]},
                "theorem": [
                    {"width": width, "case": "all one", "last": {"mean": mean, "low": 1.5, "high": 1.7}}
                    for width, mean in ((64, 1.4), (256, 1.6))
                ],
                "models": {
                    "paper": {
                        "layer": {"mean": 0.725, "low": None, "high": None},
                        "parts": {
                            f"{size} sqrt": {"end": {"mean": size / 6, "low": None, "high": None}} for size in (6, 8)
                        },
                    }
                },
            },
            [("all one", "1.60 (1.50 to 1.70)"), ("paper: what a layer adds", "0.725"), ("6 layers / of all", "1.00")],
        ),
        (
            {
                "study": "stability",
                "gap": {"mean": 0.0037, "low": None, "high": None},
                "exponents": {name: {"mean": 0.3, "low": 0.2, "high": 0.4} for name in ("norm", "psi")},
            },
            [("norm", "0.30 (0.20 to 0.40)"), ("Ψ", "0.30 (0.20 to 0.40)"), ("loss", "0.0037")],
        ),
    ],
)
def test_findings(result: dict[str, Any], shown: list[tuple[str, str]]) -> None:
    found = findings(result)
    assert len(found) == len(shown)
    for finding, (quantity, number) in zip(found, shown, strict=True):
        assert quantity in finding.quantity
        assert finding.number == number
    assert findings_table(result).row_count == len(shown)


@pytest.mark.parametrize(("option", "value"), [("seeds", "3"), ("steps", "50"), ("small", None)])
def test_stability_refuses_what_it_does_not_take(tmp_path: Path, option: str, value: str | None) -> None:
    arguments = ["study", "stability", str(tmp_path), f"--{option}", *([value] if value else [])]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ValueError)
    assert f"{option} is" in str(done.exception)
    assert "stability" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["stability"], "stability.*run"),
        (["linear", "x"], "run.*'x'.*linear"),
        (["linear", "--step", "3"], "step is 3.*linear"),
    ],
)
def test_a_run_is_for_stability_alone(tmp_path: Path, arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["study", *arguments, "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, ValueError)
    assert re.search(named, str(done.exception))
    assert not (tmp_path / "out").exists()
