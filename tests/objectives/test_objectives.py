"""What every objective promises, how one is chosen, and that a vocabulary must have its special tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from raptr.data import TokenStore, Vocabulary, Windows
from raptr.data.batch import Batch
from raptr.data.prepare import Document, prepare
from raptr.objectives import SPECIALS, specials_of
from raptr.objectives.contract import Objective
from raptr.objectives.registry import OBJECTIVES
from raptr.train.config import Config
from raptr.train.loop import pretrain
from raptr.train.plan import plan_run
from raptr.train.run import RunFolder

QUIET = Console(quiet=True)
SETTINGS: dict[str, Any] = {
    "model": {"size": "tiny", "layers": 1, "width": 16, "heads": 4, "head_size": 4, "mlp": 16},
    "method": {"name": "full"},
    "data": {"length": 16},
    "train": {"steps": 2, "batch": 4, "eval_samples": 4, "device": "cpu"},
}
NOTHING_RANDOM = {"causal"}
every_objective = pytest.mark.parametrize("kind", OBJECTIVES.values(), ids=lambda kind: kind.name)


def vocabulary_for(kind: type[Objective]) -> Vocabulary:
    names = (*kind.specials.tokens, *(f"word{number}" for number in range(300)))
    return Vocabulary({name: number for number, name in enumerate(names)})


def windows(kind: type[Objective], length: int, samples: list[int]) -> Windows:
    """Ordinary tokens that differ from sample to sample."""
    width, first = kind.window(length), len(kind.specials.tokens)
    tokens = [[first + (7 * sample + place * place) % 300 for place in range(width)] for sample in samples]
    return Windows(np.array(tokens, np.int64), np.array(samples, np.uint64))


def places(batch: Batch) -> torch.Tensor:
    """Where the loss is taken."""
    everywhere_BS = torch.arange(batch.tokens_BS.shape[1]).expand_as(batch.tokens_BS)
    return everywhere_BS if batch.positions_BM is None else batch.positions_BM


def same(one: Batch, other: Batch) -> bool:
    assert [tensor is None for tensor in one] == [tensor is None for tensor in other]
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None)


@every_objective
@pytest.mark.parametrize("length", [8, 33, 128])
def test_shapes_are_those_that_are_promised(kind: type[Objective], length: int) -> None:
    assert OBJECTIVES[kind.name] is kind
    assert SPECIALS[kind.name] is kind.specials
    cycle = sum(kind.standard.values()) or 1
    samples = [cycle * number + place for number in (0, 5, 6) for place in range(cycle)]
    batch = kind(vocabulary_for(kind)).training(windows(kind, length, samples), seed=0)
    assert batch.tokens_BS.shape == (3 * cycle, length)
    assert places(batch).shape == batch.labels_BM.shape
    targets = kind.targets(length)
    assert batch.labels_BM.shape == ((3 * targets,) if kind.standard else (3, targets))
    assert (places(batch)[..., 1:] > places(batch)[..., :-1]).all()
    assert {tensor.dtype for tensor in batch if tensor is not None} == {torch.int64}


@every_objective
def test_a_sample_does_not_depend_on_its_batch(kind: type[Objective]) -> None:
    objective, samples = kind(vocabulary_for(kind)), [3, 10**9, 4, 2**50]
    together = objective.training(windows(kind, 32, samples), seed=7)
    for row, sample in enumerate(samples):
        alone = objective.training(windows(kind, 32, [sample]), seed=7)
        for name in ("tokens_BS", "segments_BS", "prefix_B"):
            one, all_of_them = getattr(alone, name), getattr(together, name)
            assert (one is None) == (all_of_them is None)
            assert one is None or torch.equal(one[0], all_of_them[row])
        assert torch.equal(alone.labels_BS()[0], together.labels_BS()[row])


@every_objective
def test_evaluation_knows_no_seed(kind: type[Objective]) -> None:
    objective, some = kind(vocabulary_for(kind)), windows(kind, 32, [0, 1, 2])
    assert same(objective.evaluation(some), objective.batch(some, 0, "evaluation"))
    fixed = kind.name in NOTHING_RANDOM
    assert same(objective.evaluation(some), objective.training(some, seed=0)) == fixed
    assert same(objective.training(some, seed=1), objective.training(some, seed=0)) == fixed


@pytest.mark.parametrize("name", SPECIALS)
def test_every_objective_has_an_end_among_its_special_tokens(name: str) -> None:
    specials = SPECIALS[name]
    assert specials.objective == name
    assert len(set(specials.tokens)) == len(specials.tokens)
    assert {specials.end, specials.start or specials.end} <= set(specials.tokens)


def test_ul2_has_modes_and_enough_sentinels() -> None:
    tokens = SPECIALS["ul2"].tokens
    assert {"[NLU]", "[S2S]", "[NLG]", *SPECIALS["causal"].tokens} <= set(tokens)
    assert sum(token.startswith("<extra_id_") for token in tokens) >= 64  # (3, 0.5) at a length of 512 needs 64


def test_the_objective_is_recorded_and_older_configurations_have_none(store: TokenStore, tmp_path: Path) -> None:
    config = Config.read({**SETTINGS, "data": {**SETTINGS["data"], "source": str(store.path)}})
    pretrain(config, tmp_path / "run", until=1, console=QUIET)
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recorded.pop("objective") == {"name": "mlm"}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(recorded))
    assert RunFolder(tmp_path / "run").read().objective.name == "mlm"
    assert pretrain(config, tmp_path / "run", console=QUIET).step == 2


@pytest.mark.parametrize("name", ["causal", "ul2"])
def test_an_objective_that_the_family_cannot_learn_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"objective.name is {name}.*bert.*mlm"):
        Config.read({**SETTINGS, "train": {**SETTINGS["train"], "batch": 16}, "objective": {"name": name}})


@every_objective
def test_held_out_samples_have_one_denoiser_each_where_there_are_any(kind: type[Objective]) -> None:
    judged = kind(vocabulary_for(kind)).denoisers(windows(kind, 32, list(range(50))))
    assert judged.keys() == kind.standard.keys()
    assert not judged or (np.stack(list(judged.values())).sum(axis=0) == 1).all()


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(ValueError, match=r"objective.name is 'mlmm'.*'mlm'"):
        Config.read({**SETTINGS, "objective": {"name": "mlmm"}})


@pytest.mark.parametrize(
    ("prepared", "family", "sentence"),
    [
        ("causal", "bert", "prepared for causal.*bert .*mlm.*raptr prepare --objective mlm.*--family decoder"),
        ("mlm", "decoder", "prepared for mlm.*decoder .*causal.*raptr prepare --objective causal.*--family bert"),
        ("ul2", "bert", "prepared for ul2.*bert .*mlm.*raptr prepare --objective mlm"),
    ],
)
def test_data_for_another_objective_are_refused_before_anything_is_written(
    prepared: str, family: str, sentence: str, tmp_path: Path
) -> None:
    documents = [Document(f"{i}", f"text number {i} says {i * i} and no more") for i in range(50)]
    other = prepare(tmp_path / "store", lambda: documents, 400, specials=SPECIALS[prepared])
    model = {**SETTINGS["model"], "family": family}
    config = Config.read({**SETTINGS, "model": model, "data": {**SETTINGS["data"], "source": str(other.path)}})
    with pytest.raises(ValueError, match=f"data.source is '{other.path}', {sentence}"):
        pretrain(config, tmp_path / "run", console=QUIET)
    with pytest.raises(ValueError, match=sentence):
        plan_run(config)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_an_unknown_objective_has_no_special_tokens() -> None:
    assert {name: specials_of(name) for name in SPECIALS} == SPECIALS
    with pytest.raises(ValueError, match=r"objective is 'clm'.*mlm, causal, ul2"):
        specials_of("clm")
