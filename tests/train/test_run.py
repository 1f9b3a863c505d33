"""The run folder: what a start may change, what --fresh removes, what is recorded of each start."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from raptr.data import TokenStore
from raptr.data.prepare import Document, prepare
from raptr.train import checkpoint, run
from raptr.train.config import Config, differences
from raptr.train.loop import Result, Trainer, pretrain
from raptr.train.run import RunFolder
from raptr.train.safety import OutOfMemory
from tests.train.legs import QUIET

STEPS = 4


def config(store: TokenStore, **sections: dict[str, Any]) -> Config:
    return Config.read(
        {
            "model": {"size": "tiny", "layers": 2, "width": 16, "heads": 4, "head_size": 4, "mlp": 16},
            "method": {"name": "full"},
            "data": {"source": str(store.path), "length": 24, **sections.get("data", {})},
            "optimizer": {"peak": 0.01},
            "train": {
                "steps": STEPS,
                "batch": 4,
                "eval_samples": 4,
                "log_every": 1,
                "checkpoint_every": 100,
                **sections.get("train", {}),
            },
        }
    )


def train(store: TokenStore, folder: Path, until: int | None = None, *, fresh: bool = False, **sections: Any) -> Result:
    return pretrain(config(store, **sections), folder, until=until, fresh=fresh, console=QUIET)


@pytest.fixture(scope="module")
def one_step(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-step") / "run"
    train(store, folder, 1, train={"device": "cpu"})
    return folder


@pytest.fixture
def begun(one_step: Path, tmp_path: Path) -> Path:
    """A run of which one step was trained, to be changed at will."""
    return Path(shutil.copytree(one_step, tmp_path / "run"))


def written(folder: Path) -> dict[str, Any]:
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert isinstance(saved, dict)
    return saved


def rewrite(folder: Path, **train: Any) -> None:
    """Let the run have begun with other settings."""
    saved = written(folder)
    saved["train"].update(train)
    (folder / "config.yaml").write_text(yaml.safe_dump(saved))


def starts(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "environment.json").read_text()))


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def other(tmp_path: Path) -> TokenStore:
    documents = [Document(f"{i}.txt", f"to be or not to be that is question {i} " * 20) for i in range(40)]
    return prepare(tmp_path / "other", lambda: documents, 600)


def no_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


# What is in the folder


def test_the_configuration_is_written_without_auto_and_with_all_dimensions(store: TokenStore, tmp_path: Path) -> None:
    train(store, tmp_path / "run", 1)
    saved = written(tmp_path / "run")
    assert (saved["train"]["device"], saved["train"]["precision"]) == ("cpu", "float32")
    assert saved["model"]["parts"] == 4
    assert None not in saved["model"].values()


def test_the_vocabulary_of_prepared_text_is_no_setting(store: TokenStore, tmp_path: Path) -> None:
    train(store, tmp_path / "run", 1, data={"vocabulary": 2048})
    saved = written(tmp_path / "run")
    assert "vocabulary" not in saved["data"]
    saved["data"]["vocabulary"] = 2048  # as it was written once, whatever the text had
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(saved))
    assert train(store, tmp_path / "run", 3, data={"vocabulary": 4096}).step == 3


def test_the_built_in_text_may_go_on_as_prepared_text_but_not_with_another_vocabulary(store: TokenStore) -> None:
    built_in, other = (config(store, data={"source": "builtin", "vocabulary": size}) for size in (2048, 4096))
    assert built_in.mapping()["data"]["vocabulary"] == 2048
    assert list(differences(built_in.mapping(), other.mapping())) == ["data.vocabulary"]
    assert differences(built_in.mapping(), config(store).mapping()) == {}
    assert differences(config(store).mapping(), built_in.mapping()) == {}


def test_of_two_methods_only_the_names_differ(store: TokenStore) -> None:
    full = config(store, train={"seed": 1})
    raptr = replace(config(store), method={"name": "raptr", "schedule": "2-2"})
    found = differences(raptr.mapping(), full.mapping())
    assert found == {"method.name": "was 'raptr', now 'full'", "train.seed": "was 0, now 1"}
    fixed = replace(raptr, method={**raptr.method, "schedule": "2-2-2"})
    assert differences(raptr.mapping(), fixed.mapping()) == {"method.schedule": "was '2-2', now '2-2-2'"}


def test_every_start_that_trains_is_recorded(store: TokenStore, tmp_path: Path) -> None:
    for until in (1, 3, 3, None):
        train(store, tmp_path / "run", until)
    recorded = starts(tmp_path / "run")
    assert [start["step"] for start in recorded] == [0, 1, 3]
    assert {(start["device"], start["precision"], start["torch"]) for start in recorded} == {
        ("cpu", "float32", version("torch"))
    }


def test_a_finished_run_says_so_and_stays_as_it_is(
    store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = train(store, tmp_path / "run")
    before = content(tmp_path / "run")
    again = pretrain(config(store), tmp_path / "run", console=Console(width=500))
    assert again == ended
    assert content(tmp_path / "run") == before
    assert f"{STEPS} of {STEPS}" in capsys.readouterr().out
    saved = written(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(
        yaml.safe_dump({**saved, "data": {**saved["data"], "source": "gone"}})
    )
    store_gone = config(store, data={"source": "gone"})
    assert pretrain(store_gone, tmp_path / "run", console=QUIET) == ended


@pytest.mark.parametrize(("layout", "own"), [("src/raptr", True), (".venv/lib/python3.11/site-packages/raptr", False)])
def test_only_the_projects_own_commit_is_recorded(layout: str, own: bool, tmp_path: Path) -> None:
    package = tmp_path / layout
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    commit = run._commit(package.resolve())
    assert (commit is not None) == own


# A start with other settings


def test_a_start_that_trained_nothing_claims_no_folder(store: TokenStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        train(store, tmp_path / "run", data={"source": "nowhere"})
    assert train(store, tmp_path / "run", train={"seed": 1}).step == STEPS


def test_after_a_first_step_without_memory_any_setting_may_change(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "optimize", no_memory)
        with pytest.raises(OutOfMemory):
            train(store, tmp_path / "run")
    assert train(store, tmp_path / "run", train={"batch": 2, "seed": 1}).step == STEPS
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "eval"].count(0) == 1  # none of the other seed
    assert [start["step"] for start in starts(tmp_path / "run")] == [0]


def test_moved_data_is_the_same_data(store: TokenStore, other: TokenStore, tmp_path: Path) -> None:
    train(store, tmp_path / "run", 2)
    moved = tmp_path / "moved"
    subprocess.run(["cp", "-r", str(store.path), str(moved)], check=True)
    assert train(store, tmp_path / "run", 3, data={"source": str(moved)}).step == 3
    assert written(tmp_path / "run")["data"]["source"] == str(moved)
    with pytest.raises(ValueError, match=f"other data.*{store.fingerprint}.*{other.fingerprint}"):
        train(other, tmp_path / "run")


def test_other_data_is_refused_before_the_first_checkpoint_too(
    store: TokenStore, other: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "save", no_memory)
        with pytest.raises(OutOfMemory):
            train(store, tmp_path / "run")
    before = content(tmp_path / "run")
    with pytest.raises(ValueError, match=f"other data.*{store.fingerprint}.*{other.fingerprint}"):
        train(other, tmp_path / "run")
    assert content(tmp_path / "run") == before


def test_a_finished_run_refuses_other_data_too(store: TokenStore, other: TokenStore, tmp_path: Path) -> None:
    ended = train(store, tmp_path / "run")
    with pytest.raises(ValueError, match=f"other data.*{store.fingerprint}.*{other.fingerprint}"):
        train(other, tmp_path / "run")
    moved = tmp_path / "moved"
    subprocess.run(["cp", "-r", str(store.path), str(moved)], check=True)
    assert train(store, tmp_path / "run", data={"source": str(moved)}) == ended


def test_data_that_nobody_named_are_refused(store: TokenStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.source.*--data.*builtin"):
        train(store, tmp_path / "run", data={"source": None})


# A start on another machine


def test_auto_goes_on_as_the_run_began(store: TokenStore, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(begun, precision="mixed")
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        with RunFolder(begun).opened(config(store)) as settled:
            assert (settled.train.device, settled.train.precision) == ("cpu", "mixed")
    train(store, begun)
    assert [start["precision"] for start in starts(begun)] == ["float32", "mixed"]


def test_a_run_begun_on_a_gpu_goes_on_without_one_only_where_asked_to(store: TokenStore, begun: Path) -> None:
    rewrite(begun, device="cuda", precision="bfloat16")
    before = content(begun)
    with pytest.raises(ValueError, match=r"train\.device.*cuda.*--device.*train\.precision"):
        train(store, begun)
    assert content(begun) == before
    with pytest.warns(UserWarning, match=r"train\.device: was 'cuda', now 'cpu'"):
        train(store, begun, 2, train={"device": "cpu"})
    assert (starts(begun)[-1]["device"], starts(begun)[-1]["precision"]) == ("cpu", "bfloat16")
    with pytest.warns(UserWarning, match=r"train\.precision: was 'bfloat16', now 'float32'"):
        train(store, begun, 3, train={"precision": "float32"})
    train(store, begun)


# --fresh


def test_fresh_removes_what_raptr_wrote_and_nothing_else(store: TokenStore, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(store, folder)
    for name in ("export", "export-2-layers-step-4", "report"):
        (folder / name).mkdir()
        (folder / name / "README.md").write_text("old")
    (folder / "outcome.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    (folder / "exports").mkdir()
    (folder / "elsewhere").symlink_to(tmp_path)
    assert train(store, folder, 2, fresh=True, train={"seed": 9}).step == 2
    assert checkpoint.steps(folder / "checkpoints") == [2]
    ours = {"config.yaml", "environment.json", "metrics.jsonl", "tokenizer.json", "tensorboard", "checkpoints", ".lock"}
    assert {path.name for path in folder.iterdir()} == ours | {"notes.txt", "exports", "elsewhere"}
    assert [start["step"] for start in starts(folder)] == [0]
    assert written(folder)["train"]["seed"] == 9


def test_fresh_removes_nothing_before_everything_was_checked(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(store, tmp_path / "run")
    before = content(tmp_path / "run")
    damaged = tmp_path / "damaged"
    subprocess.run(["cp", "-r", str(store.path), str(damaged)], check=True)
    shard = max(damaged.glob("*.tokens"), key=lambda path: path.stat().st_size)
    shard.write_bytes(bytes(len(shard.read_bytes())))
    for source in ("nowhere", str(damaged), None):
        with pytest.raises(ValueError):
            train(store, tmp_path / "run", fresh=True, data={"source": source})
    monkeypatch.setattr(Trainer, "build", no_memory)
    with pytest.raises(OutOfMemory):
        train(store, tmp_path / "run", fresh=True)
    assert content(tmp_path / "run") == before


def test_a_refused_start_leaves_nothing_behind(store: TokenStore, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.yaml").write_text("lr: 0.1\n")
    (theirs / "environment.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    for folder in (tmp_path / "runs" / "new", empty, theirs):
        with pytest.raises(ValueError):
            train(store, folder, data={"source": None})
    assert sorted(tmp_path.rglob("*")) == before
    assert train(store, empty).step == STEPS


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": "years of work"},
        {"config.yaml": "lr: 0.1\nepochs: 3\n", "checkpoints/best.pt": "weights"},
        {"config.yaml": "train: {steps: 4}\n", "report/thesis.tex": "years of work"},
        {"config.yaml": "lr: 0.1\n", "environment.json": "{}", "report/thesis.tex": "years of work"},
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_strangers_folder_stays_as_it_is(
    files: dict[str, str], fresh: bool, store: TokenStore, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    before = content(folder)
    with pytest.raises(ValueError, match="theirs"):
        train(store, folder, fresh=fresh)
    assert content(folder) == before


def test_what_a_kill_leaves_of_the_first_write_is_no_strangers(store: TokenStore, tmp_path: Path) -> None:
    (tmp_path / ".config.yaml.partial").write_text("tra")
    assert train(store, tmp_path).step == STEPS


@pytest.mark.parametrize("operation", ["write_bytes", "replace"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_kill_or_a_full_disk_in_the_first_writes_is_no_obstacle(
    operation: str, number: int, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = Path if operation == "write_bytes" else os
    original, calls = getattr(owner, operation), []

    def until_full(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, operation, until_full)
        with pytest.raises(OSError, match="No space left"):
            train(store, tmp_path / "run")
    assert train(store, tmp_path / "run").step == STEPS


# Damaged files


@pytest.mark.parametrize("text", ["", "- 1", "train: [", "train: {steps: 3", "train: 3", "[" * 9000, "\x00", "a: 1"])
def test_a_damaged_configuration_is_named(text: str, store: TokenStore, begun: Path) -> None:
    (begun / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"run/config\.yaml"):
        train(store, begun)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "[1]", "[{}]", "3", "[" * 99_999])
def test_a_damaged_list_of_starts_is_named(text: str, store: TokenStore, begun: Path) -> None:
    (begun / "environment.json").write_text(text)
    kept = (begun / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"run/environment\.json.*--fresh"):
        train(store, begun)
    assert (begun / "metrics.jsonl").read_bytes() == kept


def test_a_run_whose_list_of_starts_is_damaged_can_be_replaced(store: TokenStore, begun: Path) -> None:
    (begun / "environment.json").write_text("{")
    assert train(store, begun, fresh=True).step == STEPS


def test_a_run_goes_on_without_its_list_of_starts(store: TokenStore, begun: Path) -> None:
    (begun / "environment.json").unlink()
    before = (begun / "metrics.jsonl").read_bytes()
    assert train(store, begun).step == STEPS
    assert (begun / "metrics.jsonl").read_bytes().startswith(before)
    assert [start["step"] for start in starts(begun)] == [1]


def without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda state: state.pop(key)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without("data"), "data"),
        (without("seconds"), "seconds"),
        (lambda state: state.update(seconds="3"), "seconds"),
        (lambda state: state.update(flops=None), "flops"),
        (lambda state: state.update(eval_loss=[]), "eval_loss"),
        (lambda state: state.update(step=7), "step"),
        (lambda state: state.update(shape=3), "shape"),
        (lambda state: state.update(shape={"layers": 2, "wings": 2}), "wings"),
        (lambda state: state.update(shape={"layers": 0}), "layers"),
    ],
)
def test_a_state_of_another_form_is_named(
    change: Callable[[dict[str, Any]], object], named: str, store: TokenStore, begun: Path
) -> None:
    path = begun / "checkpoints" / "step-1"
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))
    (path / "manifest.json").write_bytes(checkpoint._manifest(checkpoint._contents(path)))
    with pytest.raises(ValueError, match=rf"step-1/state\.json.*{named}"):
        train(store, begun)


# What the function leaves, as the command does


def test_a_finished_run_is_reported_on_and_exported(store: TokenStore, tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"export": True, "report": True, "console": QUIET}
    part = pretrain(config(store), tmp_path / "run", until=2, **wanted)
    assert (part.report, part.model) == (None, None)
    for _ in range(2):  # also where the run was finished before
        done = pretrain(config(store), tmp_path / "run", **wanted)
        assert done.report is not None
        assert done.report.page.parent == tmp_path / "run" / "report"
        assert done.report.page.is_file()
        assert done.model == tmp_path / "run" / "export"
        assert (done.model / "model.safetensors").is_file()
        shutil.rmtree(done.model)
    assert pretrain(config(store), tmp_path / "run", console=QUIET).model is None


def test_a_model_that_no_stock_class_holds_stays_a_checkpoint(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(run: Path) -> Path:
        raise ValueError("method.scaled is [layer]")

    monkeypatch.setattr("raptr.train.exporting.export", refuse)
    done = pretrain(config(store), tmp_path / "run", export=True, console=Console())
    assert done.model == tmp_path / "run" / "checkpoints" / f"step-{STEPS}"
    assert done.model.is_dir()
    assert "no export: method.scaled is [layer]" in capsys.readouterr().out


def test_verify_reads_all_of_the_data(store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(TokenStore, "verify", lambda _, *, anew: asked.append(anew))
    for verify in (False, True):
        pretrain(config(store), tmp_path / str(verify), until=1, verify=verify, console=QUIET)
    assert asked == [False, True]
