"""Every denoiser's sequence turns back into its text, has the promised counts, and shows no target too early."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from raptr.data import Vocabulary, Windows
from raptr.data.batch import IGNORED, Batch
from raptr.data.source import Int64s
from raptr.objectives.contract import Mixture
from raptr.objectives.specials import MODES, SENTINELS
from raptr.objectives.specials import UL2 as TOKENS
from raptr.objectives.ul2 import STANDARD, UL2, Denoiser, denoisers, sizes

FIRST = len(TOKENS.tokens)
VOCABULARY = Vocabulary(
    {name: number for number, name in enumerate((*TOKENS.tokens, *(f"word{i}" for i in range(3000))))}
)
SENTINEL_IDS = [VOCABULARY[token] for token in SENTINELS]
MODE_IDS = [VOCABULARY[token] for token in MODES]
END = VOCABULARY["[EOS]"]
OBJECTIVE = UL2(VOCABULARY)
R, S, X = MODES
MIXTURE = denoisers(STANDARD)
MOST_HIDDEN = Denoiser("X", 1, 0.75, 2)  # as many spans as there are gaps between the visible tokens


def windows(length: int, samples: list[int]) -> Windows:
    """Ordinary tokens, no two of which are equal in a window."""
    width = UL2.window(length)
    tokens = [[FIRST + (7 * sample + place) % 3000 for place in range(width)] for sample in samples]
    return Windows(np.array(tokens, np.int64), np.array(samples, np.uint64))


def alone(denoiser: Denoiser) -> UL2:
    return UL2(VOCABULARY, {denoiser.name: 2})


def text_of(row: list[int], prefix: int) -> tuple[list[int], list[int]]:
    """The text that a sequence stands for, and the lengths of its hidden spans."""
    mode, inputs, targets = row[0], row[1:prefix], row[prefix:-1]
    assert mode in MODE_IDS
    assert row[-1] == END
    if mode == VOCABULARY[S]:
        assert inputs
        assert targets
        return inputs + targets, [len(targets)]
    spans: dict[int, list[int]] = {}
    for token in targets:
        if token in SENTINEL_IDS:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    used = [token for token in inputs if token in SENTINEL_IDS]
    assert list(spans) == used == SENTINEL_IDS[: len(used)]
    assert not any(a in used and b in used for a, b in pairwise(inputs))
    restored = [one for token in inputs for one in spans.get(token, [token])]
    return restored, [len(span) for span in spans.values()]


def sees(batch: Batch) -> torch.Tensor:
    """Whether position q may use position k, (B, q, k)."""
    assert batch.prefix_B is not None
    place = torch.arange(batch.tokens_BS.shape[1])
    return (place <= place[:, None]) | (place < batch.prefix_B[:, None, None])


def rows(batch: Batch) -> list[tuple[list[int], int]]:
    assert batch.prefix_B is not None
    return list(zip(batch.tokens_BS.tolist(), batch.prefix_B.tolist(), strict=True))


@pytest.mark.parametrize(
    ("span", "rate", "raw", "hidden", "spans", "prefix", "targets"),
    [
        (3, 0.15, 464, 70, 23, 418, 94),
        (8, 0.15, 492, 74, 9, 428, 84),
        (3, 0.5, 382, 191, 64, 256, 256),
        (8, 0.5, 454, 227, 28, 256, 256),
        (64, 0.15, 508, 76, 1, 434, 78),
        (64, 0.5, 502, 251, 4, 256, 256),
    ],
)
def test_sizes_at_512(span: int, rate: float, raw: int, hidden: int, spans: int, prefix: int, targets: int) -> None:
    found = sizes(512, span, rate)
    assert (found.raw, found.hidden, found.spans, found.prefix) == (raw, hidden, spans, prefix)
    (denoiser,) = [one for one in MIXTURE if (one.span, one.rate) == (span, rate)]
    batch = alone(denoiser).training(windows(512, [0, 1, 2]), seed=0)
    for row, start in rows(batch):
        text, lengths = text_of(row, start)
        assert (len(text), sum(lengths), len(lengths), start) == (raw, hidden, spans, prefix)
    assert len(batch.labels_BM) == 3 * targets


@pytest.mark.parametrize("length", [8, 9, 33, 128, 512])
@pytest.mark.parametrize("denoiser", [*MIXTURE, MOST_HIDDEN], ids=lambda one: f"{one.mode}-{one.span}-{one.rate}")
def test_every_sequence_turns_back_into_its_text(denoiser: Denoiser, length: int) -> None:
    given = windows(length, list(range(50)))
    batch = alone(denoiser).training(given, seed=3)
    assert batch.tokens_BS.shape == (50, length)
    offsets = set()
    for (row, prefix), whole in zip(rows(batch), given.tokens_BW.tolist(), strict=True):
        assert row[0] == VOCABULARY[denoiser.mode]
        text, _ = text_of(row, prefix)
        offset = whole.index(text[0])
        assert whole[offset : offset + len(text)] == text
        offsets.add(offset)
    unused = 0 if not denoiser.span else length - 2 - sizes(length, denoiser.span, denoiser.rate).raw
    assert min(offsets) >= 0
    assert max(offsets) <= unused
    assert len(offsets) > min(unused, 3)


def test_modes_belong_to_their_denoisers() -> None:
    assert (R, S, X) == ("[NLU]", "[S2S]", "[NLG]")
    kinds = {(one.span, one.rate): one.mode for one in MIXTURE}
    assert {kind for kind, mode in kinds.items() if mode == R} == {(3, 0.15), (8, 0.15)}
    assert {kind for kind, mode in kinds.items() if mode == X} == {(3, 0.5), (8, 0.5), (64, 0.15), (64, 0.5)}
    assert {kind for kind, mode in kinds.items() if mode == S} == {(0, 0.0)}


HALF = {name: {"R": 2, "S": 8, "X": 1}[name[0]] for name in reversed(list(STANDARD))}


@pytest.mark.parametrize(("mixture", "targets"), [(STANDARD, 3072), (HALF, 3250)], ids=["standard", "half S"])
def test_a_cycle_always_has_the_same_targets(mixture: Mixture, targets: int) -> None:
    objective = UL2(VOCABULARY, mixture)
    assert objective.cycle == 16
    for cycle in (0, 1, 2, 10**9):
        batch = objective.training(windows(512, list(range(16 * cycle, 16 * cycle + 16))), seed=5)
        assert batch.labels_BM.shape == (targets,)
        modes = [MODES[MODE_IDS.index(row[0])] for row, _ in rows(batch)]
        assert [modes.count(mode) for mode in MODES] == [
            sum(quota for name, quota in mixture.items() if name[0] == letter) for letter in "RSX"
        ]
    assert UL2.targets(512, mixture) == targets


def test_splits_come_in_pairs_and_differ() -> None:
    batch = UL2(VOCABULARY, {"S": 2}).training(windows(64, list(range(2000))), seed=0)
    splits = [prefix - 1 for _, prefix in rows(batch)]
    assert all(one + other == 62 for one, other in zip(splits[::2], splits[1::2], strict=True))
    assert set(splits) == set(range(1, 62))


def test_the_loss_is_taken_where_the_next_token_is_a_target() -> None:
    batch = OBJECTIVE.training(windows(64, list(range(32))), seed=1)
    labels_BS = batch.labels_BS()
    for row, (tokens, prefix) in enumerate(rows(batch)):
        expected = [IGNORED] * (prefix - 1) + tokens[prefix:] + [IGNORED]
        assert labels_BS[row].tolist() == expected
    assert batch.positions_BM is not None
    assert (batch.positions_BM[1:] > batch.positions_BM[:-1]).all()
    assert {tensor.dtype for tensor in batch if tensor is not None} == {torch.int64}


@pytest.mark.parametrize("length", [16, 40])
def test_no_label_can_be_seen_where_it_is_predicted(length: int) -> None:
    samples = list(range(16))
    given = windows(length, samples)
    batch = OBJECTIVE.training(given, seed=2)
    labels_BS, visible = batch.labels_BS(), sees(batch)
    assert batch.prefix_B is not None
    seen, predicted = 0, 0
    for place in range(given.tokens_BW.shape[1]):
        tokens_BW = given.tokens_BW.copy()
        tokens_BW[:, place] = FIRST + 2999
        other = OBJECTIVE.training(given._replace(tokens_BW=tokens_BW), seed=2)
        assert other.prefix_B is not None
        assert torch.equal(other.prefix_B, batch.prefix_B)
        inputs, labels = other.tokens_BS != batch.tokens_BS, other.labels_BS() != labels_BS
        # A token stands in its sequence at most once; what it changes can not be seen where it is the label.
        assert inputs.sum(dim=1).max() <= 1
        assert not (visible & inputs.unsqueeze(1) & labels.unsqueeze(2)).any()
        behind = torch.arange(length) >= batch.prefix_B[:, None]
        assert torch.equal(labels[:, :-1], (inputs & behind)[:, 1:])
        seen, predicted = seen + int((inputs & ~behind).sum()), predicted + int(labels.sum())
    assert seen > 100
    assert predicted > 50


def test_the_prefix_is_seen_by_all_and_the_first_target_by_none_before_it() -> None:
    batch = OBJECTIVE.training(windows(40, list(range(16))), seed=2)
    for visible, (_, prefix) in zip(sees(batch), rows(batch), strict=True):
        assert visible[:, :prefix].all()
        assert not visible[:prefix, prefix:].any()
        assert visible[prefix, prefix]


def test_a_sample_does_not_depend_on_its_batch() -> None:
    samples = [3, 10**9, 4, 2**50, 0, 7, 15]
    together = OBJECTIVE.training(windows(64, samples), seed=7)
    for row, sample in enumerate(samples):
        one = OBJECTIVE.training(windows(64, [sample]), seed=7)
        assert torch.equal(one.tokens_BS[0], together.tokens_BS[row])
        assert torch.equal(one.labels_BS()[0], together.labels_BS()[row])
    assert not torch.equal(OBJECTIVE.training(windows(64, samples), seed=8).tokens_BS, together.tokens_BS)


def test_evaluation_knows_no_seed_and_has_all_denoisers_however_windows_are_spread() -> None:
    given = windows(64, [16 * i for i in range(300)])
    batch = OBJECTIVE.evaluation(given)
    assert torch.equal(batch.tokens_BS, OBJECTIVE.batch(given, 0, "evaluation").tokens_BS)
    shares = [batch.tokens_BS[:, 0].tolist().count(mode) / 300 for mode in MODE_IDS]
    assert np.abs(np.array(shares) - [0.25, 0.25, 0.5]).max() < 0.08


@pytest.mark.parametrize("denoiser", [one for one in MIXTURE if one.span], ids=lambda one: f"{one.span}-{one.rate}")
def test_every_place_of_a_text_is_hidden_now_and_then(denoiser: Denoiser) -> None:
    count = 3000
    tokens_BW = np.tile(np.arange(62) + FIRST, (count, 1))
    given = Windows(tokens_BW, np.arange(count, dtype=np.uint64))
    batch = alone(denoiser).training(given, seed=0)
    assert denoiser.span is not None
    size = sizes(64, denoiser.span, denoiser.rate)
    often: Int64s = np.zeros(size.raw, np.int64)
    for row, prefix in rows(batch):
        text, _ = text_of(row, prefix)
        hidden = set(row[prefix:]) & set(text)
        often += [token in hidden for token in text]
    rate = size.hidden / size.raw
    assert often.sum() == count * size.hidden
    # An end is hidden where its gap is one of those that were chosen; inside, a place is as good as another.
    assert often[[0, -1]] / count == pytest.approx(size.spans / (size.raw - size.hidden + 1), abs=0.03)
    assert often.min() > 0
    assert often.max() < count
    if size.spans > 3:
        assert often[2:-2] / count == pytest.approx(rate, abs=0.05)


def test_golden_values() -> None:
    batch = OBJECTIVE.training(windows(12, [0, 4, 5, 9]), seed=0)
    assert rows(batch) == [
        ([2, 106, 107, 5, 109, 110, 111, 112, 113, 5, 108, 1], 9),
        ([3, 133, 134, 135, 136, 137, 138, 139, 140, 141, 142, 1], 7),
        ([3, 140, 141, 142, 143, 144, 145, 146, 147, 148, 149, 1], 5),
        ([4, 170, 171, 172, 5, 177, 5, 173, 174, 175, 176, 1], 6),
    ]


def test_the_order_of_a_mixture_says_nothing_and_denoisers_without_samples_are_left_out() -> None:
    given = windows(64, list(range(16)))
    other = UL2(VOCABULARY, {**dict(reversed(list(STANDARD.items()))), "X-5-0.3": 0})
    assert torch.equal(other.training(given, seed=0).tokens_BS, OBJECTIVE.training(given, seed=0).tokens_BS)
    assert [one.name for one in other.mixture] == list(STANDARD)


def test_held_out_samples_are_judged_by_the_denoiser_of_their_mode() -> None:
    given = windows(64, list(range(400)))
    batch, judged = OBJECTIVE.evaluation(given), OBJECTIVE.denoisers(given)
    assert list(judged) == list(STANDARD)
    assert np.stack(list(judged.values())).sum(axis=0).tolist() == [1] * 400
    assert batch.prefix_B is not None
    for one in OBJECTIVE.mixture:
        here = judged[one.name]
        assert here.mean() == pytest.approx(one.quota / 16, abs=0.06)
        assert (batch.tokens_BS[here, 0] == VOCABULARY[one.mode]).all()
        assert not one.span or (batch.prefix_B[here] == sizes(64, one.span, one.rate).prefix).all()


@pytest.mark.parametrize(
    ("mixture", "told"),
    [
        ({"S": 3}, r"\bS 3\b.*even"),
        ({"S": 0, "X-8-0.5": 0}, "no denoiser"),
        ({}, "no denoiser"),
        ({"R-3-0.15": -2}, r"R-3-0\.15 -2\b"),
        ({"R-3-0.15": True}, r"R-3-0\.15 True"),
        ({"R-3-0.15": 0.5}, r"R-3-0\.15 0\.5"),
        ({"Q-3-0.15": 2}, r"'Q-3-0\.15'.*X-64-0\.5"),
        ({"R-3-.15": 2}, r"'R-3-\.15'"),
        ({"R-3-0.150": 2}, r"'R-3-0\.150'"),
        ({"R-3-0.0": 2}, r"'R-3-0\.0'"),
        ({"S-3-0.5": 2}, r"'S-3-0\.5'"),
        ({3: 2}, r"has 3\b"),
    ],
)
def test_a_bad_mixture_gets_a_sentence(mixture: Mixture, told: str) -> None:
    with pytest.raises(ValueError, match=rf"objective\.mixture.*{told}"):
        UL2(VOCABULARY, mixture)


def test_bad_settings_get_a_sentence() -> None:
    assert sizes(802, 3, 0.5).spans == 100  # as many as there are sentinels
    with pytest.raises(ValueError, match=r"data\.length.*1024.*128.*100"):
        sizes(1024, 3, 0.5)
    with pytest.raises(ValueError, match=r"data\.length.* 4\b"):
        sizes(4, 3, 0.15)
    with pytest.raises(ValueError, match=r"lacks \[NLU\]"):
        UL2(Vocabulary({"[PAD]": 0, "[EOS]": 1, "the": 2}))
    given = windows(16, [0])
    with pytest.raises(ValueError, match=r"data\.isolate_documents.*ul2"):
        OBJECTIVE.training(given._replace(segments_BW=np.zeros_like(given.tokens_BW)), seed=0)
