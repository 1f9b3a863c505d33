"""A tiny task is learnt and noise is not; a stopped command goes on; every refusal."""

import json
import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("lm_eval", reason="needs the extra eval")

from sklearn.metrics import accuracy_score

from raptr import extras, files
from raptr.evaluation.fewshot import run as running
from raptr.evaluation.fewshot.run import fewshot
from raptr.evaluation.fewshot.suite import FOLDER, TASKS
from raptr.evaluation.jobs import Judged
from tests.commands import call
from tests.evaluation.small_decoder import make_decoder, reviews
from tests.evaluation.tiny import make_bert, shuffled, write_jsonl

QUIET = Console(quiet=True)


def judged(models: list[Path], tasks: list[str], data: Path, out: Path, **settings: Any) -> dict[str, Any]:
    done = fewshot(models, tasks, data, out, console=QUIET, device="cpu", **{"shots": [1], **settings})
    assert done.record is not None
    return done.record


def row(record: dict[str, Any], model: str, task: str) -> dict[str, Any]:
    return next(one for one in record["rows"] if (one["model"], one["task"]) == (model, task))


@pytest.fixture(scope="module")
def record(taught: Path, untaught: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both models on both tasks, where nothing may be fetched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", None)
        out = tmp_path_factory.mktemp("out")
        return {**judged([untaught, taught], ["boolq", "nq_open"], questions, out), "out": out}


def test_tasks_are_learnt(record: dict[str, Any]) -> None:
    choice, text = row(record, "taught", "boolq"), row(record, "taught", "nq_open")
    assert choice["score"]["mean"] > 0.95
    assert text["score"]["mean"] > 0.95
    assert not choice["chance"]
    assert not text["chance"]
    assert choice["constant"]["scores"]["acc"] == pytest.approx(0.5, abs=0.1)
    assert text["constant"]["scores"]["exact_match"] == pytest.approx(0.25, abs=0.1)
    assert json.loads((record["out"] / "fewshot.json").read_text())["rows"] == record["rows"]
    assert (record["out"] / "fewshot.png").read_bytes().startswith(b"\x89PNG")


def test_a_random_model_is_at_chance(record: dict[str, Any]) -> None:
    assert row(record, "untaught", "boolq")["chance"]
    assert row(record, "untaught", "boolq")["score"]["mean"] == pytest.approx(0.5, abs=0.15)
    assert row(record, "untaught", "nq_open")["chance"]
    assert row(record, "untaught", "nq_open")["score"]["mean"] == 0


def test_shuffled_labels_are_at_chance(taught: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "boolq.jsonl", shuffled(reviews(120, 5), 7))
    write_jsonl(tmp_path / "boolq_exemplars.jsonl", reviews(20, 6))
    found = row(judged([taught], ["boolq"], tmp_path, tmp_path / "out"), "taught", "boolq")
    assert found["chance"]
    assert found["score"]["mean"] == pytest.approx(0.5, abs=0.15)


def test_models_are_compared_example_by_example(record: dict[str, Any]) -> None:
    first, second = row(record, "untaught", "boolq"), row(record, "taught", "boolq")
    assert (first["compared_with"], second["compared_with"]) == (None, "untaught")
    assert first["difference"] is None
    assert second["difference"]["mean"] == pytest.approx(second["score"]["mean"] - first["score"]["mean"])
    bits = second["bits_per_byte"]["mean"] - first["bits_per_byte"]["mean"]
    assert second["bits_difference"]["mean"] == pytest.approx(bits)
    assert bits + second["bits_difference"]["interval"] < 0
    average = [one for one in record["averages"] if one["model"] == "taught"]
    assert [one["name"] for one in average] == ["Avg."]
    assert average[0]["score"]["mean"] == pytest.approx(
        (second["score"]["mean"] + row(record, "taught", "nq_open")["score"]["mean"]) / 2
    )


def test_the_accuracy_is_scikit_learns(record: dict[str, Any]) -> None:
    job = json.loads((record["out"] / "jobs" / "untaught" / "causal-boolq-1.json").read_text())
    right = [example["score"] for example in job["examples"]]
    assert job["scores"]["acc"] == pytest.approx(accuracy_score([1] * len(right), right))


def test_fewer_examples_are_the_first_of_the_same_order(
    record: dict[str, Any], taught: Path, questions: Path, tmp_path: Path
) -> None:
    judged([taught], ["nq_open"], questions, tmp_path, examples=3)
    short, whole = (
        json.loads((folder / "jobs" / "taught" / "causal-nq_open-1.json").read_text())["examples"]
        for folder in (tmp_path, record["out"])
    )
    assert [one["answer"] for one in short] == [one["answer"] for one in whole[:3]]
    assert [one["nats"] for one in short] == pytest.approx([one["nats"] for one in whole[:3]], rel=1e-4)


def test_a_stop_keeps_finished_jobs_and_the_same_command_goes_on(
    untaught: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = files.write_json

    def write_and_stop(place: Path, value: Any) -> None:
        written(place, value)
        if "jobs" in place.parts:
            os.kill(os.getpid(), signal.SIGTERM)

    def asked() -> Judged:
        return fewshot(
            [untaught], ["nq_open"], questions, tmp_path, shots=[0, 1], examples=8, console=QUIET, device="cpu"
        )

    with monkeypatch.context() as patch:
        patch.setattr(running, "write_json", write_and_stop)
        part = asked()
    assert (part.finished, part.planned, part.stopped) == (1, 2, True)
    first = tmp_path / "jobs" / "untaught" / "causal-nq_open-0.json"
    before = first.stat().st_mtime_ns
    assert not asked().stopped
    assert first.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"examples: was 8, now 9.*--out"):
        judged([untaught], ["nq_open"], questions, tmp_path, shots=[0], examples=9)


def test_a_stop_in_the_middle_of_a_job_leaves_it_undone(
    untaught: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_first(self: Any, *rows: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return before(self, *rows)

    before = running.Scorer._logits  # type: ignore[attr-defined]
    monkeypatch.setattr(running.Scorer, "_logits", stop_first)  # type: ignore[attr-defined]
    done = fewshot([untaught], ["boolq"], questions, tmp_path, shots=[1], console=QUIET, device="cpu")
    assert (done.finished, done.record, done.stopped) == (0, None, True)


def test_ul2_models_are_judged_with_both_attentions(ul2: Path, questions: Path, tmp_path: Path) -> None:
    record = judged([ul2], ["boolq"], questions, tmp_path, examples=8)
    assert [one["attention"] for one in record["rows"]] == ["causal", "prefix"]
    assert record["rows"][0]["bits_per_byte"] != record["rows"][1]["bits_per_byte"]
    only = judged([ul2], ["boolq"], questions, tmp_path, examples=8, attention=["prefix"])
    assert [one["attention"] for one in only["rows"]] == ["prefix"]


def test_the_command(
    untaught: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    options = ["--data", str(questions), "--tasks", "paper", "--shots", "1", "--examples", "8", "--device", "cpu"]
    assert call(monkeypatch, "fewshot", str(untaught), *options) == 0
    shown = capsys.readouterr()
    assert "boolq" in shown.out
    assert "at chance" in shown.out
    assert "triviaqa" in shown.out  # not run
    assert "runs/fewshot/untaught/fewshot.json" in shown.err
    assert call(monkeypatch, "fewshot", str(untaught), "--data", str(questions), "--shots", "one") == 2
    assert "--shots is 'one'" in capsys.readouterr().err
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "lm_eval" else object())
    assert call(monkeypatch, "fewshot", str(untaught), *options) == 2
    assert "pip install '.[eval]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tasks", "settings", "match"),
    [
        (["wnli"], {}, r"--tasks has 'wnli'.*boolq"),
        (["lambda"], {}, r"--tasks has 'lambda'; did you mean 'lambada'\?"),
        (["copa"], {}, r"no data for the task copa; superglue_copa\.jsonl or copa\.jsonl"),
        (["boolq"], {"shots": [-1]}, r"--shots has -1"),
        (["boolq"], {"shots": [99]}, r"--shots has 99.*20 exemplars"),
        (["boolq"], {"examples": 0}, r"--examples is 0"),
        (["boolq"], {"batch": 0}, r"--batch is 0"),
        (["boolq"], {"attention": ["full"]}, r"--attention is 'full'"),
        (["boolq"], {"attention": ["prefix"]}, r"--attention is prefix.*\[S2S\]"),
    ],
)
def test_what_is_refused(
    tasks: list[str], settings: dict[str, Any], match: str, untaught: Path, questions: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=match):
        judged([untaught], tasks, questions, tmp_path / "out", **settings)


def test_models_that_are_refused(untaught: Path, questions: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is an encoder \(bert\).*finetune"):
        judged([make_bert(tmp_path / "bert")], ["boolq"], questions, tmp_path / "out")
    with pytest.raises(ValueError, match=r"two folders called.*untaught"):
        judged([untaught, untaught], ["boolq"], questions, tmp_path / "out")
    with pytest.raises(ValueError, match=r"--data is .*nowhere"):
        judged([untaught], ["boolq"], tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "boolq.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"boolq\.jsonl has no examples"):
        judged([untaught], ["boolq"], tmp_path, tmp_path / "out")
    model = shutil.copytree(untaught, tmp_path / "wider")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))
    with pytest.raises(ValueError, match=r"cannot be loaded: .* has the shape .*config\.json"):
        judged([model], ["boolq"], questions, tmp_path / "out")
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    with pytest.raises(ValueError, match=r"no weights for \d+ tensors, such as model\.layers"):
        judged([model], ["boolq"], questions, tmp_path / "out")
    (model / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"not a complete safetensors file"):
        judged([model], ["boolq"], questions, tmp_path / "out")


def test_a_job_that_lacks_its_settings_is_named(untaught: Path, questions: Path, tmp_path: Path) -> None:
    judged([untaught], ["boolq"], questions, tmp_path, examples=2)
    (job,) = (tmp_path / "jobs").rglob("*.json")
    job.write_text("{}")
    with pytest.raises(ValueError, match=rf"{job.name} is damaged.*remove"):
        judged([untaught], ["boolq"], questions, tmp_path, examples=2)


def test_folders_of_one_name_are_told_apart(questions: Path, tmp_path: Path) -> None:
    models = [make_decoder(tmp_path / name / "last", seed=seed) for seed, name in enumerate("ab")]
    record = judged(models, ["nq_open"], questions, tmp_path / "out", examples=4)
    assert list(record["models"]) == ["a-last", "b-last"]


def test_a_folder_that_is_no_few_shot_evaluation_is_refused(untaught: Path, questions: Path, tmp_path: Path) -> None:
    for name in ("notes.txt", "settings.json", "fewshot.png"):
        out = tmp_path / name.partition(".")[0]
        out.mkdir()
        (out / name).write_text("mine")
        with pytest.raises(ValueError, match=f"out is '.*', a folder without a few-shot evaluation that holds {name}"):
            judged([untaught], ["boolq"], questions, out)
        assert [path.name for path in out.iterdir()] == [name]
        assert (out / name).read_text() == "mine"


def test_every_task_has_a_file() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(TASKS)
