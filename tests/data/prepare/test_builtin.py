"""The built-in corpus as a store: built once, reused while whole, made again when damaged."""

from pathlib import Path

import pytest

from raptr.data import EvalData, TokenStore, TrainData
from raptr.data.prepare import prepare_builtin
from raptr.data.prepare.corpus import Document
from raptr.data.store import Split


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builtin")


@pytest.fixture(scope="session")
def store(folder: Path) -> TokenStore:
    return prepare_builtin(folder, 2048)


def test_the_real_corpus_makes_a_store(store: TokenStore, folder: Path) -> None:
    assert store.path.parent == folder
    assert store.path.name.startswith("builtin-python3.")
    assert store.vocabulary.size == 2048
    train, valid = (sum(map(len, store.tokens(split, "builtin"))) for split in ("train", "valid"))
    assert train > 1_000_000
    assert 0.002 < valid / train < 0.1
    assert TrainData(store, 127, 8, seed=0).windows(0).tokens_BW.shape == (8, 127)
    assert len(EvalData(store, 127, 64)) == 64


def windows(store: TokenStore, split: Split, size: int) -> set[bytes]:
    """Every run of `size` tokens of a split, at every place."""
    found: set[bytes] = set()
    for tokens in store.tokens(split, "builtin"):
        data = tokens.tobytes()
        width = tokens.itemsize
        found.update(data[i : i + size * width] for i in range(0, len(data) - size * width + 1, width))
    return found


def test_no_window_of_the_held_out_text_is_trained_on(store: TokenStore) -> None:
    """63 tokens are what the demo judges at a time; 9.6% of such windows were shared when files were split by hash."""
    valid = windows(store, "valid", 63)
    assert len(valid) > 50_000
    shared = 0
    for tokens in store.tokens("train", "builtin"):
        data, width = tokens.tobytes(), tokens.itemsize
        shared += sum(data[i : i + 63 * width] in valid for i in range(0, len(data), width))
    assert shared == 0


def test_a_whole_store_is_reused(store: TokenStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("the corpus was read again")

    monkeypatch.setattr("raptr.data.prepare.preparation.builtin", refuse)
    assert prepare_builtin(folder, 2048).fingerprint == store.fingerprint


def test_damage_or_another_setting_builds_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = [Document(f"library/{i}.py", f"document number {i} of a few") for i in range(60)]
    monkeypatch.setattr("raptr.data.prepare.preparation.builtin", lambda: corpus)
    first = prepare_builtin(tmp_path, 300)
    shard = first.path / "builtin-train-00000.tokens"
    whole = shard.read_bytes()
    for damaged in (whole[:-2], bytes([whole[0] ^ 1]) + whole[1:]):
        shard.unlink()
        shard.write_bytes(damaged)
        assert prepare_builtin(tmp_path, 300).fingerprint == first.fingerprint
        assert shard.read_bytes() == whole
    other = prepare_builtin(tmp_path, 280)
    assert other.path != first.path
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert prepare_builtin(tmp_path, 300).path not in (first.path, other.path)
    assert len(list(tmp_path.iterdir())) == 3
