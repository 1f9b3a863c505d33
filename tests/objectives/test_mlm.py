"""Masks have an exact count, spare special tokens, and belong to a sample; windows stand behind [CLS]."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raptr.data import EvalData, TokenStore, TrainData
from raptr.data.batch import IGNORED, Batch
from raptr.data.source import Int64s
from raptr.hashing import bits
from raptr.objectives.mlm import MaskedLM, mask, masked_count

PAD, CLS, MASK = 0, 2, 4
ORDINARY = np.arange(100) >= 5


def sequences(rows: int, length: int) -> Int64s:
    """Ordinary tokens behind [CLS]."""
    tokens = np.arange(rows * length, dtype=np.int64).reshape(rows, length) % 95 + 5
    tokens[:, 0] = CLS
    return tokens


def masked(tokens: Int64s, samples: list[int], seed: int = 0, rate: float = 0.15) -> tuple[Int64s, Int64s, Int64s]:
    numbers = np.array(samples, dtype=np.uint64)
    return mask(tokens, numbers, seed=seed, stream="mask", hidden=MASK, ordinary_V=ORDINARY, rate=rate)


def test_golden_values() -> None:
    tokens = np.arange(40).reshape(2, 20) + 5
    tokens[:, 0] = 2
    inputs, positions, labels = masked(tokens, [0, 10**9], rate=0.3)
    assert inputs.tolist() == [
        [2, 6, 4, 8, 52, 10, 11, 12, 13, 14, 15, 16, 4, 18, 4, 20, 21, 4, 4, 24],
        [2, 26, 27, 28, 4, 20, 4, 32, 4, 34, 35, 4, 37, 38, 39, 4, 41, 42, 43, 44],
    ]
    assert positions.tolist() == [[2, 4, 12, 14, 17, 18], [4, 5, 6, 8, 11, 15]]
    assert labels.tolist() == [[7, 9, 17, 19, 22, 23], [29, 30, 31, 33, 36, 40]]


def test_the_lowest_hashes_are_chosen() -> None:
    tokens = sequences(1, 128)
    _, positions, _ = masked(tokens, [77], seed=5)
    ordered = sorted(range(1, 128), key=lambda position: bits(5, "mask", 77, position) % 2**64 >> 21)
    assert positions[0].tolist() == sorted(ordered[:19])


@given(rows=st.integers(1, 4), length=st.integers(4, 200), rate=st.floats(0.13, 0.9), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_exact_counts_and_untouched_rest(rows: int, length: int, rate: float, seed: int) -> None:
    tokens = sequences(rows, length)
    before = tokens.copy()
    inputs, positions, labels = masked(tokens, list(range(rows)), seed, rate)
    assert positions.shape == labels.shape == (rows, round(rate * length))
    assert (np.diff(positions, axis=1) > 0).all()
    assert (labels == np.take_along_axis(tokens, positions, axis=1)).all()
    assert (tokens == before).all()
    np.put_along_axis(inputs, positions, labels, axis=1)
    assert (inputs == tokens).all()
    assert {array.dtype for array in (inputs, positions, labels)} == {np.dtype(np.int64)}


def test_special_tokens_are_spared_while_others_are_left() -> None:
    tokens = np.full((50, 20), PAD, dtype=np.int64)
    tokens[:, ::2] = 50
    _, _, labels = masked(tokens, list(range(50)), rate=0.5)
    assert (labels == 50).all()
    _, positions, labels = masked(tokens, list(range(50)), rate=0.6)
    assert ((labels == 50).sum(axis=1) == 10).all()
    assert positions.shape == (50, 12)


def test_special_tokens_may_lie_anywhere() -> None:
    ordinary = np.ones(100, np.bool_)
    ordinary[[0, 7, 50, 99]] = False
    tokens = np.tile(np.array([0, 7, 50, 99, *range(20, 46)]), (400, 1))
    samples = np.arange(400, dtype=np.uint64)
    inputs, positions, labels = mask(tokens, samples, seed=0, stream="mask", hidden=99, ordinary_V=ordinary, rate=0.5)
    assert ordinary[labels].all()
    shown = np.take_along_axis(inputs, positions, axis=1)
    assert set(np.unique(shown)) == set(np.flatnonzero(ordinary)) | {99}


def test_eight_one_one() -> None:
    rows = 4000
    tokens = np.full((rows, 100), 50, dtype=np.int64)
    inputs, positions, _ = masked(tokens, list(range(rows)))
    shown = np.take_along_axis(inputs, positions, axis=1)
    total = shown.size
    # A random token is the original one 1 time in 95, which moves these by a thousandth.
    assert abs((shown == MASK).sum() / total - 0.8) < 0.006
    assert abs((shown == 50).sum() / total - 0.1 - 0.1 / 95) < 0.005
    random = shown[(shown != MASK) & (shown != 50)]
    assert set(np.unique(random)) == set(range(5, 100)) - {50}
    counts = np.bincount(random, minlength=100)[5:]
    assert counts[counts > 0].min() > 30
    # Every position is as likely as the others.
    often = np.bincount(positions.ravel(), minlength=100) / rows
    assert np.abs(often - 0.15).max() < 0.03


def test_a_mask_belongs_to_its_sample_alone() -> None:
    tokens = sequences(8, 64)
    together = masked(tokens, list(range(8)))
    alone = masked(tokens[5:6], [5])
    reversed_ = masked(tokens[::-1], list(range(7, -1, -1)))
    for whole, one, back in zip(together, alone, reversed_, strict=True):
        assert (whole[5] == one[0]).all()
        assert (whole == back[::-1]).all()


def test_samples_seeds_and_streams_differ() -> None:
    tokens = np.repeat(sequences(1, 128), 2, axis=0)
    _, positions, _ = masked(tokens, [0, 1])
    assert (positions[0] != positions[1]).any()
    assert (masked(tokens, [0, 1], seed=1)[1] != positions).any()
    samples = np.array([0, 1], dtype=np.uint64)
    held_out = mask(tokens, samples, seed=0, stream="evaluation", hidden=MASK, ordinary_V=ORDINARY)[1]
    assert (held_out != positions).any()


def test_bad_settings_get_a_sentence() -> None:
    for rate in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match=f"rate is {rate}"):
            masked_count(128, rate)
    with pytest.raises(ValueError, match=r"length.* 3\b.* 4\b"):
        masked_count(3)
    with pytest.raises(ValueError, match=r"length is 1048577;.* at most 1048576"):  # ranks have 20 bits for a position
        masked_count(2**20 + 1)
    assert [masked_count(length) for length in (4, 10, 128, 512, 2**20)] == [1, 2, 19, 77, 157286]


def original(batch: Batch) -> torch.Tensor:
    """The sequences before they were masked."""
    return batch.tokens_BS.scatter(1, places(batch), batch.labels_BM)


def places(batch: Batch) -> torch.Tensor:
    assert batch.positions_BM is not None
    return batch.positions_BM


def test_a_batch_is_the_windows_behind_cls_with_some_tokens_hidden(store: TokenStore) -> None:
    objective = MaskedLM(store.vocabulary)
    windows = TrainData(store, objective.window(128), 8, seed=0).windows(3)
    batch = objective.training(windows, seed=0)
    tensors = [batch.tokens_BS, places(batch), batch.labels_BM]
    assert [tuple(tensor.shape) for tensor in tensors] == [(8, 128), (8, 19), (8, 19)]
    assert {tensor.dtype for tensor in tensors} == {torch.int64}
    assert batch.segments_BS is None
    assert (original(batch)[:, 0] == store.vocabulary["[CLS]"]).all()
    assert (original(batch)[:, 1:].numpy() == windows.tokens_BW).all()
    assert (batch.tokens_BS == store.vocabulary["[MASK]"]).any(dim=1).all()
    labels_BS = batch.labels_BS()
    assert torch.equal(labels_BS.gather(1, places(batch)), batch.labels_BM)
    assert (labels_BS == IGNORED).sum() == 8 * (128 - 19)
    moved = batch.to("meta")
    assert isinstance(moved, Batch)
    assert moved.labels_BM.device.type == "meta"


def test_cls_belongs_to_the_first_document(store: TokenStore) -> None:
    objective = MaskedLM(store.vocabulary)
    windows = TrainData(store, 127, 8, seed=0, isolate=True).windows(0)
    segments_BS = objective.training(windows, seed=0).segments_BS
    assert segments_BS is not None
    assert windows.segments_BW is not None
    assert segments_BS.max() > 0
    assert (segments_BS[:, 0] == 0).all()
    assert (segments_BS[:, 1:].numpy() == windows.segments_BW).all()


def test_epochs_mask_the_same_window_differently(store: TokenStore) -> None:
    objective = MaskedLM(store.vocabulary)
    (count,) = TrainData(store, 127, 1, seed=0).samples
    whole = TrainData(store, 127, count, seed=0)
    first, second = (objective.training(whole.windows(epoch), seed=0) for epoch in (0, 1))
    rows = {tuple(row): i for i, row in enumerate(original(second).tolist())}
    moved = [rows[tuple(row)] for row in original(first).tolist()]
    assert not (places(first) == places(second)[moved]).all(dim=1).any()


def test_a_window_is_judged_on_the_same_mask_in_a_larger_set(store: TokenStore) -> None:
    objective, (domain,) = MaskedLM(store.vocabulary), EvalData(store, 15, 1).domains
    available = len(EvalData(store, 15, 10**6))
    everything, half = (
        objective.evaluation(next(EvalData(store, 15, count).windows(domain, available)))
        for count in (available, available // 2)
    )
    rows = [i * available // (available // 2) for i in range(available // 2)]
    for one, other in zip(half[:3], everything[:3], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other[rows])
