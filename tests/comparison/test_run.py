"""Comparisons that run: on equal terms, stopped and killed and gone on with, with runs that diverge."""

import errno
import gc
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from raptr import compare
from raptr.comparison import read_comparison
from raptr.comparison.results import redraw
from raptr.comparison.search import wanted
from raptr.data import TokenStore, open_store
from raptr.data.prepare import Document, prepare
from raptr.files import locked
from raptr.objectives import SPECIALS
from raptr.subnetworks import Subnetwork
from raptr.train import checkpoint
from raptr.train.loop import Trainer
from raptr.train.run import RunFolder
from raptr.train.safety import LOCK
from tests.commands import call
from tests.comparison.tiny import Killed, asked, at_step, kill, numbers

QUIET = Console(quiet=True)
RUNS = 8  # of the comparison below: 2 seeds, 2 learning rates, full and reduced full; raptr at one


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    documents = [Document(f"{i}.txt", f"to be or not {i} to be, that is number {i * i}. " * 12) for i in range(80)]
    return prepare(tmp_path_factory.mktemp("corpus") / "store", lambda: documents, 600)


@pytest.fixture(scope="module")
def whole(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    done = compare(asked(store), out, console=QUIET)
    assert (done.finished, done.runs, done.stopped) == (RUNS, RUNS, False)
    return out


def test_a_damaged_outcome_is_named(whole: Path, store: TokenStore, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "copy"))
    place = min((out / "runs").glob("*/outcome.json"))
    for damaged in ("", "{", "[]", "{}"):
        place.write_text(damaged)
        with pytest.raises(ValueError, match=rf"{place.parent.name}/outcome\.json is damaged; remove "):
            compare(asked(store), out, console=QUIET)
    shutil.rmtree(place.parent)
    assert compare(asked(store), out, console=QUIET).finished == RUNS


def test_what_a_comparison_leaves(whole: Path, store: TokenStore) -> None:
    found = numbers(whole)
    assert (found["finished"], found["planned"]) == (RUNS, RUNS)
    assert [row["label"] for row in found["best"]] == ["full", "full (reduced)", "raptr"]
    assert len(found["rows"]) == 4
    assert len(found["runs"]) == RUNS
    planned = {(run.entry.label, run.peak, run.seed): run for run in wanted(read_comparison(asked(store)), [])}
    for run in found["runs"]:
        plan = planned[run["label"], run["peak"], run["seed"]]
        folder = whole / "runs" / plan.name
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        final = [record for record in records if record["kind"] == "eval"][-1]
        assert (final["step"], final["loss"], final["tokens"]) == (run["steps"], run["loss"], run["tokens"])
        config, recorded = yaml.safe_load((folder / "config.yaml").read_text()), found["configs"][run["label"]]
        config["optimizer"]["peak"], config["train"]["seed"] = recorded["optimizer"]["peak"], recorded["train"]["seed"]
        assert config == recorded
        assert found["environments"][run["environment"]]["torch"] == version("torch")
        assert run["flops"] == pytest.approx(plan.entry.flops)  # none draws its size
        assert not (folder / "checkpoints").exists()
    assert found["data"]["fingerprint"] == store.fingerprint
    by_run = {(run["label"], run["peak"], run["seed"]): run["loss"] for run in found["runs"]}
    raptr = next(row for row in found["rows"] if (row["label"], row["peak"]) == ("raptr", 0.01))
    differences = [by_run["raptr", 0.01, seed] - by_run["full", 0.01, seed] for seed in (0, 1)]
    assert raptr["to_full"]["mean"] == pytest.approx(sum(differences) / 2)
    assert raptr["to_full"]["interval"] == pytest.approx(12.706 * abs(differences[0] - differences[1]) / 2)
    page = (whole / "compare.md").read_text()
    assert "# Comparison: 8 runs" in page
    assert "8 steps; full (reduced) takes 6 and spends 0.750" in page
    assert "PARTIAL" not in page
    assert (whole / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_decoders_are_compared_on_equal_terms(tmp_path: Path) -> None:
    documents = [Document(f"{i}.txt", f"to be or not {i} to be, that is number {i * i}. " * 12) for i in range(80)]
    causal = prepare(tmp_path / "store", lambda: documents, 600, specials=SPECIALS["causal"])
    spec = asked(causal, seeds=[0], entries={"raptr": {"name": "raptr"}, "stacking": {"name": "stacking"}})
    spec["settings"]["model"] = {"family": "decoder", "size": "tiny", "width": 16, "heads": 4, "head_size": 4}
    done = compare(spec, tmp_path / "out", console=QUIET)
    assert (done.finished, done.stopped) == (done.runs, False)
    found = numbers(tmp_path / "out")
    assert [row["label"] for row in found["best"]] == ["full", "full (reduced)", "raptr", "stacking"]
    spent = {row["label"]: row["flops"] for row in found["runs"]}
    assert spent["raptr"] == pytest.approx(spent["stacking"])
    assert spent["raptr"] < spent["full"]
    assert spent["full (reduced)"] == pytest.approx(spent["raptr"], rel=0.1)  # whole steps of eight


def test_the_record_alone_gives_the_page_and_the_picture_again(whole: Path, tmp_path: Path) -> None:
    redraw(json.loads((whole / "compare.json").read_text()), tmp_path)
    for name in ("compare.md", "compare.png"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()


def test_other_seeds_run_at_the_best_learning_rate_of_a_widened_grid(store: TokenStore, tmp_path: Path) -> None:
    entries = {"raptr": {"name": "raptr", "schedule": "6-6"}}
    spec = asked(store, entries=entries, seeds=[0, 1], peaks=[1e-6, 2e-6], tune=[0], widen=True)
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        done = compare(spec, out, jobs=jobs, console=QUIET)
        found = numbers(out)
        assert (done.finished, done.runs, done.stopped) == (len(found["runs"]),) * 2 + (False,)
        for label in ("full", "raptr"):
            tried = {run["peak"]: run["loss"] for run in found["runs"] if (run["label"], run["seed"]) == (label, 0)}
            best = min(tried, key=lambda peak: tried[peak])
            others = [run["peak"] for run in found["runs"] if (run["label"], run["seed"]) == (label, 1)]
            assert others == [best]
            assert len(tried) == 10 or min(tried) < best < max(tried)  # a grid is widened at most eight times
            assert len(tried) > 2
    assert numbers(tmp_path / "1") == numbers(tmp_path / "2")


def test_entries_of_a_seed_share_initial_weights_and_data(store: TokenStore, tmp_path: Path) -> None:
    entries = {
        "raptr": {"name": "raptr"},
        "pld": {"name": "pld"},
        "zero": {"name": "raptr", "optimizer": {"idle": "zero"}},
    }
    runs = wanted(read_comparison(asked(store, entries=entries)), [])
    trainers = [Trainer(run.config, RunFolder(tmp_path), store, torch.device("cpu")) for run in runs]
    for run, trainer in zip(runs, trainers, strict=True):
        first = next(other for r, other in zip(runs, trainers, strict=True) if r.seed == run.seed)
        tensors, expected = trainer.tensors(), first.tensors()
        assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []
        for step in range(run.config.train.steps):
            assert torch.equal(trainer.batch(step).tokens_BS, first.batch(step).tokens_BS)
            assert torch.equal(trainer.batch(step).labels_BM, first.batch(step).labels_BM)
    seeds = [next(t for r, t in zip(runs, trainers, strict=True) if r.seed == seed) for seed in (0, 1)]
    assert not torch.equal(seeds[0].batch(0).tokens_BS, seeds[1].batch(0).tokens_BS)
    assert not torch.equal(
        seeds[0].tensors()["model.blocks.0.qkv.weight"], seeds[1].tensors()["model.blocks.0.qkv.weight"]
    )


@pytest.mark.parametrize("step", [4, 11, 27])
def test_stopped_it_leaves_a_partial_table_and_goes_on_to_the_same_end(
    step: int, store: TokenStore, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        seen = at_step(step, lambda: signal.raise_signal(signal.SIGTERM), patch)
        done = compare(asked(store), tmp_path, console=QUIET)
        assert len(seen) == step  # the step was brought to its end, and no further one begun
    assert done.stopped
    assert done.finished == [4, 11, 27].index(step) + (step == 27)
    if done.finished:
        found = numbers(tmp_path)
        assert (found["finished"], found["planned"]) == (done.finished, RUNS)
        assert found["runs"] == numbers(whole)["runs"][: done.finished]
        assert f"# Comparison: PARTIAL: {done.finished} of 8 runs" in (tmp_path / "compare.md").read_text()
    else:
        assert done.table is None
    with monkeypatch.context() as patch:
        seen = at_step(-1, kill, patch)
        assert not compare(asked(store), tmp_path, console=QUIET).stopped
    total = sum(run["steps"] for run in numbers(whole)["runs"])
    assert len(seen) == total - step  # nothing was done twice
    assert numbers(tmp_path) == numbers(whole)


def test_killed_it_goes_on_to_the_same_end(
    store: TokenStore, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 12, 25):
        with monkeypatch.context() as patch:
            at_step(step, kill, patch)
            with pytest.raises(Killed):
                compare(asked(store), tmp_path, console=QUIET)
    assert numbers(tmp_path)["finished"] == RUNS // 2  # written when the first seed was whole
    compare(asked(store), tmp_path, console=QUIET)
    assert numbers(tmp_path) == numbers(whole)


@pytest.mark.parametrize("place", ["record.json", "records/ours.json"])
def test_killed_it_goes_on_with_its_record_in_its_folder(
    place: str, store: TokenStore, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / place
    record.parent.mkdir(exist_ok=True)
    record.with_name(f".{record.name}.partial").write_text("{")
    with monkeypatch.context() as patch:
        at_step(12, kill, patch)
        with pytest.raises(Killed):
            compare(asked(store), tmp_path, record=record, console=QUIET)
    assert record.exists()
    assert not (tmp_path / "compare.md").exists()
    compare(asked(store), tmp_path, record=record, console=QUIET)
    assert numbers(record) == numbers(whole)


def test_finished_runs_are_not_run_again(
    store: TokenStore, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(whole, tmp_path / "copy")
    (out / "compare.json").unlink()
    seen = at_step(-1, kill, monkeypatch)
    assert compare(asked(store), out, console=QUIET).finished == RUNS
    assert seen == []
    assert numbers(out) == numbers(whole)


def test_more_seeds_and_entries_keep_what_is_there(
    store: TokenStore, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(whole, tmp_path / "copy")
    seen = at_step(-1, kill, monkeypatch)
    wider = asked(
        store, seeds=[0, 1, 2], entries={**asked(store)["entries"], "all": {"name": "raptr", "schedule": "6-6"}}
    )
    assert compare(wider, out, console=QUIET).finished == RUNS + 4 + 3
    assert len(seen) == sum(run["steps"] for run in numbers(out)["runs"]) - sum(
        run["steps"] for run in numbers(whole)["runs"]
    )


def test_a_strangers_folder_stays_as_it_is(store: TokenStore, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=rf"out is .*{tmp_path.name}.*thesis\.tex"):
        compare(asked(store), tmp_path, console=QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_comparisons_in_one_folder_are_refused(store: TokenStore, tmp_path: Path) -> None:
    with locked(tmp_path / ".lock", "held"), pytest.raises(ValueError, match=r"out is .* another process is comparing"):
        compare(asked(store), tmp_path, console=QUIET)


def test_two_comparisons_with_one_record_are_refused(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "records" / "ours.json"

    def second() -> None:
        with pytest.raises(ValueError, match=r"record is .*ours\.json.* another process adds its runs"):
            compare(asked(store, seeds=[1]), tmp_path / "second", record=record, console=QUIET)

    seen = at_step(3, second, monkeypatch)
    assert compare(asked(store, seeds=[0]), tmp_path / "first", record=record, console=QUIET).finished == RUNS // 2
    assert seen
    assert not (tmp_path / "second").exists()
    assert compare(asked(store, seeds=[1]), tmp_path / "second", record=record, console=QUIET).finished == RUNS // 2
    assert sorted(run["seed"] for run in numbers(record)["runs"]) == [0] * 4 + [1] * 4
    assert [path.name for path in record.parent.iterdir()] == [record.name]


def test_notes_beside_a_comparison_are_no_obstacle(store: TokenStore, whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "copy")
    (out / "notes.txt").write_text("what we saw")
    assert compare(asked(store), out, console=QUIET).finished == RUNS
    assert (out / "notes.txt").exists()


def test_other_runs_in_the_folder_are_refused_before_anything_starts(
    store: TokenStore, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(whole, tmp_path / "copy")
    shutil.rmtree(out / "runs" / "full-peak0.01-seed0")
    seen = at_step(-1, kill, monkeypatch)
    for section, key, value, sentence in (
        ("optimizer", "clip", 0.5, r"raptr-peak0.01-seed0' was made .*\(optimizer.clip: was 1.0, now 0.5\)"),
        ("train", "eval_samples", 4, r"\(train.eval_samples: was 8, now 4\)"),
    ):
        changed = asked(store)
        changed["entries"] = {"raptr": changed["entries"]["raptr"]}
        changed["settings"][section][key] = value
        shutil.rmtree(out / "runs" / "full-reduced-peak0.01-seed0", ignore_errors=True)
        with pytest.raises(ValueError, match=sentence):
            compare(changed, out, console=QUIET)
    documents = [Document(f"{i}.txt", f"a different text, number {i * i}. " * 12) for i in range(80)]
    other = prepare(tmp_path / "other", lambda: documents, 600)
    moved = shutil.copytree(store.path, tmp_path / "moved")
    fresh = tmp_path / "fresh"
    entries = {"raptr": {"name": "raptr", "schedule": "6-6"}}
    monkeypatch.undo()
    compare(asked(open_store(moved), entries=entries, seeds=[0]), fresh, console=QUIET)
    shutil.rmtree(moved)
    shutil.copytree(other.path, moved)
    with pytest.raises(ValueError, match="the data's fingerprint: was "):
        compare(asked(open_store(moved), entries=entries, seeds=[0]), fresh, console=QUIET)
    assert seen == []


def test_a_run_that_diverges_is_recorded_and_the_rest_goes_on(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"full": {"name": "full", "peaks": [0.01, 1e36]}, "raptr": {"name": "raptr", "schedule": "6-6"}}
    spec = asked(store, entries=entries)
    assert compare(spec, tmp_path, console=QUIET).finished == 6
    found = numbers(tmp_path)
    wild = [run for run in found["runs"] if run["peak"] == 1e36]
    assert [run["loss"] for run in wild] == [None, None]
    assert all(0 < run["diverged"] < 8 for run in wild)
    assert {run["diverged"] for run in found["runs"] if run["peak"] == 0.01} == {None}
    row = next(row for row in found["rows"] if row["peak"] == 1e36)
    assert row["diverged"] == {"0": wild[0]["diverged"], "1": wild[1]["diverged"]}
    assert row["loss"] is None
    assert (
        f"Diverged: full at peak 1e+36, seed 0 in step {wild[0]['diverged']}" in (tmp_path / "compare.md").read_text()
    )
    seen = at_step(-1, kill, monkeypatch)
    assert compare(spec, tmp_path, console=QUIET).finished == 6
    assert seen == []  # a diverged run is finished: it would diverge again


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_fails_is_set_aside_and_the_rest_goes_on(
    jobs: int, store: TokenStore, whole: Path, tmp_path: Path
) -> None:
    spec, output = asked(store), io.StringIO()
    held = tmp_path / "out" / "runs" / "raptr-peak0.01-seed0"
    held.mkdir(parents=True)
    with (
        locked(held / LOCK, "held"),  # as by another process
        pytest.raises(ValueError, match=r"raptr-peak0\.01-seed0', where another process is training"),
    ):
        compare(spec, tmp_path / "out", jobs=jobs, console=Console(file=output, width=1000))
    shown = output.getvalue()
    assert "failed: raptr, peak 0.01, seed 0. run is" in shown
    assert "1 run failed; the same command tries again." in shown
    assert len(numbers(tmp_path / "out")["runs"]) == RUNS - 1
    assert compare(spec, tmp_path / "out", jobs=jobs, console=QUIET).finished == RUNS
    assert numbers(tmp_path / "out") == numbers(whole)


def test_a_failed_run_keeps_no_memory(store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimize = Trainer.optimize
    failed: list[weakref.ref[Trainer]] = []
    alive: set[bool] = set()

    def fails_once(self: Trainer, subnetwork: Subnetwork) -> Any:
        if not failed:
            failed.append(weakref.ref(self))
            raise RuntimeError("CUDA out of memory")
        gc.collect()
        alive.add(failed[0]() is not None)
        return optimize(self, subnetwork)

    monkeypatch.setattr(Trainer, "optimize", fails_once)
    with pytest.raises(ValueError, match="out of memory on the GPU"):
        compare(asked(store, seeds=[0]), tmp_path, console=QUIET)
    assert alive == {False}


def test_what_concerns_all_runs_stops_the_comparison(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    seen = at_step(3, full, monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        compare(asked(store), tmp_path, console=QUIET)
    assert len(seen) == 3


def test_models_are_kept_on_request(store: TokenStore, tmp_path: Path) -> None:
    entries = {"raptr": {"name": "raptr", "schedule": "6-6"}}
    compare(asked(store, entries=entries, seeds=[0]), tmp_path, keep_models=True, console=QUIET)
    for name in ("full-peak0.01-seed0", "raptr-peak0.01-seed0"):
        assert checkpoint.steps(tmp_path / "runs" / name / "checkpoints") == [8]
    compare(asked(store, entries=entries, seeds=[0]), tmp_path, console=QUIET)
    assert checkpoint.steps(tmp_path / "runs" / name / "checkpoints") == [8]  # nothing that was kept is dropped later


def test_the_command(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(asked(store, seeds=[5])))
    assert call(monkeypatch, "compare", "small.yaml", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "4 runs, with seeds 5" in shown
    assert "full (reduced)" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
    with monkeypatch.context() as patch:
        at_step(20, lambda: signal.raise_signal(signal.SIGINT), patch)
        assert call(patch, "compare", "small.yaml") == 3
    said = capsys.readouterr()
    assert "run 3 of 4: raptr, peak 0.01, seed 5" in said.err
    assert "stopped with 2 of 4 runs finished; the same command" in said.err
    assert "PARTIAL: 2 of 4 runs" in said.out
    assert call(monkeypatch, "compare", "small.yaml") == 0
    said = capsys.readouterr()
    assert "run 1 of 4" not in said.err
    assert "runs/small/compare.md" in said.err
    assert "PARTIAL" not in said.out
    file.write_text("entries: {raptr: {name: rapter}}\nsettings: {train: {steps: 8}}")
    assert call(monkeypatch, "compare", "small.yaml") == 2
    assert re.search(r"entries\.raptr.*'rapter'.*'raptr'", capsys.readouterr().err)


def test_several_at_once_come_to_the_same_numbers(store: TokenStore, whole: Path, tmp_path: Path) -> None:
    done = compare(asked(store), tmp_path, jobs=2, console=QUIET)
    assert (done.finished, done.stopped) == (RUNS, False)
    assert numbers(tmp_path) == numbers(whole)
    found = json.loads((tmp_path / "compare.json").read_text())
    assert {run["seconds"] for run in found["runs"]} == {None}
    page = (tmp_path / "compare.md").read_text()
    assert "runs were made several at once, so no times are given" in page
    assert "| time |" not in page
    assert "| time |" in (whole / "compare.md").read_text()
    with pytest.raises(ValueError, match="jobs is 0; 1 or more are allowed"):
        compare(asked(store), tmp_path, jobs=0, console=QUIET)


def test_several_at_once_save_when_the_parent_is_asked_to_stop_or_is_gone(store: TokenStore, tmp_path: Path) -> None:
    spec = asked(store, seeds=[0])
    spec["settings"]["train"] |= {"steps": 10**6, "checkpoint_every": 10**6}
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "raptr", "compare", "long.yaml", "--out", "out", "--jobs", "2"]
    runs = [tmp_path / "out" / "runs" / name for name in ("full-peak0.01-seed0", "full-reduced-peak0.01-seed0")]
    for number, code in ((signal.SIGTERM, 3), (signal.SIGKILL, -signal.SIGKILL)):
        before = [saved(run) for run in runs]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        until(lambda: all(trained(run) > step for run, step in zip(runs, before, strict=True)))  # noqa: B023
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)  # ends when the last of its processes has
        assert process.returncode == code
        assert [after > step for after, step in zip(map(saved, runs), before, strict=True)] == [True, True]
        assert sorted(path.name for path in (tmp_path / "out" / "runs").iterdir()) == [run.name for run in runs]
        assert "Traceback" not in said


def until(true: Callable[[], bool]) -> None:
    """Wait, for a minute at most."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def trained(run: Path) -> int:
    """The last step that a run recorded."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def saved(run: Path) -> int:
    """The step of a run's last checkpoint."""
    return max(checkpoint.steps(run / "checkpoints"), default=0)
