"""The queue of comparisons: what is in it, and that taking it goes on from the records alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from evidence import law, queue, take
from raptr.comparison import read_comparison
from raptr.data import TokenStore
from raptr.methods import Method
from raptr.train.advice import place_of, plain_settings, scaled
from raptr.train.checkpoint import steps
from tests.comparison.tiny import asked, numbers

ROOT = Path(__file__).parents[2]
NAMES = ("first", "second")


def made(folder: Path, store: TokenStore) -> Path:
    """A project's folder with a queue of two tiny comparisons, the second with runs of the first."""
    (folder / "evidence").mkdir(parents=True)
    first, second = asked(store, seeds=[0]), asked(store, seeds=[0])
    second["entries"] = {"full": {"name": "full"}, "other": {"name": "raptr", "scaling": "sqrt"}}
    for name, spec in zip(NAMES, (first, second), strict=True):
        (folder / "evidence" / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    items = [{"name": name, "question": "Does it?", "means": "It does."} for name in NAMES]
    (folder / "evidence" / "queue.yaml").write_text(yaml.safe_dump(items))
    return folder


def start(folder: Path, store: TokenStore) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "evidence.take", "--data", str(store.path), "--jobs", "2"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, "RAPTR_COMMIT": "0123abc", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def taken(
    folder: Path, store: TokenStore, monkeypatch: pytest.MonkeyPatch, *, minutes: str = "9", jobs: int = 1
) -> None:
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RAPTR_COMMIT", "0123abc")
        take.main(["--data", str(store.path), "--jobs", str(jobs), "--minutes", minutes])


def record(folder: Path, name: str) -> Path:
    return folder / "docs" / "results" / "evidence" / f"{name}.json"


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_killed_queue_goes_on_from_its_records_alone(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calm, wild = made(tmp_path / "calm", store), made(tmp_path / "wild", store)
    taken(calm, store, monkeypatch)
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["first", "4", "of", "4"] in [words[:4] for words in said]
    assert ["second", "3", "of", "3"] in [words[:4] for words in said]
    second = calm / "runs" / "evidence" / "second" / "runs"
    assert [path.name for path in second.iterdir()] == ["other-peak0.01-seed0"]  # the first one's runs are taken over
    process = start(wild, store)
    until(record(wild, "first").exists)  # a run has ended
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)  # ends when the last of its processes has
    kept = {name: numbers(record(wild, name))["runs"] for name in NAMES if record(wild, name).exists()}
    assert kept["first"]
    shutil.rmtree(wild / "runs")
    taken(wild, store, monkeypatch)
    folders = {path.name for path in (wild / "runs" / "evidence" / "first" / "runs").iterdir()}
    assert len(folders) == 4 - len(kept["first"])  # nothing that was finished is run again
    for name in NAMES:
        assert numbers(record(wild, name)) == numbers(record(calm, name))
    before = {name: record(wild, name).read_bytes() for name in NAMES}
    shutil.rmtree(wild / "runs")
    taken(wild, store, monkeypatch)
    assert not (wild / "runs").exists()
    assert {name: record(wild, name).read_bytes() for name in NAMES} == before


def test_a_run_that_two_comparisons_want_is_made_once_with_jobs_to_spare(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "project", store)
    taken(folder, store, monkeypatch, jobs=3)  # the first one's four runs leave jobs for the second
    runs = {name: sorted(p.name for p in (folder / "runs" / "evidence" / name / "runs").iterdir()) for name in NAMES}
    assert len(runs["first"]) == 4
    assert runs["second"] == ["other-peak0.01-seed0"]
    assert [numbers(record(folder, name))["finished"] for name in NAMES] == [4, 3]


def test_it_saves_when_its_minutes_are_over_and_goes_on(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "project", store)
    path = folder / "evidence" / "first.yaml"
    spec = yaml.safe_load(path.read_text())
    spec["settings"]["train"] |= {"steps": 10**6, "checkpoint_every": 10**6, "eval_every": 10**6}
    path.write_text(yaml.safe_dump(spec))
    checkpoints = folder / "runs" / "evidence" / "first" / "runs" / "full-peak0.01-seed0" / "checkpoints"
    saved = []
    for _ in range(2):
        taken(folder, store, monkeypatch, minutes="0.05")
        saved.append(max(steps(checkpoints)))
    assert 0 < saved[0] < saved[1]
    assert not record(folder, "first").exists()


def test_what_is_held_back_is_not_taken(store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "project", store)
    path = folder / "evidence" / "queue.yaml"
    first, second = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump([{**first, "held": True}, second]))
    taken(folder, store, monkeypatch)
    assert not record(folder, "first").exists()
    assert record(folder, "second").exists()


def test_other_text_than_the_records_is_refused(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "project", store)
    monkeypatch.chdir(folder)
    record(folder, "first").parent.mkdir(parents=True)
    record(folder, "first").write_text(json.dumps({"runs": [], "configs": {}, "data": {"fingerprint": "old"}}))
    with pytest.raises(SystemExit, match=r"first\.json.*old"):
        take.main(["--data", str(store.path)])
    monkeypatch.setattr(take, "environment", lambda: {"commit": None})
    with pytest.raises(SystemExit, match="RAPTR_COMMIT"):
        take.main(["--data", str(store.path)])


def test_the_queue_lists_without_its_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")
    take.main(["--list"])
    said = capsys.readouterr().out
    assert "26 of 26" in said
    items = queue.read_queue()
    assert all(item.name in said for item in items)
    stands = {item.name: queue.standing(item, items, Path("none")) for item in items}
    assert not [stand.refused for stand in stands.values() if stand.refused]
    assert not stands["repetition-6x256"].finished  # runs on other text do not count


def test_comparisons_of_the_queue_are_on_equal_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for item in queue.read_queue():
        given = item.spec(None)
        assert given["tune"] == [0]
        one_rate = item.judges or item.name in ("width-12x768", *SETTINGS_OF_RAPTR)  # 12x768 is too large for a search
        assert given.get("widen", False) == (not one_rate), item.name
        settings = given["settings"]
        assert set(settings) - {"objective"} == {"train", "data", "model", "optimizer"}
        held_out = settings["train"]["eval_samples"] * settings["data"]["length"]
        assert held_out >= (2048 * 64 if item.name == "causal-6x64" else 8192 * 32)  # that one is for CPUs
        comparison = read_comparison(given)
        spent = {entry.label: entry.flops / comparison.full_flops for entry in comparison.entries}
        assert spent.pop("full") == 1
        assert all(given["flops"] - 0.001 < share <= given["flops"] for share in spent.values()), item.name


SETTINGS_OF_RAPTR = ("paper-fixed-12x256", "paper-schedules-12x256")


def test_settings_of_one_method_are_compared_at_its_best_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    items = {item.name: item for item in queue.read_queue()}
    rows = json.loads(items["long-12x256"].record.read_text())["best"]
    best = {row["label"]: [row["peak"]] for row in rows}
    for name in SETTINGS_OF_RAPTR:
        given = items[name].spec(None)
        assert given["peaks"] == best["raptr, sqrt"] == best["full"]
        assert all(entry.get("scaling") == "sqrt" for label, entry in given["entries"].items() if label != "full")


def test_models_are_judged_at_the_learning_rates_that_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    items = {item.name: item for item in queue.read_queue()}
    names = ("long-12x256", "same-steps-12x256", "rivals-12x256")
    rows = [row for name in names for row in json.loads(items[name].record.read_text())["best"]]
    for item in items.values():
        if not item.judges:
            continue
        assert item.held  # nothing but its own command sees that its tasks' folder is there
        for entry in read_comparison(item.spec(None)).entries:
            (peak,) = entry.peaks
            assert {row["peak"] for row in rows if row["label"] == entry.label} == {peak}, entry.label


def test_what_is_judged_takes_no_runs_from_other_records(store: TokenStore, tmp_path: Path) -> None:
    folder = made(tmp_path / "project", store)
    path = folder / "evidence" / "second.yaml"
    spec = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**spec, "evaluate": {"finetune": {"data": str(tmp_path / "glue")}}}))
    entries = [
        {"name": name, "question": "?", "means": "!", "file": f"{folder}/evidence/{name}.yaml"} for name in NAMES
    ]
    (tmp_path / "queue.yaml").write_text(yaml.safe_dump(entries))
    first, second = queue.read_queue(tmp_path / "queue.yaml")
    assert second.asked([first, second], store.path, tmp_path).others == ()
    assert first.asked([first, second], store.path, tmp_path).others == (second.record,)
    assert (first.ready(store.path), second.ready(store.path)) == (True, False)
    (tmp_path / "glue").mkdir()
    assert second.ready(store.path)
    assert "evaluate" in second.spec(store.path)


def test_every_comparison_is_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    files = {path for path in Path("evidence").glob("*.yaml") if path != queue.QUEUE}
    items = queue.read_queue()
    assert {item.file for item in items} == files | {Path("examples/long.yaml")}
    assert len({item.name for item in items}) == len({item.record for item in items}) == len(items)


def schedules(name: str) -> dict[str, Method]:
    """The methods of a comparison of the queue, by label."""
    (item,) = [item for item in queue.read_queue() if item.name == name]
    entries = read_comparison(item.spec(None)).entries
    return {e.label: e.config.make_method() for e in entries}


def average(method: Method) -> float:
    return sum(phase.size * (phase.stop - phase.start) for phase in method.phases()) / method.steps


def test_comparisons_are_what_their_words_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = schedules("same-steps-12x256")
    twenty = found["progressive stacking, 20-20-60%"]
    shares = [(phase.stop - phase.start) / twenty.steps for phase in twenty.phases()]
    assert shares == pytest.approx([0.2, 0.2, 0.6], abs=1e-3)
    assert twenty.steps == found["full"].steps == 5800
    paper = {label: method for label, method in schedules("paper-schedules-12x256").items() if "full" not in label}
    assert len(paper) == 4
    for label, method in paper.items():
        assert average(method) == pytest.approx(9, abs=0.01)
        assert method.settings()["schedule"] == label
        assert method.steps == 5800
    fixed = [method.settings()["fixed"] for method in schedules("paper-fixed-12x256").values() if method.name != "full"]
    assert len(fixed) == 8
    for label, method in schedules("growth-12x256").items():
        if " at " in label:
            first = method.phases()[0]
            assert first.stop / method.steps == pytest.approx(float(label.split(" at ")[1]), abs=0.005)


def test_the_law_is_tested_on_the_size_that_is_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (item,) = [item for item in queue.read_queue() if item.name == "kept-back-8x384"]
    full = read_comparison(item.spec(None)).entries[0].config
    place = place_of(full)
    assert item.held
    assert (place.layers, place.width) == law.KEPT_BACK
    assert place.tokens_per_weight == pytest.approx(law.KEPT_BACK_LENGTH, abs=0.05)
    for method in law.METHODS:
        wanted = scaled(method, place.layers / law.LAYERS, 1.0)
        assert wanted in [plain_settings(m) for m in schedules(item.name).values()]


@pytest.mark.parametrize("name", ["width-12x128", "width-6x256", "width-24x256", "width-12x512", "half-12x256"])
def test_the_sizes_of_the_law_have_its_methods(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made = [plain_settings(method) for method in schedules(name).values()]
    layers = schedules(name)["full"].target.layers
    for method in law.METHODS:
        assert scaled(method, layers / law.LAYERS, 1.0) in made


def test_the_papers_three_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    budgets = {"12x256": ("quarter", "half", "long"), "24x256": ("quarter", "half", "paper")}
    for size, names in budgets.items():
        found = [schedules(f"{name}-{size}") for name in names]
        assert [methods["full"].steps for methods in found] == [1450, 2900, 5800]
        (schedule,) = {methods["raptr, sqrt"].settings()["schedule"] for methods in found}
        assert schedule == {"12x256": "6-8-10-12", "24x256": "6-12-18-24"}[size]
        assert {methods["stacking"].settings()["schedule"] for methods in found} == {schedule}


def test_runs_of_the_long_record_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    items = {item.name: item for item in queue.read_queue()}
    rivals = items["rivals-12x256"]
    stand = queue.standing(rivals, [rivals, items["long-12x256"]], Path("none"))
    assert stand.finished >= 13  # full and reduced at three rates each, raptr at three, stacking at four
