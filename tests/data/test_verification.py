"""A file that was verified is not read again until it changes, unless that is asked for."""

import os
import shutil
from pathlib import Path

import pytest

from raptr.data import TokenStore, open_store, verification
from raptr.data.verification import REMEMBERED
from raptr.files import sha256_of


@pytest.fixture
def copy(store: TokenStore, tmp_path: Path) -> TokenStore:
    return open_store(shutil.copytree(store.path, tmp_path / "copy", ignore=shutil.ignore_patterns(".*")))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read."""
    names: list[str] = []

    def watched(path: Path) -> str:
        names.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(verification, "sha256_of", watched)
    return names


def files(store: TokenStore) -> list[str]:
    return sorted(path.name for path in store.path.iterdir() if path.name not in ("data.json", REMEMBERED))


def flip(path: Path, *, times: os.stat_result | None = None) -> None:
    """Change a byte in place, and with `times` set the file's time of modification back."""
    with path.open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))
    if times is not None:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_files_are_read_once(copy: TokenStore, read: list[str]) -> None:
    copy.verify()
    assert sorted(read) == files(copy)
    read.clear()
    copy.verify()
    open_store(copy.path).verify()
    assert read == []
    copy.verify(anew=True)
    assert sorted(read) == files(copy)


@pytest.mark.parametrize("kept", [False, True], ids=["modified", "modified, time set back"])
def test_a_change_is_found(kept: bool, copy: TokenStore, read: list[str]) -> None:
    copy.verify()
    read.clear()
    shard = copy.path / copy.manifest.domains[0].train[0].file
    flip(shard, times=shard.stat() if kept else None)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{shard.name}.*SHA-256.*{sha256_of(shard)}"):
            copy.verify()
    assert set(read) == {shard.name}
    flip(shard)
    copy.verify()
    read.clear()
    copy.verify()
    assert read == []


def test_a_file_put_in_the_place_of_another_is_read(copy: TokenStore, read: list[str]) -> None:
    copy.verify()
    shard = copy.path / copy.manifest.domains[0].valid[0].file
    times, content = shard.stat(), shard.read_bytes()
    shard.unlink()
    shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ValueError, match=shard.name):
        copy.verify()
    shard.unlink()
    with pytest.raises(ValueError, match=rf"{shard.name}.*no file"):
        copy.verify()


def test_what_other_data_promised_counts_for_nothing(copy: TokenStore, read: list[str]) -> None:
    copy.verify()
    read.clear()
    name = files(copy)[0]
    assert verification.first_damaged(copy.path, {name: "0" * 64}, anew=False) == (name, sha256_of(copy.path / name))
    assert read == [name]


def test_damage_that_leaves_no_trace_is_found_anew(
    copy: TokenStore, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy.verify()
    before = {path: verification._facts(path, "") for path in copy.path.iterdir()}
    flip(copy.path / "tokenizer.json")
    with monkeypatch.context() as patch:
        patch.setattr(verification, "_facts", lambda path, digest: {**before[path], "sha256": digest})
        copy.verify()
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            copy.verify(anew=True)


@pytest.mark.parametrize("text", ["{", "[1]", '{"tokenizer.json": 3}', "[" * 99_999])
def test_a_memory_that_cannot_be_read_is_none(text: str, copy: TokenStore, read: list[str]) -> None:
    (copy.path / REMEMBERED).write_text(text)
    copy.verify()
    assert sorted(read) == files(copy)


def test_a_folder_that_cannot_be_written_is_read_each_time(
    copy: TokenStore, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: Path, value: object) -> None:
        raise PermissionError(place)

    monkeypatch.setattr(verification, "write_json", refuse)
    copy.verify()
    copy.verify()
    assert sorted(read) == sorted(2 * files(copy))


def test_a_stopped_verification_goes_on(copy: TokenStore, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(path: Path) -> str:
        if len(read) == 2:
            raise KeyboardInterrupt
        read.append(path.name)
        return sha256_of(path)

    with monkeypatch.context() as patch:
        patch.setattr(verification, "sha256_of", stopped)
        with pytest.raises(KeyboardInterrupt):
            copy.verify()
    copy.verify()
    assert sorted(read) == files(copy)  # each file once
