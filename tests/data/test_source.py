"""batch(step) reads every window once per epoch, is cut into micro-batches exactly, and has no state."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from raptr.data import Batch, EvalData, TokenStore, TrainData
from raptr.data.prepare import Document, prepare
from raptr.data.store import Split


def documents() -> Iterator[Document]:
    for i in range(300):
        yield Document(f"document-{i}", f"Text number {i} says {i * i} and no more. " * (1 + i % 7))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Several shards, so that the windows of a batch come from more than one."""
    return prepare(tmp_path_factory.mktemp("source") / "store", documents, 300, shard_tokens=2000)


def original(batch: Batch) -> torch.Tensor:
    """The sequences before they were masked."""
    return batch.tokens_BS.scatter(1, batch.positions_BM, batch.labels_BM)


def windows(store: TokenStore, split: Split, length: int) -> list[list[int]]:
    """Every window of a split, cut by hand."""
    found = []
    for tokens in store.tokens(split, store.domains[0].name):
        for first in range(0, len(tokens) - length + 2, length - 1):
            found.append([store.vocabulary.cls, *tokens[first : first + length - 1].tolist()])
    return found


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))


def join(batches: Sequence[Batch]) -> Batch:
    return Batch(*(torch.cat(parts) for parts in zip(*(batch[:3] for batch in batches), strict=True)))


def only(data: EvalData, size: int) -> Iterator[Batch]:
    """The batches of the only domain."""
    (domain,) = data.domains
    return data.batches(domain, size)


@pytest.mark.parametrize("length", [4, 33, 128])
def test_an_epoch_reads_every_window_once(store: TokenStore, length: int) -> None:
    expected = windows(store, "train", length)
    assert len(store.tokens("train", store.domains[0].name)) > 3
    data = TrainData(store, length, batch=1, seed=0)
    assert data.samples == (len(expected),)
    whole = TrainData(store, length, batch=len(expected), seed=0)
    for epoch in range(2):
        rows = original(whole.batch(epoch)).tolist()
        assert rows != expected
        assert sorted(rows) == sorted(expected)


def test_shapes_and_types(store: TokenStore) -> None:
    batch = TrainData(store, 128, batch=8, seed=0).batch(3)
    assert [tuple(tensor.shape) for tensor in batch[:3]] == [(8, 128), (8, 19), (8, 19)]
    assert {tensor.dtype for tensor in batch[:3]} == {torch.int64}
    assert (original(batch)[:, 0] == store.vocabulary.cls).all()
    moved = batch.to("meta")
    assert isinstance(moved, Batch)
    assert moved.labels_BM.device.type == "meta"


@pytest.mark.parametrize("micros", [1, 2, 3, 6, 12])
def test_micro_batches_are_shares_of_the_batch(store: TokenStore, micros: int) -> None:
    data = TrainData(store, 32, batch=12, seed=4)
    shares = [data.batch(7, micro, micros) for micro in range(micros)]
    joined = join(shares)
    assert same(joined, data.batch(7))


def test_a_sample_does_not_depend_on_the_batch_size(store: TokenStore) -> None:
    small, large = TrainData(store, 32, 4, seed=1), TrainData(store, 32, 12, seed=1)
    joined = join([small.batch(step) for step in (6, 7, 8)])
    assert same(joined, large.batch(2))


def test_batches_are_a_function_of_seed_and_step(store: TokenStore) -> None:
    data = TrainData(store, 32, 4, seed=1)
    later = data.batch(10**7)
    assert same(later, TrainData(store, 32, 4, seed=1).batch(10**7))
    assert not same(later, data.batch(10**7 + 1))
    assert not same(later, TrainData(store, 32, 4, seed=2).batch(10**7))


def test_epochs_mask_the_same_window_differently(store: TokenStore) -> None:
    (count,) = TrainData(store, 128, 1, seed=0).samples
    whole = TrainData(store, 128, count, seed=0)
    first, second = whole.batch(0), whole.batch(1)
    places = {tuple(row): i for i, row in enumerate(original(second).tolist())}
    moved = [places[tuple(row)] for row in original(first).tolist()]
    same_mask = (first.positions_BM == second.positions_BM[moved]).all(dim=1)
    assert not same_mask.any()


@pytest.mark.parametrize("count", [1, 3, 10, 10**6])
def test_evaluation_reads_a_fixed_spread(store: TokenStore, count: int) -> None:
    expected = windows(store, "valid", 16)
    data = EvalData(store, 16, count)
    assert len(data) == min(count, len(expected))
    chosen = [expected[i * len(expected) // len(data)] for i in range(len(data))]
    for size in (1, 4, 10**6):
        rows = [row for batch in only(data, size) for row in original(batch).tolist()]
        assert rows == chosen
    batches = list(only(data, 4))
    assert [len(batch.tokens_BS) for batch in batches[:-1]] == [4] * (len(batches) - 1)
    assert sum(len(batch.tokens_BS) for batch in batches) == len(data)
    joined = join(batches)
    assert same(joined, next(only(data, 10**6)))


def test_a_window_is_judged_on_the_same_mask_in_a_larger_set(store: TokenStore) -> None:
    available = len(EvalData(store, 16, 10**6))
    everything = next(only(EvalData(store, 16, available), available))
    half = next(only(EvalData(store, 16, available // 2), available))
    rows = [i * available // (available // 2) for i in range(available // 2)]
    assert same(half, Batch(*(tensor[rows] for tensor in everything[:3])))


def test_one_window_is_enough(tmp_path: Path) -> None:
    two = [Document("a", "some text here"), Document("b", "some text there")]
    tiny = prepare(tmp_path / "store", lambda: two, 300)
    tokens = len(tiny.tokens("train", tiny.domains[0].name)[0])
    data = TrainData(tiny, tokens + 1, batch=4, seed=0)
    assert data.samples == (1,)
    assert original(data.batch(0))[:, 1:].tolist() == [tiny.tokens("train", tiny.domains[0].name)[0].tolist()] * 4
    with pytest.raises(ValueError, match=f"length.* {tokens + 2}.* {tokens + 1} tokens"):
        TrainData(tiny, tokens + 2, batch=4, seed=0)


def test_wide_tokens_are_read_alike(store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raptr.data.prepare.preparation.dtype_for", lambda _: "uint32")
    wide = prepare(tmp_path / "store", documents, 300, shard_tokens=2000)
    assert wide.tokens("train", wide.domains[0].name)[0].dtype == np.dtype("<u4")
    assert same(TrainData(wide, 32, 8, seed=0).batch(5), TrainData(store, 32, 8, seed=0).batch(5))


def test_bad_settings_get_a_sentence(store: TokenStore) -> None:
    data = TrainData(store, 32, 12, seed=0)
    for micros in (0, 5, 24):
        with pytest.raises(ValueError, match=rf"micros.* {micros}\b.*\b12\b"):
            data.batch(0, 0, micros)
    with pytest.raises(ValueError, match=r"batch.* 0\b"):
        TrainData(store, 32, 0, seed=0)
    with pytest.raises(ValueError, match=r"length.* 3\b.* 4\b"):
        TrainData(store, 3, 1, seed=0)
    with pytest.raises(ValueError, match=r"length.* 5000.*train.* 4999 tokens"):
        TrainData(store, 5000, 1, seed=0)
    with pytest.raises(ValueError, match=r"count.* 0\b"):
        EvalData(store, 32, 0)
    with pytest.raises(ValueError, match=r"size.* 0\b"):
        next(only(EvalData(store, 32, 4), 0))


def test_isolated_documents_are_segments(store: TokenStore) -> None:
    plain, isolated = (TrainData(store, 64, 8, seed=0, isolate=isolate).batch(2) for isolate in (False, True))
    assert plain.segments_BS is None
    assert same(plain, isolated)
    assert isolated.segments_BS is not None
    for row, segments in zip(original(isolated).tolist(), isolated.segments_BS.tolist(), strict=True):
        number, expected = 0, []
        for token in row:
            expected.append(number)
            number += token == store.vocabulary.sep
        assert segments == expected
    assert isolated.segments_BS.max() > 0
