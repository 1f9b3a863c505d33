"""The command line as a new user meets it: the whole way once, and every kind of wrong input."""

import json
import platform
import re
from pathlib import Path

import pytest
import yaml

from raptr.data import TokenStore, open_store
from raptr.methods import METHODS
from raptr.recipes import RECIPES
from raptr.train.config import Config
from tests.commands import call


def test_from_command_to_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["--steps", "8", "--batch", "4", "--length", "32", "--set", "data.vocabulary=1024"]
    common += ["--set", "optimizer.warmup=2", "--set", "train.eval_samples=8", "--set", "train.log_every=1"]
    assert call(monkeypatch, "pretrain", *common, "--until", "5") == 0
    said = capsys.readouterr().err
    assert said.startswith("run     runs/demo-raptr\n")
    assert re.search("stopped after step 5 of 8, saved in runs/demo-raptr;.*--until", said)
    assert call(monkeypatch, "pretrain", *common) == 0
    said = capsys.readouterr().err
    assert re.search("from step 5 of 8", said)
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
    assert call(monkeypatch, "report", "runs/demo-raptr", "both", "runs/full", "--out", "both") == 0  # as with a glob
    assert "left out, as no run (config.yaml is missing): both\n" in capsys.readouterr().out
    assert (tmp_path / "both" / "report.html").exists()
    rows = json.loads((tmp_path / "both" / "table.json").read_text())
    assert {row["method"] for row in (rows["runs"] if isinstance(rows, dict) else rows)} == {"raptr", "full"}
    saved = yaml.safe_load((tmp_path / "runs/demo-raptr/config.yaml").read_text())
    assert Config.read(saved).mapping() == saved
    assert call(monkeypatch, "pretrain", *common, "--seed", "1") == 2
    assert re.search(r"train\.seed: was 0, now 1", capsys.readouterr().err)


def test_a_run_that_grows_from_command_to_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["--method", "msg", "--steps", "8", "--batch", "4", "--length", "32", "--set", "data.vocabulary=1024"]
    common += ["--set", "optimizer.warmup=2", "--set", "train.eval_samples=8", "--set", "train.log_every=1"]
    assert call(monkeypatch, "pretrain", *common, "--until", "4") == 0  # the model grows in step 4
    assert call(monkeypatch, "pretrain", *common) == 0
    said = capsys.readouterr().err
    assert re.search("from step 4 of 8", said)
    assert "stage 4 of 4 done" in said
    exported = json.loads((tmp_path / "runs/demo-msg/export/config.json").read_text())
    assert exported["num_hidden_layers"] == 6
    assert (tmp_path / "runs/demo-msg/report/losses.png").exists()
    saved = yaml.safe_load((tmp_path / "runs/demo-msg/config.yaml").read_text())
    assert saved["method"]["schedule"] == "3-4-5-6"
    assert Config.read(saved).mapping() == saved


def test_a_decoder_from_text_to_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "\n\n".join(f"Chapter {i} tells of {i * i} things and of {i + 7} more." for i in range(300))
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    asked = ["--data", "book.txt", "--out", "book", "--vocabulary", "400", "--objective", "causal"]
    assert call(monkeypatch, "prepare", *asked) == 0
    small = ["--data", "book", "--steps", "4", "--batch", "2", "--length", "16", "--set", "optimizer.warmup=1"]
    assert call(monkeypatch, "pretrain", "decoder-demo", *small) == 0
    said, run = capsys.readouterr().err, tmp_path / "runs" / "decoder-demo-raptr"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{last['perplexity']:.2f}" in next(line for line in said.splitlines() if "perplexity" in line)
    assert f"{last['bits_per_byte']:.3f}" in next(line for line in said.splitlines() if "bits per byte" in line)
    (row,) = json.loads((run / "report" / "table.json").read_text())
    assert (row["eval_perplexity"], row["eval_bits_per_byte"]) == (last["perplexity"], last["bits_per_byte"])
    assert json.loads((run / "export" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert f"{last['loss']:.4f} nats per token" in (run / "export" / "README.md").read_text()


def test_an_unforeseen_error_says_where_the_run_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr("raptr.train.loop.pretrain", fail)
    (tmp_path / "run" / "checkpoints" / "step-5").mkdir(parents=True)
    assert call(monkeypatch, "pretrain", "--run", str(tmp_path / "run")) == 70
    assert re.search(f"RuntimeError: odd.*{tmp_path / 'run'}.*step 5", capsys.readouterr().err)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_plan(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "pretrain", "--method", method, "--dry-run") == 0
    assert f"{method}: 6 layers, 800 steps" in capsys.readouterr().out
    assert call(monkeypatch, "plan", "--method", method, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["layers"] == 12
    assert made["rows"][-1]["stop"] == 675_000


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


def test_plan_of_a_decoder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "plan", "--family", "decoder", "--json") == 0
    unnamed = json.loads(capsys.readouterr().out)
    assert call(monkeypatch, "plan", "--family", "decoder", "--size", "100m", "--json") == 0
    assert json.loads(capsys.readouterr().out) == unnamed
    assert call(monkeypatch, "plan", "--set", "model.family=decoder", "--json") == 0
    assert json.loads(capsys.readouterr().out) == unnamed
    large = ["plan", "12-16-20-24", "--family", "decoder", "--size", "1.6b", "--length", "512"]
    assert call(monkeypatch, *large, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert [row["size"] for row in made["rows"]] == pytest.approx([12, 16, 20, 24])
    assert made["relative_layers"] == pytest.approx(0.75)
    assert call(monkeypatch, *large) == 0
    assert "raptr: 24 layers" in capsys.readouterr().out


def test_plan_measures_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("raptr.train.measure.ENOUGH", 0.01)
    small = ["plan", "3-6", "--size", "tiny", "--batch", "2", "--length", "16", "--steps", "3600", "--measure"]
    small += ["--set", "data.vocabulary=600", "--set", "train.device=cpu"]
    assert call(monkeypatch, *small, "--json") == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert [stage["steps"] for stage in measured["stages"]] == [1800, 1800]
    assert measured["hours"] == pytest.approx(sum(stage["step_seconds"] / 2 for stage in measured["stages"]))
    assert call(monkeypatch, *small) == 0
    shown = capsys.readouterr().out
    assert "the CPU" in shown
    assert "GiB" in shown
    assert list(tmp_path.iterdir()) == []


def test_dry_run_shows_settings_and_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "pretrain", "bert-base", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "schedule: 6-8-10-12" in shown
    assert "0 – 168,749" in shown
    assert list(tmp_path.iterdir()) == []


def test_how_often_the_text_is_read_is_said_before_it_is(
    stores: dict[str, TokenStore], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, tokens = str(stores["bert"].path), stores["bert"].domains[0].total("train")
    shown = []
    for steps in (4, tokens // 64, tokens):
        asked = ("--data", source, "--batch", "2", "--length", "32", "--steps", str(steps), "--dry-run")
        assert call(monkeypatch, "pretrain", *asked, "--set", "optimizer.warmup=0") == 0
        shown.append(capsys.readouterr().out)
    assert f"The text has {tokens:,} tokens, which this run reads less than 0.1 times." in shown[0]
    assert "reads 1.0 times." in shown[1]
    assert "reads 64 times. Watch the held-out loss" in shown[2]


def test_of_several_processes_one_shows_the_dry_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert call(monkeypatch, "pretrain", "bert-base", "--dry-run") == 0
        shown.append(capsys.readouterr().out)
    assert "0 – 168,749" in shown[0]
    assert shown[1] == ""


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not name.endswith("demo")])
def test_only_demos_train_on_the_built_in_text_unasked(
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


def test_a_size_carries_over_to_another_family(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "pretrain", "bert-mini", "--family", "decoder", "--dry-run") == 0
    assert "size: mini" in capsys.readouterr().out
    assert call(monkeypatch, "pretrain", "bert-base", "--family", "decoder", "--dry-run") == 2
    assert re.search(r"model.size is 'base'.*100m", capsys.readouterr().err.replace("\n", " "))


COMMANDS = ["pretrain", "plan", "prepare", "export", "study", "compare", "finetune", "fewshot", "report"]


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)])
def test_help(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, *arguments, "--help") == 0
    shown = capsys.readouterr().out
    assert "Usage: raptr" in shown
    assert all(command in shown for command in ([] if arguments else [*COMMANDS, "Exit codes: 0", "--show-completion"]))


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)])
def test_help_fits_in_80_columns_and_flags_have_no_value(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert call(monkeypatch, *arguments, "--help") == 0
    shown = capsys.readouterr().out
    assert re.search(r"--help +Show this message", shown)
    assert not [line for line in shown.splitlines() if re.search(r"<bool>|BOOLEAN|list\[", line)]
    assert max(map(len, shown.splitlines())) <= 80


def test_help_shows_defaults_that_are_computed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert call(monkeypatch, "pretrain", "--help") == 0
    assert "[default: runs/RECIPE-METHOD]" in capsys.readouterr().out


def test_a_setting_replaces_the_method_that_is_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "plan", "--set", "method.name=full", "--json") == 0
    assert json.loads(capsys.readouterr().out)["method"] == "full"


@pytest.mark.parametrize(
    ("command", "given", "setting", "sentence"),
    [
        ("pretrain", "--steps 100", "train.steps=200", "--steps is 100, but --set train.steps is 200; give one of"),
        ("pretrain", "--batch 8", "train.batch=many", "--batch is 8, but --set train.batch is 'many'"),
        ("pretrain", "--length 64", "data.length=32", "--length is 64, but --set data.length is 32"),
        ("pretrain", "--data builtin", "data.source=there", "--data is 'builtin', but --set data.source is 'there'"),
        ("pretrain", "--lr 1e-3", "optimizer.peak=2e-3", "--lr is 0.001, but --set optimizer.peak is '2e-3'"),
        ("pretrain", "--method full", "method.name=raptr", "--method is 'full', but --set method.name is 'raptr'"),
        ("pretrain", "--method raptr", "method.name=full", "--method is 'raptr', but --set method.name is 'full'"),
        ("pretrain", "--schedule 3-6", "method.schedule=4-6", "schedule is '3-6', but --set method.schedule is '4-6'"),
        ("pretrain", "--schedule heads=1-4", "method.heads=2-4", "schedule is '1-4', but --set method.heads is '2-4'"),
        ("pretrain", "--schedule mlp=1-4", "method.parts=2-4", "schedule is '1-4', but --set method.parts is '2-4'"),
        ("pretrain", "--full-start 9", "method.full_start=8", "--full-start is 9, but --set method.full_start is 8"),
        ("pretrain", "--init one", "model.start=two", "--init is 'one', but --set model.start is 'two'"),
        ("pretrain", "--size tiny", "model.size=mini", "--size is 'tiny', but --set model.size is 'mini'"),
        ("pretrain", "--family bert", "model.family=decoder", "--family is 'bert', but --set model.family is 'decod"),
        ("pretrain", "--seed 1", "train.seed=null", "--seed is 1, but --set train.seed is None"),
        ("pretrain", "--device cpu", "train.device=auto", "--device is 'cpu', but --set train.device is 'auto'"),
        ("pretrain", "--deterministic", "train.deterministic=false", "--deterministic is True, but --set train.determ"),
        ("plan", "--steps 675000", "train.steps=900", "--steps is 675000, but --set train.steps is 900"),
        ("plan", "--method raptr", "method.name=full", "--method is 'raptr', but --set method.name is 'full'"),
        ("plan", "--layers 12", "model.layers=6", "--layers is 12, but --set model.layers is 6"),
        ("plan", "6-12", "method.schedule=3-12", "schedule is '6-12', but --set method.schedule is '3-12'"),
    ],
)
def test_an_option_and_a_setting_that_differ_are_refused(
    command: str,
    given: str,
    setting: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dry = ["--dry-run"] if command == "pretrain" else []
    assert call(monkeypatch, command, *given.split(), "--set", setting, *dry) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("plan --lr 1e-3", "--lr. It is an option of raptr pretrain. Any setting can be given with --set"),
        ("pretrain --layers 12", "--layers. It is an option of raptr plan, export. Any setting can be given"),
        (
            "pretrain --out runs/mine",
            "--out. Any setting can be given with --set SECTION.KEY=VALUE (Possible",
        ),
        ("report --run runs/mine", "--run. It is an option of raptr pretrain │"),
        ("export --laiers 4", "--laiers (Possible options: --layers)"),
    ],
)
def test_an_option_of_another_command_says_where_it_belongs(
    arguments: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert call(monkeypatch, *arguments.split()) == 2
    assert f"No such option: {sentence}" in " ".join(capsys.readouterr().err.split())


def test_an_option_and_a_setting_may_say_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    same = ["--steps", "100", "--lr", "1e-3", "--schedule", "3-6", "--method", "raptr", "--deterministic"]
    sets = ["train.steps=100", "optimizer.peak=1e-3", "method.schedule=3-6", "method.name=raptr"]
    sets += ["train.deterministic=true", "train.seed=1"]
    arguments = [*same, *(part for setting in sets for part in ("--set", setting))]
    assert call(monkeypatch, "pretrain", *arguments, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert all(line in shown for line in ("steps: 100", "peak: 0.001", "schedule: 3-6", "seed: 1"))


def test_settings_replace_the_defaults_of_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["train.steps=900", "train.batch=2", "data.length=16", "model.size=tiny", "data.vocabulary=1024"]
    assert call(monkeypatch, "plan", "--json", *(part for setting in sets for part in ("--set", setting))) == 0
    shown = json.loads(capsys.readouterr().out)
    options = ["--steps", "900", "--batch", "2", "--length", "16", "--size", "tiny", "--set", "data.vocabulary=1024"]
    assert call(monkeypatch, "plan", "--json", *options) == 0
    assert json.loads(capsys.readouterr().out) == shown
    assert shown["rows"][-1]["stop"] == 900


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--version") == 0
    versions = re.fullmatch(r"raptr \d\S*, torch \d\S*, Python (\S+)\n", capsys.readouterr().out)
    assert versions is not None
    assert versions[1] == platform.python_version()


def test_the_full_start_of_the_readme(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "plan", "6-8-10-12", "--full-start", "30000", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["stop"] == 30_000


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_complete_and_name_their_command(name: str) -> None:
    recipe = Config.read(RECIPES[name]())
    command = "raptr pretrain" if name == "demo" else f"raptr pretrain {name}"
    command += "" if recipe.data.source == "builtin" else " --data FOLDER"
    assert f"Command: {command}\n" in (RECIPES[name].__doc__ or "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pretrain", "bert-bse"], "recipe is 'bert-bse'.*'bert-base'.*demo"),
        (["pretrain", "--method", "rapter"], "method.*'rapter'.*'raptr'.*full.*auto"),
        (["plan", "--method", "rapter"], "method.*'rapter'.*'raptr'.*full.*auto"),
        (["pretrain", "--set", "method.scalng=none"], "'scalng'.*'scaling'"),
        (["pretrain", "--set", "method.seed=3"], r"method\.seed.*train\.seed"),
        (["plan", "--set", "method.shape=3"], r"method\.shape.*model"),
        (["pretrain", "--data", "nosuch", "--dry-run"], "nosuch"),
        (["pretrain", "--set", "optimizer.pek=1"], r"[Uu]nknown setting optimizer\.pek.*'peak'.*warmup"),
        (["pretrain", "--set", "optimiser.peak=1"], "optimiser.*'optimizer'"),
        (["pretrain", "--set", "optimizer.peak=high"], r"optimizer\.peak is 'high'.*a number"),
        (["pretrain", "--set", "train.steps=1.5"], r"train\.steps is 1\.5.*whole number"),
        (["pretrain", "--set", "optimizer.idle=nap"], r"optimizer\.idle is 'nap'.*zero or skip"),
        (["pretrain", "--set", "peak"], r"--set is 'peak'.*SECTION\.KEY=VALUE"),
        (["pretrain", "--set", "train.steps=["], r"--set train\.steps is '\['.*YAML(?!.*<unicode string>)"),
        (["pretrain", "--set", "method.fixed=9"], "fixed is 9.*a list with each entry a whole number or a list"),
        (["pretrain", "--schedule", "3-9"], "size 9.*1 to 6 layers"),
        (["pretrain", "--schedule", "three"], "schedule is 'three'.*6-8-10-12"),
        (["pretrain", "--schedule", "3-4"], "schedule ends with 4 layers.*6"),
        (["pretrain", "--steps", "0"], r"train\.steps is 0.*from 1"),
        (["pretrain", "--batch", "5", "--set", "train.accumulate=2"], r"train\.accumulate is 2.*train\.batch, 5"),
        (["pretrain", "--size", "huge"], r"model\.size is 'huge'.*tiny, mini"),
        (["pretrain", "--family", "deocder"], r"model\.family is 'deocder'.*'decoder'.*bert, decoder"),
        (["pretrain", "--family", "decoder", "--size", "base"], r"model\.size is 'base'.*tiny.*1\.6b"),
        (["pretrain", "decoder-demo", "--set", "objective.name=mlm"], r"objective\.name is mlm.*decoder.*causal"),
        (["pretrain", "--set", "objective.name=causal"], r"objective\.name is causal.*bert.*mlm"),
        (["pretrain", "decoder-demo", "--set", "model.kv_heads=3"], r"model\.kv_heads is 3.*heads, 4"),
        (["pretrain", "--set", "model.kv_heads=2"], r"model\.kv_heads.*allowed"),
        (["pretrain", "--device", "tpu"], r"train\.device is '?tpu.*auto, cpu.*cuda"),
        (["pretrain", "--length", "4"], r"data\.length is 4.*from 8"),
        (["pretrain", "--until", "0"], "until is 0.*1 to 800"),
        (["pretrain", "--until", "801", "--dry-run"], "until is 801.*1 to 800"),
        (
            ["plan", "mlp=1-2-4", "--set", "optimizer.idle=skip", "--set", "optimizer.name=adafactor"],
            r"optimizer\.idle is 'skip'.*method\.parts.*adafactor.*zero",
        ),
        (["pretrain", "--schedule", "width=1-2-4"], r"--schedule is 'width=1-2-4'.*depth, heads, mlp"),
        (["plan", "6-9-12", "mlp=1-4"], r"mlp \(parts\) is '1-4'.* 3 stages"),
        (["pretrain", "--schedule", "mlp=1-2-4", "--set", "optimizer.name=muon"], r"muon.*method\.parts.*adamw"),
        (["pretrain", "--set", "train.eval_sizes=[9]"], r"train\.eval_sizes has 9.*1 to 6 layers"),
        (["pretrain", "--config", "missing.yaml"], r"missing\.yaml: No such file.*path"),
        (["compare", "missing.yaml"], r"missing\.yaml: No such file.*path"),
        (["compare", "."], r"\.: Is a directory.*file"),
        (["pretrain", "--run", "file"], "file: Not a directory.*folder"),
        (["pretrain", "--run", "file/run"], "file"),
        (["prepare", "--data", "file", "--out", "data", "--tokenizer", "nowhere"], r"nowhere: .*tokenizer\.json"),
        (["plan", "6-8", "--layers", "0"], r"model\.layers is 0.*from 1"),
        (["plan", "--method", "full", "--average", "9"], "method full .*'average'"),
        (["plan", "6-8-10-12", "--full-start", "30000", "--steps", "100000"], "full_start is 30000.*25000.*120005"),
        (["pretrain", "--set", "train.steps="], r"train\.steps"),
        (["pretrain", "--set", "train.steps=null"], r"train\.steps is None"),
        (["pretrain", "--set", "data.source=# a comment"], r"data\.source"),
        (["pretrain", "--set", "train.steps={"], r"train\.steps is '{'.*YAML"),
        (["pretrain", "--set", "train.steps=2026-13-01"], r"train\.steps is '2026-13-01'.*YAML"),
        (["pretrain", "--set", "train.steps=" + "[" * 9000], r"train\.steps"),
        (["pretrain", "--set", "model.layers=2000000000"], r"model\.layers is 2000000000"),
        (["pretrain", "--steps", str(10**30)], rf"train\.steps is {10**30}"),
        (["pretrain", "--lr", "1e38"], r"optimizer\.peak is 1e\+38"),
        (["report", "nowhere"], "nowhere"),
        (["report", "."], r"\. is not a run folder: config\.yaml is missing"),
        (["pretrain", "--size", ""], r"model\.size is ''; allowed: tiny, mini"),
        (["plan", "--set", "method.name=3"], r"method is .*3"),
        (["prepare", "--data", "file", "--out", "d", "--vocabulary", str(2**32)], r"vocabulary is \d+; .* and 1048576"),
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
    assert re.search(sentence, said.err)
    assert "Traceback" not in said.err + said.out
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_vocabulary_that_prepared_text_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("\n\n".join(f"Paragraph {n} has {n * n} words." for n in range(400)))
    assert call(monkeypatch, "prepare", "--data", "text.txt", "--out", "text", "--vocabulary", "520") == 0
    size = open_store(tmp_path / "text").vocabulary.size
    (tmp_path / "other.yaml").write_text("data: {vocabulary: 2048}")
    (tmp_path / "builtin.yaml").write_text("data: {vocabulary: 2048, source: builtin}")
    comparison = {"settings": {"data": {"source": "text", "vocabulary": 2048}}, "entries": {"raptr": {}}}
    (tmp_path / "compare.yaml").write_text(yaml.safe_dump({"recipe": "demo", **comparison}))
    pretrain, other = ["pretrain", "--data", "text", "--dry-run"], "data.vocabulary=2048"
    capsys.readouterr()
    for refused in (
        [*pretrain, "--set", other],
        [*pretrain, "--config", "other.yaml"],
        ["plan", "--set", "data.source=text", "--set", other],
        ["compare", "compare.yaml", "--dry-run"],
    ):
        assert call(monkeypatch, *refused) == 2
        assert re.search(rf"data\.vocabulary is 2048, but data\.source is 'text' with {size} ", capsys.readouterr().err)
    for taken in (
        pretrain,
        [*pretrain, "--set", f"data.vocabulary={size}"],
        [*pretrain, "--config", "builtin.yaml"],
        ["plan", "--set", "data.source=text"],
    ):
        assert call(monkeypatch, *taken) == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("train: [", '"run.yaml", line 1, column 9'),
        ("train: \x01", '"run.yaml"'),
        ("- 1", "mapping of sections"),
        ("train: 3", "mapping of sections"),
        ("train:\n  steps: 3\n  steps: 4", "'steps'.*twice.*line 2"),
        ("[" * 5000, "YAML.*nested"),
        ("a: " * 3, "YAML"),
        ("train: {steps: 2001-13-01}", "YAML.*month"),
        ("train: {steps: !!int ''}", "YAML"),
    ],
)
def test_a_broken_configuration_file_is_named(
    text: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    assert call(monkeypatch, "pretrain", "--config", "run.yaml") == 2
    assert re.search(f"run.yaml.*{sentence}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("train: {step: 4}", r"[Uu]nknown setting train\.step;.*'steps'"),
        ("method: {schedule: 2-6, name: 5}", "method is .*'name': 5.*mapping with a name"),
    ],
)
def test_a_configuration_file_with_wrong_settings(
    text: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    assert call(monkeypatch, "pretrain", "--config", "run.yaml") == 2
    assert re.search(sentence, capsys.readouterr().err)


def test_a_comparison_that_is_nested_too_deeply_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 5000)
    assert call(monkeypatch, "compare", str(tmp_path / "deep.yaml")) == 2
    assert re.search(r"deep\.yaml.*YAML.*nested", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"body": "a text"}', "line 1.*'text'.*--field.*'body'.*--skip-broken"),
        ("no json", "line 1.*JSON.*--skip-broken"),
    ],
)
def test_a_line_that_cannot_be_used_names_the_option_that_helps(
    line: str, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(line + "\n", encoding="utf-8")
    assert call(monkeypatch, "prepare", "--data", "a.jsonl", "--out", "data") == 2
    assert re.search(sentence, capsys.readouterr().err)
