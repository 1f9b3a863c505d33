"""A checkpoint is whole or not there, comes back bit for bit, and says what is wrong with it."""

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from raptr import files
from raptr.train import checkpoint
from raptr.train.checkpoint import load_latest, save, steps

SHARD = "shard-00001-model-00001-of-00001.safetensors"


def some(seed: int) -> dict[str, Tensor]:
    """Return a small state of every kind a trainer stores, and of some more."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 6, generator=generator)
    return {
        "model.weight": torch.nn.Parameter(weight),
        "model.transposed": torch.randn(3, 5, generator=generator).t(),
        "model.slice": weight[1:3, ::2],
        "moment.weight": torch.randn(4, 6, generator=generator) * 1e-30,
        "step.weight": torch.tensor(float(seed)),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "odd": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "count": torch.tensor([2**62 + 1, -seed]),
        "count.scalar": torch.tensor(2**62 + seed),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
    }


def blank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def assert_latest(folder: Path, step: int, seed: int) -> None:
    """Check that the newest checkpoint is this one, whole."""
    latest = load_latest(folder)
    assert latest is not None
    assert (latest.step, latest.state) == (step, {"seed": seed})
    expected = some(seed)
    into = blank(expected)
    latest.read(into)
    assert {name: bits(t) for name, t in into.items()} == {name: bits(t) for name, t in expected.items()}


def put(folder: Path, step: int, seed: int, keep: int | None = None) -> Path:
    return save(folder, step, some(seed), {"seed": seed}, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_round_trip_is_bit_for_bit_and_in_place(tmp_path: Path) -> None:
    state = {"step": 7, "name": "größe", "nested": {"list": [1, 2.5, None, True], "tiny": 5e-324}}
    tensors = some(3)
    path = save(tmp_path / "run" / "checkpoints", 7, tensors, state, keep=2)
    assert path == tmp_path / "run" / "checkpoints" / "step-7"
    latest = load_latest(path.parent)
    assert latest is not None
    assert (latest.path, latest.step, latest.state) == (path, 7, state)
    into = blank(tensors)
    into["model.weight"] = torch.nn.Parameter(into["model.weight"])
    before = {name: (id(tensor), tensor.data_ptr()) for name, tensor in into.items()}
    latest.read(into)
    for name, tensor in tensors.items():
        assert (id(into[name]), into[name].data_ptr()) == before[name]
        assert (into[name].dtype, into[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(into[name]) == bits(tensor), name
    assert into["model.weight"].requires_grad
    assert bits(tensors["model.weight"]) == bits(some(3)["model.weight"])


def test_blank_tensors_are_as_those_stored_without_a_prefix(tmp_path: Path) -> None:
    put(tmp_path, 1, 1)
    latest, expected = load_latest(tmp_path), some(1)
    assert latest is not None
    into = latest.blank(without="model.")
    assert into.keys() == {name for name in expected if not name.startswith("model.")} != set()
    weights = {name: tensor for name, tensor in blank(expected).items() if name.startswith("model.")}
    latest.read({**weights, **into})
    assert {name: bits(tensor) for name, tensor in into.items()} == {name: bits(expected[name]) for name in into}


def test_a_state_without_tensors_round_trips(tmp_path: Path) -> None:
    save(tmp_path, 0, {}, {"a": 1}, keep=None)
    latest = load_latest(tmp_path)
    assert latest is not None
    latest.read({})
    assert latest.state == {"a": 1}


def test_the_folder_holds_safetensors_and_json_and_nothing_is_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickled")

    for module, name in [(pickle, "dump"), (pickle, "dumps"), (pickle, "load"), (pickle, "loads")]:
        monkeypatch.setattr(module, name, refuse)
    for name in ("Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, refuse)
    path = put(tmp_path, 1, 1)
    assert_latest(tmp_path, 1, 1)
    assert names(path) == ["manifest.json", SHARD, "state.json"]
    with safe_open(path / SHARD, framework="pt") as file:
        assert sorted(file.keys()) == sorted(some(1))
    manifest = json.loads((path / "manifest.json").read_text())
    assert {name: entry["size"] for name, entry in manifest.items()} == {
        name: (path / name).stat().st_size for name in (SHARD, "state.json")
    }


def test_nothing_but_tensors_is_taken(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        save(tmp_path, 1, {"a": 3}, {}, keep=None)  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        save(tmp_path, 1, {}, {"a": {1, 2}}, keep=None)
    with pytest.raises(ValueError, match=r"keep.*0"):
        save(tmp_path, 1, {}, {}, keep=0)
    assert names(tmp_path) == []


def test_names_shapes_and_dtypes_must_fit(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": torch.ones(2), "b": torch.ones(3, 2), "c": torch.tensor(1.0)}, {}, keep=None)
    latest = load_latest(tmp_path)
    assert latest is not None
    into = {"a": torch.zeros(2), "b": torch.zeros(2, 3), "c": torch.zeros((), dtype=torch.float64)}
    with pytest.raises(ValueError) as error:
        latest.read(into)
    named = [f"{tmp_path}/step-1", "b", "torch.float32 (3, 2)", "torch.float32 (2, 3)"]
    named += ["c", "torch.float32 ()", "torch.float64 ()"]
    assert re.search(".*".join(map(re.escape, named)), str(error.value))
    assert not into["a"].any()
    with pytest.raises(ValueError, match=r"step-1.*\bd, e\b.*\bb, c\b"):
        latest.read({"a": torch.zeros(2), "e": torch.zeros(2), "d": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"step-1.*n00, .*, n07 and 4 more.*\ba, b, c\b"):
        latest.read({f"n{index:02}": torch.zeros(1) for index in range(12)})


def test_no_checkpoint_is_none_and_other_folders_are_ignored(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "none") is None
    for name in ("step-", "step-07", "step-1x", "step--3", "xstep-5", ".step-9.partial", ".step-9.removing"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-8").write_text("a file")
    assert steps(tmp_path) == []
    assert load_latest(tmp_path) is None
    (tmp_path / "step-8").unlink()
    for step in (10, 9, 0):
        put(tmp_path, step, step)
    assert steps(tmp_path) == [0, 9, 10]
    assert_latest(tmp_path, 10, 10)


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def cut(name: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - 1)


def listing(entry: object) -> Callable[[Path], None]:
    """A manifest, well written, that has something else for the tensors' size and checksum."""

    def rewrite(path: Path) -> None:
        (path / "manifest.json").write_bytes(checkpoint._manifest({**checkpoint._contents(path), SHARD: entry}))

    return rewrite


def flipped(name: str, at: int) -> Callable[[Path], None]:
    return lambda path: flip(path / name, at)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (remove(SHARD), f"{SHARD} is missing"),
        (remove("state.json"), "state.json is missing"),
        (remove("manifest.json"), "manifest.json is missing"),
        (flipped(SHARD, -1), f"{SHARD} does not have the checksum in manifest.json"),
        (flipped(SHARD, 40), f"{SHARD} does not have the checksum in manifest.json"),
        (flipped("state.json", 5), "state.json does not have the checksum in manifest.json"),
        (flipped("manifest.json", 0), "manifest.json is not valid JSON"),
        (flipped("manifest.json", -1), "manifest.json is not valid JSON"),
        (cut(SHARD), r"shard-\S* has \d+ bytes, manifest.json says \d+"),
        (cut("state.json"), r"state.json has (\d+) bytes, manifest.json says \d+"),
        (cut("manifest.json"), "manifest.json is not as it was written"),
        (lambda path: (path / "manifest.json").write_text("{}\n"), "manifest.json is not as it was written"),
        (listing([]), "manifest.json is not as it was written"),
        (listing(3), "manifest.json is not as it was written"),
        (listing({"size": 1}), "manifest.json is not as it was written"),
        (lambda path: shutil.copy(path / SHARD, path / "x.safetensors"), "x.safetensors is not in manifest"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    put(tmp_path, 5, 5)
    damage(put(tmp_path, 10, 6))
    with pytest.raises(ValueError, match=rf"step-10 is damaged: {problem}"):
        checkpoint.load(tmp_path, 10)
    with pytest.warns(UserWarning, match=problem) as caught:
        assert_latest(tmp_path, 5, 5)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert re.search(rf"step-10\b.*{re.escape(str(tmp_path))}.*step-5\b", text)
    assert caught[0].filename == __file__


def test_any_changed_byte_of_the_small_files_is_seen(tmp_path: Path) -> None:
    path = put(tmp_path, 1, 1)
    for name in ("manifest.json", "state.json"):
        whole = (path / name).read_bytes()
        for at in range(len(whole)):
            for bit in (1, 7, 0x2A):
                (path / name).write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
                assert checkpoint._damage(path) is not None, (name, at, bit)
        (path / name).write_bytes(whole)
    assert checkpoint._damage(path) is None


@pytest.mark.parametrize("text", ["3", "[]", "{", "[" * 99_999])
def test_a_state_that_is_no_mapping_is_damage(text: str, tmp_path: Path) -> None:
    put(tmp_path, 5, 5)
    path = put(tmp_path, 10, 6)
    (path / "state.json").write_text(text)
    (path / "manifest.json").write_bytes(checkpoint._manifest(checkpoint._contents(path)))
    with pytest.warns(UserWarning, match=r"step-10 .*state\.json.*step-5"):
        assert_latest(tmp_path, 5, 5)
    (path / "manifest.json").write_text(text)
    with pytest.warns(UserWarning, match=r"step-10 .*manifest\.json.*step-5"):
        assert_latest(tmp_path, 5, 5)


def test_two_damaged_are_each_reported_and_a_stray_note_or_folder_is_no_damage(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put(tmp_path, step, step)
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    (tmp_path / "step-1" / "mine").mkdir()
    (tmp_path / "step-2" / "state.json").unlink()
    flip(tmp_path / "step-3" / SHARD, 100)
    with pytest.warns(UserWarning, match="damaged") as caught:
        assert_latest(tmp_path, 1, 1)
    said = [str(warning.message) for warning in caught]
    assert len(said) == 2
    assert re.search(rf"step-3\b.*{re.escape(str(tmp_path))}.*{SHARD}.*checksum.*step-1\b", said[0])
    assert re.search(rf"step-2\b.*{re.escape(str(tmp_path))}.*state\.json.*missing.*step-1\b", said[1])


def test_when_all_are_damaged_it_says_so(tmp_path: Path) -> None:
    for step in (1, 2):
        (put(tmp_path, step, step) / "state.json").unlink()
    with pytest.raises(ValueError) as error:
        load_latest(tmp_path)
    named = [str(tmp_path), "step-2", "state.json", "step-1", "state.json"]
    assert re.search(".*".join(map(re.escape, named)), str(error.value))


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        put(tmp_path, step, step, keep=None)
    put(tmp_path, 100, 100, keep=3)
    assert names(tmp_path) == ["step-10", "step-100", "step-11"]
    put(tmp_path, 101, 101, keep=1)
    assert names(tmp_path) == ["step-101"]
    assert_latest(tmp_path, 101, 101)


def test_damaged_later_steps_do_not_crowd_out_the_resumed_run(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        path = put(tmp_path, step, step)
        if step > 10:
            (path / "state.json").unlink()
    put(tmp_path, 15, 15, keep=2)
    assert steps(tmp_path) == [10, 15, 20, 30]
    with pytest.warns(UserWarning, match=r"step-15\b"):
        assert_latest(tmp_path, 15, 15)
    put(tmp_path, 20, 20, keep=2)
    assert steps(tmp_path) == [15, 20, 30]


def test_leftovers_of_a_kill_are_ignored_and_cleaned(tmp_path: Path) -> None:
    put(tmp_path, 1, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / ".step-2.partial")
    shutil.copytree(tmp_path / "step-1", tmp_path / ".step-0.removing")
    (tmp_path / ".step-0.removing" / "state.json").unlink()
    assert steps(tmp_path) == [1]
    assert_latest(tmp_path, 1, 1)
    put(tmp_path, 2, 2)
    assert names(tmp_path) == ["step-1", "step-2"]
    assert_latest(tmp_path, 2, 2)


def test_a_step_is_replaced(tmp_path: Path) -> None:
    put(tmp_path, 4, 1)
    put(tmp_path, 4, 2, keep=1)
    assert names(tmp_path) == ["step-4"]
    assert_latest(tmp_path, 4, 2)


def test_a_checkpoint_caught_between_two_names_is_found_and_gets_its_name_back(tmp_path: Path) -> None:
    put(tmp_path, 4, 1)
    (tmp_path / "step-4").rename(tmp_path / ".step-4.replaced")
    assert steps(tmp_path) == [4]
    assert_latest(tmp_path, 4, 1)
    put(tmp_path, 3, 3)
    assert names(tmp_path) == ["step-3", "step-4"]
    assert_latest(tmp_path, 4, 1)


def test_everything_is_on_the_disk_before_the_name_is_given_and_the_name_before_pruning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1, 1)
    events: list[str] = []
    sync, rename = files.sync, os.rename

    def watched_sync(path: Path) -> None:
        sync(path)
        events.append(f"sync {path.relative_to(tmp_path)}")

    def watched_rename(source: Path, target: Path) -> None:
        rename(source, target)
        events.append(f"rename {source.name} {target.name}")

    monkeypatch.setattr(files, "sync", watched_sync)
    monkeypatch.setattr(os, "rename", watched_rename)
    put(tmp_path, 2, 2, keep=1)
    assert sorted(events[:2]) == [f"sync .step-2.partial/{SHARD}", "sync .step-2.partial/state.json"]
    assert events[2:] == [
        "sync .step-2.partial/manifest.json",
        "sync .step-2.partial",
        "rename .step-2.partial step-2",
        "sync .",
        "rename step-1 .step-1.removing",
        "sync .",
    ]


class Killed(BaseException):
    """Stands for the end of the process."""


@contextmanager
def failing(first: int, last: float, error: BaseException) -> Iterator[list[str]]:
    """Let the calls with the numbers from `first` to `last` that change or sync the disk raise."""
    calls: list[str] = []

    def watch(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if first <= len(calls) - 1 <= last:
                raise error
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in [
            (os, "rename"),
            (os, "replace"),
            (os, "fsync"),
            (os, "unlink"),
            (os, "rmdir"),
            (os, "mkdir"),
            (shutil, "rmtree"),
        ]:
            patch.setattr(module, name, watch(name, getattr(module, name)))
        yield calls


def before_new_step(folder: Path) -> None:
    put(folder, 1, 1)
    put(folder, 2, 2)


def before_replacement(folder: Path) -> None:
    put(folder, 3, 2)


def before_cleaning(folder: Path) -> None:
    put(folder, 2, 2)
    shutil.copytree(folder / "step-2", folder / ".step-3.partial")
    shutil.copytree(folder / "step-2", folder / ".step-1.removing")


@pytest.mark.parametrize("forever", [True, False], ids=["killed", "failed"])
@pytest.mark.parametrize(
    ("before", "expected_calls"),
    [
        (before_new_step, ["fsync", "rename", "rmtree", "unlink", "rmdir"]),
        (before_replacement, ["fsync", "rename", "rmtree", "unlink", "rmdir"]),
        (before_cleaning, ["rmtree", "unlink", "rmdir", "fsync", "rename"]),
    ],
)
def test_whenever_save_stops_the_old_or_the_new_checkpoint_is_there(
    tmp_path: Path, before: Callable[[Path], None], expected_calls: list[str], forever: bool
) -> None:
    """Stop `save` at each of its calls in turn, for good or once, with an end of the process or an error."""
    for number in range(1000):
        folder = tmp_path / str(number)
        before(folder)
        old = load_latest(folder)
        assert old is not None
        error = Killed() if forever else OSError(errno.ENOSPC, "No space left on device")
        with failing(number, float("inf") if forever else number, error) as calls:
            stopped: BaseException | None = None
            try:
                put(folder, 3, 3, keep=1)
            except (Killed, OSError) as raised:
                stopped = raised
        assert stopped in (None, error)
        latest = load_latest(folder)
        assert latest is not None
        if latest.state == {"seed": 3}:
            assert_latest(folder, 3, 3)
        else:
            assert stopped is not None
            assert_latest(folder, old.step, 2)
        assert all(checkpoint._damage(folder / f"step-{step}") is None for step in steps(folder) if step < 3)
        if stopped is not None and not forever:
            assert latest.path == folder / f"step-{latest.step}"
            # Only a call of the cleaning itself may leave something behind.
            assert not (folder / ".step-3.partial").exists() or calls[-1] in ("rmtree", "unlink", "rmdir")
        put(folder, 3, 4, keep=1)
        assert names(folder) == ["step-3"]
        assert_latest(folder, 3, 4)
        shutil.rmtree(folder)
        if stopped is None and len(calls) <= number:
            break
    assert list(dict.fromkeys(call for call in calls if call != "mkdir")) == expected_calls
    assert number > 12


def test_a_full_disk_while_writing_tensors_is_an_os_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1, 1)
    with monkeypatch.context() as patch:

        def full(*_: Any, **__: Any) -> bytes:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr("safetensors.torch.save", full)
        with pytest.raises(OSError, match="No space left") as error:
            put(tmp_path, 2, 2, keep=1)
        assert type(error.value) is OSError
    assert names(tmp_path) == ["step-1"]
    assert_latest(tmp_path, 1, 1)


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        put(tmp_path / "file" / "checkpoints", 1, 1)
