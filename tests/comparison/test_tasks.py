"""Comparisons whose models are judged by tasks: columns in the record, the tables, the page and the picture."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raptr import compare
from raptr.comparison import Asked, compare_all, progress, read_comparison
from raptr.comparison.record import read_rows
from raptr.comparison.results import about_scores, redraw, shown, tasks_picture
from raptr.data import TokenStore
from raptr.evaluation.grid import MOST
from raptr.report import write_report
from raptr.train.config import Config
from raptr.train.diverged import Diverged
from raptr.train.loop import pretrain
from tests.comparison.tiny import Killed, asked, at_step, kill
from tests.evaluation.tiny import make_task, opinions, write_jsonl

QUIET = Console(quiet=True)
TUNED = {"tasks": ["sst2", "rte"], "rates": [1e-3], "seeds": 1, "epochs": 1, "batch": 16, "length": 24}


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glue")
    make_task(folder / "SST-2", opinions(32, 0), opinions(40, 1))
    pairs = [{"sentence1": row["sentence"], "sentence2": "it is", "label": row["label"]} for row in opinions(72, 2)]
    make_task(folder / "RTE", pairs[:32], pairs[32:])
    return folder


@pytest.fixture(scope="module")
def judged(store: TokenStore, glue: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("judged")
    spec = asked(store, evaluate={"finetune": {"data": str(glue), **TUNED}})
    done = compare(spec, out, console=QUIET)
    assert not done.stopped
    return spec, out


def found(out: Path) -> dict[str, Any]:
    record = json.loads((out / "compare.json").read_text())
    assert isinstance(record, dict)
    return record


def test_the_best_runs_have_scores(judged: tuple[dict[str, Any], Path]) -> None:
    _, out = judged
    record = found(out)
    best = {(row["label"], row["peak"]) for row in record["best"]}
    assert len(record["runs"]) > 2 * len(best)
    for run in record["runs"]:
        wanted = ["SST-2", "RTE"] if (run["label"], run["peak"]) in best else []
        assert list(run["scores"]) == wanted
        for name, cell in run["scores"].items():
            folder = (
                out / "runs" / f"{run['label'].replace(' (reduced)', '-reduced')}-peak{run['peak']!r}-seed{run['seed']}"
            )
            task = {"SST-2": "sst2", "RTE": "rte"}[name]
            own = json.loads((folder / "evaluation" / f"finetune-{task}" / "finetune.json").read_text())
            assert cell["score"] == own["rows"][0]["means"]["accuracy"]
            assert cell["constant"] == own["baseline"]["accuracy"]
    for row in record["best"]:
        values = [
            [cell["score"] for cell in run["scores"].values()]
            for run in record["runs"]
            if (run["label"], run["peak"]) == (row["label"], row["peak"])
        ]
        assert list(row["scores"]) == ["SST-2", "RTE", "Avg."]
        assert row["scores"]["SST-2"]["mean"] == pytest.approx((values[0][0] + values[1][0]) / 2)
        assert row["scores"]["Avg."]["mean"] == pytest.approx(sum(map(sum, values)) / 4)
        assert row["scores"]["Avg."]["n"] == 2


def test_tables_page_and_picture(judged: tuple[dict[str, Any], Path]) -> None:
    _, out = judged
    page = (out / "compare.md").read_text()
    assert "| entry | FLOPs | held-out loss | SST-2 | RTE | Avg. |" in page
    assert "constant answer" in page
    assert (out / "compare-tasks.png").read_bytes().startswith(b"\x89PNG")
    _, tasks, caption = shown(found(out)).renderables
    assert "constant answer" in str(caption)
    headings = [str(column.header) for column in tasks.columns]  # type: ignore[union-attr]
    assert headings[3:] == ["SST-2", "RTE", "Avg."]
    left, right = tasks_picture(found(out)).axes
    labels = [row.label for row in read_rows(found(out)) if row.best]
    assert len(left.patches) == 2 * len(labels)
    assert right.get_xlabel() == "held-out loss"


def test_scores_that_their_evaluations_call_chance_are_named(judged: tuple[dict[str, Any], Path]) -> None:
    """Fine-tuning seeds can agree on a score that is no better than chance on so few examples."""
    record = found(judged[1])
    assert all(isinstance(cell["chance"], bool) for run in record["runs"] for cell in run["scores"].values())
    for run in record["runs"]:
        for cell in run["scores"].values():
            cell.update(score=0.55, interval=0.0, constant=0.5, chance=run["label"] == "raptr")
    said = about_scores(record)
    assert "At chance, not above the constant answer by more than the error: raptr on SST-2, RTE." in said


def test_the_picture_of_scores_goes_with_the_scores(judged: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    record = found(judged[1])
    redraw(record, tmp_path)
    assert (tmp_path / "compare-tasks.png").exists()
    redraw({**record, "runs": [{**run, "scores": {}} for run in record["runs"]]}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.md", "compare.png"]


def test_exports_are_kept_and_nothing_is_judged_twice(judged: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    spec, out = judged
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/evaluation/*/jobs/*.json")}
    assert len(before) == 12  # three entries, two seeds, two tasks
    assert len(list(out.glob("runs/*/export/model.safetensors"))) == 8
    assert not list(out.glob("runs/*/checkpoints"))
    record = found(out)
    assert not compare(spec, out, console=QUIET).stopped
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert found(out)["runs"] == record["runs"]
    shutil.copy(out / "compare.json", tmp_path / "record.json")  # the scores go on with the record alone
    assert not compare(spec, tmp_path / "out", record=tmp_path / "record.json", console=QUIET).stopped
    again = json.loads((tmp_path / "record.json").read_text())
    assert [run["scores"] for run in again["runs"]] == [run["scores"] for run in record["runs"]]


def test_a_task_of_ones_own_has_any_columns(store: TokenStore, tmp_path: Path) -> None:
    rows = [
        {"note": row["sentence"], "verdict": row["label"], "id": str(number)}
        for number, row in enumerate(opinions(72, 0))
    ]
    make_task(tmp_path / "own", rows[:32], rows[:8])
    write_jsonl(tmp_path / "own" / "hard.jsonl", rows[32:])
    columns = {"text": ["note"], "label": "verdict", "dev": "hard"}
    section = {"data": str(tmp_path / "own"), **TUNED, "tasks": ["classification"], **columns}
    spec = {**asked(store, evaluate={"finetune": section}), "seeds": [0], "tune": [0]}
    assert not compare(spec, tmp_path / "out", console=QUIET).stopped
    (folder,) = {path.parent for path in tmp_path.glob("out/runs/full-peak0.01*/evaluation/*/finetune.json")}
    assert json.loads((folder / "finetune.json").read_text())["data"]["dev"]["examples"] == 40
    assert all(list(row["scores"]) == ["classification"] for row in found(tmp_path / "out")["best"])


def test_the_grid_of_fine_tuning_rates_is_widened(store: TokenStore, glue: Path, tmp_path: Path) -> None:
    tuned = {"data": str(glue), **TUNED, "tasks": ["sst2"]}
    spec = asked(store, seeds=[0], entries={"full": {"name": "full"}}, evaluate={"finetune": tuned})
    compare(spec, tmp_path, console=QUIET)
    (first,) = tmp_path.glob("runs/*/evaluation/finetune-sst2/jobs/*.json")
    before = first.read_bytes()
    spec["evaluate"] = {"finetune": {**tuned, "widen": True}}
    assert not compare(spec, tmp_path, console=QUIET).stopped
    assert first.read_bytes() == before
    tried = sorted(json.loads(path.read_text())["rate"] for path in first.parent.glob("*.json"))
    cell = found(tmp_path)["runs"][0]["scores"]["SST-2"]
    assert cell["edge"] == (cell["rate"] in (tried[0], tried[-1]))
    assert not cell["edge"] or len(tried) == 1 + MOST


def test_the_report_of_runs_shows_their_scores(judged: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    _, out = judged
    runs = [out / "runs" / f"{name}-peak0.01-seed0" for name in ("full", "raptr")]
    report = write_report(runs, tmp_path)
    assert report.scores is not None
    assert report.scores.read_bytes().startswith(b"\x89PNG")
    assert "SST-2" in report.page.read_text()
    shutil.copytree(runs[0], tmp_path / "plain", ignore=shutil.ignore_patterns("evaluation"))
    again = write_report([tmp_path / "plain"], tmp_path)
    assert again.scores is None
    assert not (tmp_path / "scores.png").exists()


def test_a_run_whose_model_is_gone_is_named(store: TokenStore, glue: Path, tmp_path: Path) -> None:
    spec = asked(store, seeds=[0], entries={"full": {"name": "full"}})
    compare(spec, tmp_path, console=QUIET)
    console = Console(record=True, width=200)
    spec["evaluate"] = {"finetune": {"data": str(glue), **TUNED}}
    compare(spec, tmp_path, console=console)
    assert "model was not kept: full, peak 0.01, seed 0" in console.export_text()
    assert found(tmp_path)["runs"][0]["scores"] == {}


def scores(record: Path) -> dict[str, list[str]]:
    """The columns of every run in a record."""
    runs = json.loads(record.read_text())["runs"]
    return {f"{run['label']} {run['peak']} {run['seed']}": list(run["scores"]) for run in runs}


def test_a_seed_is_judged_before_the_next_is_trained(
    store: TokenStore, glue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = asked(store, seeds=[0, 1], tune=[0], evaluate={"finetune": {"data": str(glue), **TUNED, "tasks": ["sst2"]}})
    spec["entries"]["raptr"]["peaks"] = [0.01]
    out, record = tmp_path / "out", tmp_path / "record.json"
    at_step(3 * 8 - 1, kill, monkeypatch)  # of full, reduced and raptr with seed 0, then in full with seed 1
    with pytest.raises(Killed):
        compare(spec, out, record=record, console=QUIET)
    monkeypatch.undo()
    first = scores(record)
    assert first == {f"{label} 0.01 0": ["SST-2"] for label in ("full", "full (reduced)", "raptr")}

    # On another machine there is nothing but the record: what it has with scores is not made again.
    assert not compare(spec, tmp_path / "elsewhere", record=record, console=QUIET).stopped
    assert scores(record) == first | {name[:-1] + "1": columns for name, columns in first.items()}
    assert sorted(path.name[-5:] for path in (tmp_path / "elsewhere" / "runs").glob("*-seed*")) == ["seed1"] * 3

    changed = {**spec, "evaluate": {"finetune": {**spec["evaluate"]["finetune"], "epochs": 2}}}
    with pytest.raises(ValueError, match=r"scores made in another way \(evaluate\.finetune\.epochs: was 1, now 2\)"):
        compare(changed, tmp_path / "third", record=record, console=QUIET)
    moved = {**spec, "evaluate": {"finetune": {**spec["evaluate"]["finetune"], "data": f"{glue}/."}}}
    assert not compare(moved, tmp_path / "third", record=record, console=QUIET).stopped


def test_the_next_best_rate_is_judged_on_earlier_seeds_too(
    store: TokenStore, glue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = asked(store, tune=[0], evaluate={"finetune": {"data": str(glue), **TUNED, "tasks": ["sst2"]}})
    spec["entries"] = {"full": {"name": "full", "peaks": [0.01, 0.02]}}
    refused: list[float] = []

    def diverging(config: Config, *given: Any, **keys: Any) -> Any:
        if config.train.seed == 1 and not refused:
            refused.append(config.optimizer.peak)
            pretrain(config, *given, **keys, until=3)
            raise Diverged(3)
        return pretrain(config, *given, **keys)

    monkeypatch.setattr(progress, "pretrain", diverging)
    assert not compare(spec, tmp_path / "out", console=QUIET).stopped
    (other,) = {0.01, 0.02} - set(refused)
    first, then = (sorted(f"full {peak} {seed}" for seed in (0, 1)) for peak in (refused[0], other))
    columns = scores(tmp_path / "out" / "compare.json")
    assert [columns[name] for name in (*first, *then)] == [["SST-2"], [], ["SST-2"], ["SST-2"]]


def test_runs_of_a_record_without_scores_are_made_again(store: TokenStore, glue: Path, tmp_path: Path) -> None:
    spec = asked(store, seeds=[0], entries={"full": {"name": "full", "peaks": [0.01, 0.02]}})
    compare(spec, tmp_path / "before", record=tmp_path / "plain.json", console=QUIET)
    plain = json.loads((tmp_path / "plain.json").read_text())
    best = plain["best"][0]["peak"]
    judged = {**spec, "evaluate": {"finetune": {"data": str(glue), **TUNED}}}

    shutil.copy(tmp_path / "plain.json", tmp_path / "own.json")  # of the comparison itself
    out = tmp_path / "own"
    assert not compare(judged, out, record=tmp_path / "own.json", console=QUIET).stopped
    assert [path.name for path in (out / "runs").glob("full-peak*")] == [f"full-peak{best}-seed0"]  # that one alone
    assert scores(tmp_path / "own.json") == {
        f"full {peak} 0": ["SST-2", "RTE"] if peak == best else [] for peak in (0.01, 0.02)
    }
    losses = [run["loss"] for run in plain["runs"]]
    assert [run["loss"] for run in json.loads((tmp_path / "own.json").read_text())["runs"]] == losses

    one = Asked(judged, tmp_path / "other", tmp_path / "new.json", (tmp_path / "plain.json",))  # of another comparison
    (done,) = compare_all([one], console=QUIET)
    assert (done.finished, done.runs, done.stopped) == (2, 2, False)
    assert scores(tmp_path / "new.json") == scores(tmp_path / "own.json")


def test_decoders_are_judged_by_few_shot_tasks(stores: dict[str, TokenStore], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    rows: list[dict[str, object]] = [{"passage": "to be", "question": "is it", "label": i % 2} for i in range(40)]
    write_jsonl(tmp_path / "data" / "boolq.jsonl", rows)
    write_jsonl(tmp_path / "data" / "nq_open.jsonl", [{"question": "to be", "answers": ["not"]}] * 40)
    tasks = {"data": str(tmp_path / "data"), "tasks": ["boolq", "nq_open"], "examples": 4}
    spec = asked(stores["decoder"], seeds=[0], entries={"full": {"name": "full"}}, evaluate={"fewshot": tasks})
    spec["settings"]["model"] = {"family": "decoder", "size": "tiny", "width": 16, "heads": 4, "head_size": 4}
    assert not compare(spec, tmp_path / "out", console=QUIET).stopped
    (run,) = found(tmp_path / "out")["runs"]
    assert list(run["scores"]) == ["boolq, 1-shot", "nq_open, 1-shot"]
    page = (tmp_path / "out" / "compare.md").read_text()
    assert "At chance" in page
    assert "± is the 95% interval of that model's score over the examples, not the error over pretraining seeds" in page


def test_models_that_cannot_be_exported_are_refused_before_they_are_trained(store: TokenStore, glue: Path) -> None:
    spec = asked(store, evaluate={"finetune": {"data": str(glue), **TUNED}})
    read_comparison(spec)
    settings = {**spec["settings"], "model": {**spec["settings"]["model"], "head_size": 2}}
    with pytest.raises(ValueError, match=r"evaluate is given, but .* model\.head_size is 2"):
        read_comparison({**spec, "settings": settings})
    entries = {"full": {"name": "full"}, "dropping": {"name": "stochastic-depth", "scaled": "layer"}}
    with pytest.raises(ValueError, match=r"models of entry 'dropping' cannot be evaluated.* whole layers"):
        read_comparison({**spec, "entries": entries})


@pytest.mark.parametrize(
    ("evaluate", "match"),
    [
        ({"finetun": {}}, r"Unknown section evaluate\.finetun; .*'finetune'"),
        ({"fewshot": {"data": "."}}, r"evaluate\.fewshot .*'mlm'"),
        ({"finetune": {}}, r"evaluate\.finetune\.data is missing"),
        ({"finetune": {"data": ".", "epoch": 2}}, r"evaluate\.finetune\.epoch"),
        ({"finetune": {"data": ".", "tasks": ["wnli"]}}, r"^evaluate\.finetune\.tasks has 'wnli'"),
        ({"finetune": {"data": "nowhere", "tasks": ["sst2"]}}, r"nowhere"),
        ({"finetune": {"data": ".", "epochs": 0}}, r"epochs is 0"),
        ({"finetune": {"data": ".", "widen": 2}}, r"evaluate\.finetune\.widen is 2"),
        ({"finetune": {"data": ".", "text": ["a", "b", "c"]}}, r"^evaluate\.finetune\.text is given 3 times"),
        ({"finetune": {"data": ".", "label": ""}}, r"^evaluate\.finetune\.label is ''; the name of a column"),
        ({"finetune": {"data": ".", "seeds": 0}}, r"^evaluate\.finetune\.seeds is 0; .*1 to 1000"),
        ({"finetune": {"data": ".", "seeds": 2, "tune": 3}}, r"^evaluate\.finetune\.tune is 3; 1 to 2"),
        ({"finetune": {"data": ".", "rates": [0]}}, r"^evaluate\.finetune\.rates has 0\.0; more than 0"),
        ({"finetune": {"data": ".", "clip": -1}}, r"^evaluate\.finetune\.clip is -1\.0; more than 0"),
        ({"finetune": {"data": ".", "warmup": 7}}, r"^evaluate\.finetune\.warmup is 7\.0; from 0 to 1"),
        ({"finetune": {"data": ".", "tasks": []}}, r"finetune\.tasks is \[\]; one or more"),
        (
            {"finetune": {"data": ".", "tasks": ["sst2", "SST-2"]}},
            r"finetune\.tasks is \['sst2', 'sst2'\]; one or more",
        ),
    ],
)
def test_sections_that_are_refused(evaluate: dict[str, Any], match: str, store: TokenStore) -> None:
    with pytest.raises(ValueError, match=match):
        read_comparison(asked(store, evaluate=evaluate))


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"shots": []}, r"fewshot\.shots is \[\]; one or more"),
        ({"shots": [1, 1]}, r"fewshot\.shots is \[1, 1\]; one or more"),
        ({"shots": [1, -1]}, r"^evaluate\.fewshot\.shots has -1; whole numbers from 0"),
        ({"examples": 0}, r"^evaluate\.fewshot\.examples is 0; a whole number from 1"),
        ({"tasks": []}, r"fewshot\.tasks is \[\]; one or more"),
        ({"tasks": ["boolq", "boolq"]}, r"fewshot\.tasks is \['boolq', 'boolq'\]; one or more"),
        ({"tasks": ["glue"]}, r"^evaluate\.fewshot\.tasks has 'glue'; did you mean 'superglue'.*paper"),
    ],
)
def test_few_shot_sections_that_are_refused(keys: dict[str, Any], match: str, stores: dict[str, TokenStore]) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    spec = asked(stores["decoder"], evaluate={"fewshot": {"data": ".", **keys}})
    spec["settings"]["model"] = {"family": "decoder", "size": "tiny"}
    with pytest.raises(ValueError, match=match):
        read_comparison(spec)
