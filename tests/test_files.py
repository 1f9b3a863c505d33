"""Files and folders are whole or not there. `tests/train/test_checkpoint.py` stops each call of a save in turn."""

import fcntl
import os
from pathlib import Path

import pytest

from raptr import files
from raptr.files import hidden, locked, made, new_folder, recover, remove, write_text


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def full(_: object) -> None:
    raise OSError("full")


def test_a_text_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.json", "before")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="full"):
            write_text(tmp_path / "a.json", "after")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "before"
    write_text(tmp_path / "a.json", "after ü\n")
    assert list(tmp_path.iterdir()) == [tmp_path / "a.json"]
    assert (tmp_path / "a.json").read_bytes() == "after ü\n".encode()


def test_a_folder_takes_its_place_or_nothing_changes(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "place"
    for text in ("one", "two"):
        with new_folder(place) as partial:
            (partial / "file").write_text(text)
        assert contents(tmp_path) == {"deep/place/file": text}
    with pytest.raises(FileNotFoundError), new_folder(place) as partial:
        (partial / "missing" / "file").write_text("three")
    assert contents(tmp_path) == {"deep/place/file": "two"}
    assert os.listdir(place.parent) == ["place"]


def test_a_folder_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    place, partial = tmp_path / "place", hidden(tmp_path / "place", "partial")
    (partial / "left").mkdir(parents=True)  # by a kill
    (partial / "left" / "file").touch()
    with new_folder(place) as first:
        assert list(first.iterdir()) == []
        (first / "file").write_text("one")
        with pytest.raises(ValueError, match=r"place is being written by another process"), new_folder(place):
            pass
    assert contents(tmp_path) == {"place/file": "one"}
    with new_folder(place) as second:
        (second / "file").write_text("two")
    assert contents(tmp_path) == {"place/file": "two"}


def test_a_folder_is_held_until_what_it_replaced_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that began meanwhile would remove the same files."""
    place, begun = tmp_path / "place", []

    def removing(path: Path, its: Path) -> None:
        monkeypatch.undo()
        with pytest.raises(ValueError, match=r"place is being written by another process"), new_folder(place):
            pass
        begun.append(path)
        remove(path, its)

    monkeypatch.setattr(files, "remove", removing)
    for text in ("one", "two"):
        with new_folder(place) as partial:
            (partial / "file").write_text(text)
    assert begun == [hidden(place, "replaced")]
    assert os.listdir(tmp_path) == ["place"]
    assert contents(tmp_path) == {"place/file": "two"}


def test_a_folder_that_another_process_has_just_put_in_place_is_not_held(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^gone$"), locked(tmp_path / "partial", "gone", folder=True):
        pass
    assert not list(tmp_path.iterdir())


def test_folders_that_stay_empty_are_removed_again(tmp_path: Path) -> None:
    with made(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not list(tmp_path.iterdir())
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError), made(tmp_path / "there" / "a"):
        raise ValueError
    with pytest.raises(ValueError), new_folder(tmp_path / "there" / "a" / "b"):
        raise ValueError
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    with made(tmp_path / "a" / "b"):
        (tmp_path / "a" / "file").touch()
    assert {path.name for path in tmp_path.rglob("*")} == {"there", "a", "file"}


def test_a_rename_that_fails_gives_the_old_folder_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, rename = tmp_path / "place", os.rename
    place.mkdir()
    (place / "file").write_text("one")

    def fail(source: Path, target: Path) -> None:
        if source == hidden(place, "partial"):
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="no"), new_folder(place) as partial:
        (partial / "file").write_text("two")
    assert contents(tmp_path) == {"place/file": "one"}


def test_what_a_kill_left_is_recovered(tmp_path: Path) -> None:
    place = tmp_path / "place"
    for kind in ("partial", "replaced", "removing"):
        hidden(place, kind).mkdir()
        (hidden(place, kind) / "file").write_text(kind)
    recover(place)
    assert contents(tmp_path) == {"place/file": "replaced"}
    hidden(place, "replaced").mkdir()
    recover(place)
    assert contents(tmp_path) == {"place/file": "replaced"}
    remove(place, place)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["", ".lock"])
def test_a_folder_or_a_file_is_held_by_one(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with locked(path, "held"), pytest.raises(ValueError, match=r"^held$"), locked(path, "held"):
        pass
    with locked(path, "held"):
        pass


def test_a_file_that_another_process_removed_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flock = tmp_path / ".lock", fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        path.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", late)
    with pytest.raises(ValueError, match=r"^held$"), locked(path, "held"):
        pass


def test_where_there_are_no_locks_nothing_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with locked(tmp_path, "held"), locked(tmp_path, "held"):
        pass
