"""The held-out loss of several domains, over windows and by the weights of the mixture."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from raptr.data import EvalData, TokenStore
from raptr.data.batch import Batch
from raptr.data.prepare import Document, parse_domain, prepare, prepare_corpus
from raptr.methods import make_method
from raptr.models.model import Model
from raptr.objectives import SPECIALS
from raptr.objectives.causal import CausalLM
from raptr.objectives.contract import Objective
from raptr.objectives.mlm import MaskedLM
from raptr.objectives.ul2 import UL2
from raptr.subnetworks import Shape, Subnetwork
from raptr.train.config import Config
from raptr.train.evaluate import Evaluation, evaluate, evaluate_size
from tests.train.legs import leg, records

SETTINGS = {
    "model": {"size": "tiny", "width": 16, "heads": 4, "head_size": 4, "mlp": 16},
    "method": {"name": "full"},
    "data": {"length": 24},
    "train": {"steps": 2, "batch": 4, "eval_samples": 100, "device": "cpu"},
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """A domain of large weight with little held-out text, beside one of small weight with much."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, count, length in (("little", 40, 1), ("much", 400, 9)):
        texts = [f"{name} text {i} says {i * i} and no more. " * length for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    domains = [parse_domain(f"{folder}/little.jsonl:9"), parse_domain(f"{folder}/much.jsonl:1")]
    return prepare_corpus(domains, folder / "store", vocabulary=300, held_out=0.1)


def test_both_means_are_recorded(mixture: TokenStore, tmp_path: Path) -> None:
    leg(Config.read(SETTINGS), tmp_path / "run", mixture)
    evals = [record for record in records(tmp_path / "run") if record["kind"] == "eval"]
    data = EvalData(mixture, 23, 100)
    windows = {name: sum(len(windows.tokens_BW) for windows in data.windows(name, 4)) for name in data.domains}
    assert windows["much"] == 10
    assert windows["little"] < 45  # less than its share of the mixture
    assert data.shares == {"little": 0.9, "much": 0.1}
    for record in evals:
        losses = record["domains"]
        by_window = sum(losses[name] * windows[name] for name in windows) / sum(windows.values())
        assert record["loss"] == pytest.approx(by_window, rel=1e-12)
        assert record["loss_mixture"] == pytest.approx(0.9 * losses["little"] + 0.1 * losses["much"], rel=1e-12)
        assert record["loss_mixture"] != record["loss"]


class Constant(nn.Module):
    """A model whose loss depends on nothing but the first token of each sequence: (id % 7) + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def inputs(self, subnetwork: Subnetwork, stream: None) -> None:
        """Nothing of the subnetwork matters."""

    def losses(self, batch: Batch, inputs: None, targets: Sequence[Batch]) -> list[Tensor]:
        assert not self.training  # nothing is dropped
        return [self.loss(batch.tokens_BS, chosen) for chosen in targets]

    def loss(self, x_BS: Tensor, batch: Batch) -> Tensor:
        return (x_BS[:, 0] % 7 + 1).double().mean()


def judged(kind: type[Objective], store: TokenStore) -> Evaluation:
    objective = kind(store.vocabulary)
    data = EvalData(store, objective.window(24), 100)
    for training in (False, True):
        model = Constant().train(training)
        found = evaluate(cast(Model, model), objective, data, Subnetwork.full(1), batch=4)
        assert model.training == training
    return found


def test_bits_per_byte_and_perplexity_belong_to_the_likelihood_of_text(tmp_path: Path) -> None:
    folder = tmp_path
    for name, word in (("plain", "word"), ("wide", "ß€")):
        texts = [f"{word} {i} {word}{i * i} and no more. " * 5 for i in range(90)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    domains = [parse_domain(f"{folder}/plain.jsonl"), parse_domain(f"{folder}/wide.jsonl")]
    store = prepare_corpus(domains, folder / "store", vocabulary=300, held_out=0.2, specials=SPECIALS["causal"])
    found, per_token = judged(CausalLM, store), store.bytes_per_token("valid")
    assert per_token["wide"] != per_token["plain"]
    assert found.likelihood["perplexity"] == pytest.approx(math.exp(found.loss))
    data = EvalData(store, 25, 100)
    windows = {name: sum(len(some.tokens_BW) for some in data.windows(name, 4)) for name in data.domains}
    # Over the windows: all bits that they cost, by all bytes that they have.
    bits = sum(windows[name] * 24 * found.domains[name] / math.log(2) for name in windows)
    size = sum(windows[name] * 24 * per_token[name] for name in windows)
    assert found.likelihood["bits_per_byte"] == pytest.approx(bits / size)
    uncounted = tuple(replace(part, valid_bytes=None) for part in store.manifest.domains)
    older = replace(store, manifest=replace(store.manifest, domains=uncounted))
    assert judged(CausalLM, older).likelihood.keys() == {"perplexity"}


class OfLabels(Constant):
    """A model whose loss is the mean over the targets of (label % 7)."""

    def loss(self, x_BS: Tensor, batch: Batch) -> Tensor:
        if batch.prefix_B is not None:  # flat targets belong to their positions
            assert batch.positions_BM is not None
            assert torch.equal(x_BS.flatten()[batch.positions_BM + 1], batch.labels_BM)
        return (batch.labels_BM % 7).double().mean()


class Diverging(Constant):
    def loss(self, x_BS: Tensor, batch: Batch) -> Tensor:
        return torch.tensor(1e4)


def test_a_loss_without_a_finite_exponential_is_judged_too(stores: dict[str, TokenStore]) -> None:
    objective = CausalLM(stores["decoder"].vocabulary)
    data = EvalData(stores["decoder"], objective.window(24), 4)
    found = evaluate(cast(Model, Diverging()), objective, data, Subnetwork.full(1), batch=4)
    assert found.loss == 1e4
    assert 1e300 < found.likelihood["perplexity"] < math.inf


def test_parts_of_one_size_are_averaged() -> None:
    method, seen = make_method("raptr", shape=Shape(12), steps=100), list[Subnetwork]()

    def judge(part: Subnetwork) -> Evaluation:
        seen.append(part)
        return Evaluation(float(sum(part.kept)), {}, 0.0, {}, {})

    mean = evaluate_size(judge, method, 6, 100)
    assert {part.size for part in seen} == {6}
    assert len(set(seen)) == len(seen) == 4
    assert mean == sum(sum(part.kept) for part in seen) / 4


@pytest.mark.parametrize("kind", [CausalLM, UL2], ids=lambda kind: kind.name)
def test_the_mean_is_over_targets_however_windows_are_batched(kind: type[Objective], tmp_path: Path) -> None:
    documents = [Document(f"{i}", f"text {i} says {i * i} and no more. " * 9) for i in range(200)]
    store = prepare(tmp_path / "store", lambda: documents, 500, valid=lambda: documents[::4], specials=kind.specials)
    objective = kind(store.vocabulary)
    data = EvalData(store, objective.window(24), 100)
    batches = [objective.evaluation(windows) for windows in data.windows("text", 1)]
    every = [objective.denoisers(windows) for windows in data.windows("text", 1)]
    judges = {name: [one[name] for one in every] for name in kind.standard}
    labels = torch.cat([batch.labels_BM.flatten() for batch in batches])
    expected = (labels % 7).double().mean().item()
    for size in (1, 7, 64):
        found = evaluate(cast(Model, OfLabels()), objective, data, Subnetwork.full(1), batch=size)
        assert found.loss == pytest.approx(expected, rel=1e-12)
        assert found.denoisers.keys() == kind.standard.keys()
        for name, loss in found.denoisers.items():
            own = [batch.labels_BM % 7 for batch, (rows,) in zip(batches, judges[name], strict=True) if rows]
            assert loss == pytest.approx(torch.cat(own).double().mean().item(), rel=1e-12)


def test_masked_language_modelling_has_no_likelihood_of_text(mixture: TokenStore, tmp_path: Path) -> None:
    assert judged(MaskedLM, mixture).likelihood == {}
    leg(Config.read(SETTINGS), tmp_path / "run", mixture)
    assert not any({"perplexity", "bits_per_byte"} & record.keys() for record in records(tmp_path / "run"))


def test_one_domain_has_one_mean(store: TokenStore, tmp_path: Path) -> None:
    leg(Config.read(SETTINGS), tmp_path / "run", store)
    assert not any("loss_mixture" in record for record in records(tmp_path / "run"))
