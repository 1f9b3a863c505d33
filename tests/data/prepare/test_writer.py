"""A writer goes on from what a journal says, whatever lies behind it in the files."""

from pathlib import Path

import numpy as np
import pytest

from raptr.data.prepare.writer import ShardWriter, Written
from raptr.data.store import Shard
from raptr.files import sha256_of

DTYPE = np.dtype("<u2")
LENGTHS = np.array([3, 5, 2, 9, 1, 4, 4, 30, 2])
TOKENS = np.arange(int(LENGTHS.sum()), dtype=DTYPE)


def writer(folder: Path, start: Written | None = None) -> ShardWriter:
    folder.mkdir(exist_ok=True)
    return ShardWriter(folder, "wiki", "train", 10, DTYPE, start)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def whole(folder: Path) -> tuple[Shard, ...]:
    with writer(folder) as one:
        one.add(TOKENS, LENGTHS)
        return one.finish()


def test_shards_hold_whole_documents(tmp_path: Path) -> None:
    shards = whole(tmp_path / "a")
    assert [(shard.tokens, shard.documents) for shard in shards] == [(10, 3), (10, 2), (8, 2), (30, 1), (2, 1)]
    for shard in shards:
        assert sha256_of(tmp_path / "a" / shard.file) == shard.tokens_sha256
        assert sha256_of(tmp_path / "a" / shard.documents_file) == shard.documents_sha256
    joined = b"".join((tmp_path / "a" / shard.file).read_bytes() for shard in shards)
    assert joined == TOKENS.tobytes()


@pytest.mark.parametrize("cut", range(len(LENGTHS) + 1))
def test_going_on_cuts_off_what_the_journal_does_not_know(tmp_path: Path, cut: int) -> None:
    expected = whole(tmp_path / "whole")
    folder, middle = tmp_path / "part", int(LENGTHS[:cut].sum())
    with writer(folder) as one:
        one.add(TOKENS[:middle], LENGTHS[:cut])
        state = one.sync()
        one.add(np.full(1000, 7, DTYPE), np.ones(1000, np.int64))  # never entered, and other than what comes next
    with writer(folder, state) as again:
        again.add(TOKENS[middle:], LENGTHS[cut:])
        assert again.finish() == expected
    for name, data in contents(tmp_path / "whole").items():
        assert (folder / name).read_bytes() == data


def test_a_file_shorter_than_the_journal_says(tmp_path: Path) -> None:
    with writer(tmp_path) as one:
        one.add(TOKENS[:8], LENGTHS[:2])
        state = one.sync()
    path = tmp_path / "wiki-train-00000.tokens"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"wiki-train-00000\.tokens: .*\b16 bytes.*\b15\b"):
        writer(tmp_path, state)
