"""The command line as a new user meets it: the whole way once, and every kind of wrong input."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from raptr.cli import main
from raptr.methods import METHODS
from raptr.recipes import RECIPES
from raptr.train.config import Config


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["raptr", *arguments])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_from_command_to_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["--steps", "8", "--batch", "4", "--length", "32", "--set", "data.vocabulary=1024"]
    common += ["--set", "optimizer.warmup=2", "--set", "train.eval_samples=8", "--set", "train.log_every=1"]
    assert call(monkeypatch, "pretrain", *common, "--until", "5") == 0
    assert "stopped after step 5 of 8" in capsys.readouterr().err
    assert call(monkeypatch, "pretrain", *common) == 0
    said = capsys.readouterr().err
    assert "going on from step 5 of 8" in said
    assert "Python standard library" in said
    assert "runs/demo-raptr/export" in said
    environment = (tmp_path / "runs/demo-raptr/environment.json").read_text()
    assert call(monkeypatch, "pretrain", *common) == 0
    again = capsys.readouterr().err
    assert "finished: step 8 of 8" in again
    assert "runs/demo-raptr/export" in again
    assert "runs/demo-raptr/report/report.html" in again
    assert (tmp_path / "runs/demo-raptr/environment.json").read_text() == environment
    assert (tmp_path / "runs/demo-raptr/report/losses.png").exists()
    assert "page    runs/demo-raptr/report/report.html" in said
    assert call(monkeypatch, "pretrain", *common, "--method", "full", "--run", "runs/full") == 0
    assert call(monkeypatch, "report", "runs/demo-raptr", "runs/full", "--out", "both") == 0
    assert "page    both/report.html" in capsys.readouterr().out
    assert (tmp_path / "both" / "report.html").exists()
    rows = json.loads((tmp_path / "both" / "table.json").read_text())
    assert {row["method"] for row in (rows["runs"] if isinstance(rows, dict) else rows)} == {"raptr", "full"}
    saved = yaml.safe_load((tmp_path / "runs/demo-raptr/config.yaml").read_text())
    assert Config.read(saved).mapping() == saved
    assert call(monkeypatch, "pretrain", *common, "--seed", "1") == 2
    assert "train.seed: was 0, now 1" in capsys.readouterr().err


def test_a_run_that_grows_from_command_to_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["--method", "msg", "--steps", "8", "--batch", "4", "--length", "32", "--set", "data.vocabulary=1024"]
    common += ["--set", "optimizer.warmup=2", "--set", "train.eval_samples=8", "--set", "train.log_every=1"]
    assert call(monkeypatch, "pretrain", *common, "--until", "4") == 0  # the model grows in step 4
    assert call(monkeypatch, "pretrain", *common) == 0
    said = capsys.readouterr().err
    assert "going on from step 4 of 8" in said
    assert "stage 4/4 done" in said
    exported = json.loads((tmp_path / "runs/demo-msg/export/config.json").read_text())
    assert exported["num_hidden_layers"] == 6
    assert (tmp_path / "runs/demo-msg/report/losses.png").exists()
    saved = yaml.safe_load((tmp_path / "runs/demo-msg/config.yaml").read_text())
    assert saved["method"]["schedule"] == "3-4-5-6"
    assert Config.read(saved).mapping() == saved


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_plan(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "pretrain", "--method", method, "--dry-run") == 0
    assert f"{method}: 6 layers, 800 steps" in capsys.readouterr().out
    assert call(monkeypatch, "plan", "--method", method, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["layers"] == 12
    assert made["rows"][-1]["stop"] == 100_000


def test_plan_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "12-16-20-24", "--layers", "24", "--steps", "400000", "--lengths", "proportional"]
    assert call(monkeypatch, *arguments, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert [row["start"] for row in made["rows"]] == [0, 40_000, 120_000, 240_000]
    assert made["average"] == pytest.approx(20)
    assert made["relative_layers"] == pytest.approx(20 / 24)
    assert 20 / 24 < made["relative_model"] < 0.85
    assert call(monkeypatch, *arguments) == 0
    assert "40,000 – 119,999" in capsys.readouterr().out


def test_dry_run_shows_settings_and_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "pretrain", "bert-base", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "schedule: 6-8-10-12" in shown
    assert "0 – 168,749" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "demo"])
def test_only_the_demo_trains_on_the_built_in_text_unasked(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "pretrain", recipe) == 2
    said = capsys.readouterr().err
    assert "data.source" in said
    assert "--data builtin" in said
    assert not list(tmp_path.rglob("*.tokens"))


def test_another_size_has_its_own_dimensions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "pretrain", "--dry-run") == 0
    shown, _, _ = capsys.readouterr().out.partition("raptr: 6 layers")
    (tmp_path / "run.yaml").write_text(shown.rpartition("\n\n")[0])
    method = ["--method", "full"]
    assert call(monkeypatch, "pretrain", "--config", "run.yaml", *method, "--size", "base", "--dry-run") == 0
    chosen = capsys.readouterr().out
    assert "full: 12 layers" in chosen
    assert "width: 768" in chosen
    layers = ["--set", "model.layers=3"]
    assert call(monkeypatch, "pretrain", "--config", "run.yaml", *method, "--size", "base", *layers, "--dry-run") == 0
    assert "full: 3 layers" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["pretrain"], ["plan"], ["compare"], ["report"]])
def test_help(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, *arguments, "--help") == 0
    assert "Usage: raptr" in capsys.readouterr().out


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_complete_and_name_their_command(name: str) -> None:
    Config.read(RECIPES[name]())
    command = "raptr pretrain" if name == "demo" else f"raptr pretrain {name} --data FOLDER"
    assert f"Command: {command}\n" in (RECIPES[name].__doc__ or "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pretrain", "bert-bse"], "recipe is 'bert-bse'; did you mean 'bert-base'? allowed: demo"),
        (["pretrain", "--method", "rapter"], "method is 'rapter'; did you mean 'raptr'? allowed: full"),
        (["pretrain", "--set", "method.scalng=none"], "has no setting 'scalng'; did you mean 'scaling'?"),
        (["pretrain", "--set", "method.seed=3"], "method.seed is no setting; it is set by train.seed"),
        (["plan", "--set", "method.shape=3"], "method.shape is no setting; it is set by the model's dimensions"),
        (["pretrain", "--data", "nosuch", "--dry-run"], "nosuch"),
        (["pretrain", "--set", "optimizer.pek=1"], "optimizer.pek is no setting; did you mean 'peak'?"),
        (
            ["pretrain", "--set", "optimiser.peak=1"],
            "optimiser is no section of the configuration; did you mean",
        ),
        (["pretrain", "--set", "optimizer.peak=high"], "optimizer.peak is 'high'; a number is allowed"),
        (["pretrain", "--set", "train.steps=1.5"], "train.steps is 1.5; a whole number is allowed"),
        (["pretrain", "--set", "optimizer.idle=nap"], "optimizer.idle is 'nap'; zero or skip is allowed"),
        (["pretrain", "--set", "peak"], "--set is 'peak'; SECTION.KEY=VALUE is allowed"),
        (["pretrain", "--set", "method.fixed=9"], "fixed is 9; a list with each entry a whole number or a list"),
        (["pretrain", "--schedule", "3-9"], "size 9 is out of range; 1 to 6 layers are allowed"),
        (["pretrain", "--schedule", "three"], "schedule is 'three'; sizes joined by hyphens are allowed"),
        (["pretrain", "--schedule", "3-4"], "schedule ends with 4 layers"),
        (["pretrain", "--steps", "0"], "train.steps is 0; a whole number from 1"),
        (["pretrain", "--batch", "5", "--set", "train.accumulate=2"], "train.accumulate is 2; a divisor"),
        (["pretrain", "--size", "huge"], "model.size is 'huge'; allowed: tiny, mini"),
        (["pretrain", "--device", "tpu"], "train.device is 'tpu'; allowed: auto, cpu, cuda"),
        (["pretrain", "--length", "4"], "data.length is 4; a whole number from 8"),
        (["pretrain", "--until", "0"], "until is 0; a whole number from 1 on is allowed"),
        (["pretrain", "--set", "method.heads=1-2-3-4"], "only zero is allowed"),
        (["pretrain", "--set", "train.eval_sizes=[9]"], "train.eval_sizes has 9; 1 to 6 layers are allowed"),
        (["pretrain", "--set", "train.steps="], "train.steps"),
        (["pretrain", "--set", "train.steps=null"], "train.steps"),
        (["pretrain", "--set", "data.source=# a comment"], "data.source"),
        (["pretrain", "--set", "train.steps={"], "train.steps"),
        (["pretrain", "--set", "train.steps=2026-13-01"], "train.steps"),
        (["pretrain", "--set", "train.steps=" + "[" * 9000], "train.steps"),
        (["pretrain", "--set", "model.layers=2000000000"], "model.layers is 2000000000"),
        (["pretrain", "--steps", str(10**30)], f"train.steps is {10**30}"),
        (["pretrain", "--lr", "1e38"], "optimizer.peak is 1e+38"),
        (["pretrain", "--config", "missing.yaml"], "missing.yaml: No such file or directory"),
        (["pretrain", "--run", "file/run"], "file"),
        (["plan", "6-8", "--layers", "0"], "model.layers is 0; a whole number from 1"),
        (["plan", "--method", "full", "--average", "9"], "method full has no setting 'average'"),
        (["report", "nowhere"], "nowhere"),
        (["pretrain", "--steps", "many"], "Invalid value for '--steps'"),
        (["pretain"], "pretain"),
    ],
)
def test_wrong_input_gets_a_sentence_and_exit_code_2(
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    assert call(monkeypatch, *arguments) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert "Traceback" not in said.err + said.out
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("train: [", "is no YAML"),
        ("[" * 9000, "is no YAML"),
        ("train: {steps: !!int ''}", "is no YAML"),
        ("- 1", "is no mapping of sections"),
        ("train: 3", "is no mapping of sections"),
        ("train:\n  steps: 3\n  steps: 4", "'steps' stands twice in the mapping that begins in line 2"),
        ("train: {step: 4}", "train.step is no setting; did you mean 'steps'?"),
        ("method: {schedule: 2-6, name: 5}", "a mapping with a name is allowed"),
    ],
)
def test_a_bad_configuration_file(
    text: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    assert call(monkeypatch, "pretrain", "--config", "run.yaml") == 2
    assert sentence in capsys.readouterr().err
