"""The windows of a step: each is read once per epoch, micro-batches are exact shares, and there is no state."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raptr.data import EvalData, TokenStore, TrainData, Windows
from raptr.data.prepare import Document, parse_domain, prepare, prepare_corpus
from raptr.data.store import Split


def documents() -> Iterator[Document]:
    for i in range(300):
        yield Document(f"document-{i}", f"Text number {i} says {i * i} and no more. " * (1 + i % 7))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Several shards, so that the windows of a batch come from more than one."""
    return prepare(tmp_path_factory.mktemp("source") / "store", documents, 300, shard_tokens=2000)


def cut(store: TokenStore, split: Split, window: int) -> list[list[int]]:
    """Every window of a split, cut by hand."""
    found = []
    for tokens in store.tokens(split, store.domains[0].name):
        for first in range(0, len(tokens) - window + 1, window):
            found.append(tokens[first : first + window].tolist())
    return found


def same(one: Windows, other: Windows) -> bool:
    return np.array_equal(one.tokens_BW, other.tokens_BW) and np.array_equal(one.samples_B, other.samples_B)


def join(several: Sequence[Windows]) -> Windows:
    return Windows(np.concatenate([w.tokens_BW for w in several]), np.concatenate([w.samples_B for w in several]))


def only(data: EvalData, size: int) -> Iterator[Windows]:
    """The windows of the only domain."""
    (domain,) = data.domains
    return data.windows(domain, size)


@pytest.mark.parametrize("window", [3, 32, 127])
def test_an_epoch_reads_every_window_once(store: TokenStore, window: int) -> None:
    expected = cut(store, "train", window)
    assert len(store.tokens("train", store.domains[0].name)) > 3
    data = TrainData(store, window, batch=1, seed=0)
    assert data.samples == (len(expected),)
    whole = TrainData(store, window, batch=len(expected), seed=0)
    for epoch in range(2):
        rows = whole.windows(epoch).tokens_BW.tolist()
        assert rows != expected
        assert sorted(rows) == sorted(expected)


def test_shapes_and_types(store: TokenStore) -> None:
    tokens, samples, segments = TrainData(store, 127, batch=8, seed=0, isolate=True).windows(3)
    assert segments is not None
    assert [array.shape for array in (tokens, samples, segments)] == [(8, 127), (8,), (8, 127)]
    assert [array.dtype for array in (tokens, samples, segments)] == [np.int64, np.uint64, np.int64]


@pytest.mark.parametrize("micros", [1, 2, 3, 6, 12])
def test_micro_batches_are_shares_of_the_batch(store: TokenStore, micros: int) -> None:
    data = TrainData(store, 31, batch=12, seed=4)
    shares = [data.windows(7, micro, micros) for micro in range(micros)]
    joined = join(shares)
    assert same(joined, data.windows(7))


def test_a_sample_does_not_depend_on_the_batch_size(store: TokenStore) -> None:
    small, large = TrainData(store, 31, 4, seed=1), TrainData(store, 31, 12, seed=1)
    joined = join([small.windows(step) for step in (6, 7, 8)])
    assert same(joined, large.windows(2))


def test_batches_are_a_function_of_seed_and_step(store: TokenStore) -> None:
    data = TrainData(store, 31, 4, seed=1)
    later = data.windows(10**7)
    assert same(later, TrainData(store, 31, 4, seed=1).windows(10**7))
    assert not same(later, data.windows(10**7 + 1))
    assert not same(later, TrainData(store, 31, 4, seed=2).windows(10**7))
    assert data.digest(10**7) == TrainData(store, 31, 4, seed=1).digest(10**7)
    others = [data.digest(10**7 + 1), TrainData(store, 31, 4, seed=2).digest(10**7)]
    assert data.digest(10**7) not in others


def test_no_two_samples_have_one_number(store: TokenStore) -> None:
    """Epochs read the same windows again, under other numbers."""
    (count,) = TrainData(store, 127, 1, seed=0).samples
    whole = TrainData(store, 127, count, seed=0)
    numbers = np.concatenate([whole.windows(epoch).samples_B for epoch in range(3)])
    assert numbers.tolist() == list(range(3 * count))


@pytest.mark.parametrize("count", [1, 3, 10, 10**6])
def test_evaluation_reads_a_fixed_spread(store: TokenStore, count: int) -> None:
    expected = cut(store, "valid", 15)
    data = EvalData(store, 15, count)
    assert len(data) == min(count, len(expected))
    chosen = [expected[i * len(expected) // len(data)] for i in range(len(data))]
    for size in (1, 4, 10**6):
        rows = [row for windows in only(data, size) for row in windows.tokens_BW.tolist()]
        assert rows == chosen
    sizes = [len(windows.tokens_BW) for windows in only(data, 4)]
    assert sizes[:-1] == [4] * (len(sizes) - 1)
    assert sum(sizes) == len(data)
    assert same(join(list(only(data, 4))), next(only(data, 10**6)))


def test_a_window_has_the_same_number_in_a_larger_set(store: TokenStore) -> None:
    available = len(EvalData(store, 15, 10**6))
    everything = next(only(EvalData(store, 15, available), available))
    half = next(only(EvalData(store, 15, available // 2), available))
    rows = [i * available // (available // 2) for i in range(available // 2)]
    assert same(half, Windows(everything.tokens_BW[rows], everything.samples_B[rows]))


def test_one_window_is_enough(tmp_path: Path) -> None:
    two = [Document("a", "some text here"), Document("b", "some text there")]
    tiny = prepare(tmp_path / "store", lambda: two, 300)
    tokens = len(tiny.tokens("train", tiny.domains[0].name)[0])
    data = TrainData(tiny, tokens, batch=4, seed=0)
    assert data.samples == (1,)
    assert data.windows(0).tokens_BW.tolist() == [tiny.tokens("train", tiny.domains[0].name)[0].tolist()] * 4
    with pytest.raises(ValueError, match=f"window of {tokens + 1} tokens.*data.length"):
        TrainData(tiny, tokens + 1, batch=4, seed=0)


def test_wide_tokens_are_read_alike(store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raptr.data.prepare.preparation.dtype_for", lambda _: "uint32")
    wide = prepare(tmp_path / "store", documents, 300, shard_tokens=2000)
    assert wide.tokens("train", wide.domains[0].name)[0].dtype == np.dtype("<u4")
    assert same(TrainData(wide, 31, 8, seed=0).windows(5), TrainData(store, 31, 8, seed=0).windows(5))


def test_a_domain_of_small_weight_is_judged_too_but_must_be_trained_on(tmp_path: Path) -> None:
    for name in ("much", "some"):
        lines = (json.dumps({"text": f"{name} text {i} says {i * i} and no more. " * 5}) for i in range(90))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    domains = [parse_domain(f"{tmp_path}/much.jsonl:97"), parse_domain(f"{tmp_path}/some.jsonl:3")]
    store = prepare_corpus(domains, tmp_path / "store", vocabulary=300, held_out=0.5)
    data = EvalData(store, 15, 10)
    found = {name: join(list(data.windows(name, 4))).samples_B.tolist() for name in data.domains}
    assert {name: len(samples) for name, samples in found.items()} == {"much": 10, "some": 1}
    assert len({sample for samples in found.values() for sample in samples}) == 11  # each draws masks of its own
    much, some = store.manifest.domains
    rare = replace(store, manifest=replace(store.manifest, domains=(much, replace(some, weight=1e-6))))
    with pytest.raises(ValueError, match=r"domain some has weight 1e-06, less than one sample in"):
        TrainData(rare, 15, 1, seed=0)


def test_bad_settings_get_a_sentence(store: TokenStore) -> None:
    data = TrainData(store, 31, 12, seed=0)
    for micros in (0, 5, 24):
        with pytest.raises(ValueError, match=rf"micros.* {micros}\b.*\b12\b"):
            data.windows(0, 0, micros)
    with pytest.raises(ValueError, match=r"batch.* 0\b"):
        TrainData(store, 31, 0, seed=0)
    longest = max(map(len, store.tokens("train", store.domains[0].name)))
    with pytest.raises(ValueError, match=rf"train.* 4999 tokens \({longest} tokens.*data.length"):
        TrainData(store, 4999, 1, seed=0)
    with pytest.raises(ValueError, match=r"count.* 0\b"):
        EvalData(store, 31, 0)
    with pytest.raises(ValueError, match=r"size.* 0\b"):
        next(only(EvalData(store, 31, 4), 0))


def test_isolated_documents_are_segments(store: TokenStore) -> None:
    plain, isolated = (TrainData(store, 63, 8, seed=0, isolate=isolate).windows(2) for isolate in (False, True))
    assert plain.segments_BW is None
    assert same(plain, isolated)
    assert isolated.segments_BW is not None
    for row, segments in zip(isolated.tokens_BW.tolist(), isolated.segments_BW.tolist(), strict=True):
        number, expected = 0, []
        for token in row:
            expected.append(number)
            number += token == store.vocabulary["[SEP]"]  # which ends its own document
        assert segments == expected
    assert isolated.segments_BW.max() > 0
