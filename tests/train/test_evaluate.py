"""The held-out loss of several domains, over windows and by the weights of the mixture."""

import json
from pathlib import Path

import pytest

from raptr.data import EvalData, TokenStore
from raptr.data.prepare import parse_domain, prepare_corpus
from raptr.train.config import Config
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


def test_one_domain_has_one_mean(store: TokenStore, tmp_path: Path) -> None:
    leg(Config.read(SETTINGS), tmp_path / "run", store)
    assert not any("loss_mixture" in record for record in records(tmp_path / "run"))
