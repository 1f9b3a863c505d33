"""Bypassing one layer of a trained model: our model by hand, a stock model on the same weights, and a run folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor
from transformers import BertConfig as StockBertConfig
from transformers import BertForMaskedLM

from raptr.data import TokenStore
from raptr.data.batch import Batch
from raptr.data.source import EvalData
from raptr.methods.pld import PLD
from raptr.models.bert.config import BertConfig
from raptr.models.bert.export import to_transformers
from raptr.models.bert.model import Bert
from raptr.objectives.mlm import MaskedLM
from raptr.studies import stability
from raptr.studies.stability import measure, probe_attached, probe_model, stability_of, study_stability
from raptr.subnetworks import Subnetwork
from raptr.train import checkpoint
from raptr.train.config import Config
from raptr.train.evaluate import evaluate
from raptr.train.loop import pretrain

QUIET = Console(quiet=True)
LAYERS, LENGTH, SIZE = 4, 16, 600


def config_of(store: TokenStore, method: dict[str, Any]) -> Config:
    return Config.read(
        {
            "model": {"size": "tiny", "layers": LAYERS, "width": 16, "heads": 4, "head_size": 4, "mlp": 16},
            "method": method,
            "data": {"source": str(store.path), "length": LENGTH, "vocabulary": SIZE},
            "optimizer": {"peak": 0.01, "warmup": 3},
            "train": {"steps": 8, "batch": 4, "eval_samples": 8, "device": "cpu"},
        }
    )


@pytest.fixture(scope="module")
def trained(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_of(store, {"name": "raptr", "schedule": "3-4", "average": 3.25, "fixed": [], "scaling": "sqrt"})
    run = tmp_path_factory.mktemp("runs") / "hamlet"
    pretrain(config, run, until=6, console=QUIET)
    return run


def model_of(vocabulary: int, layers: int = LAYERS) -> Bert:
    """A model whose layers do something: initial weights are too small for that."""
    config = BertConfig(layers, width=16, heads=4, head_size=4, mlp=16, vocabulary=vocabulary, positions=LENGTH)
    model = Bert(config, seed=4).eval()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
    return model


def batch_of(vocabulary: int, rows: int = 3, shift: int = 0) -> Batch:
    tokens = (torch.arange(rows * LENGTH).view(rows, LENGTH) * 7 + shift) % (vocabulary - 5) + 5
    positions = torch.tensor([[2, 9]]).repeat(rows, 1)
    return Batch(tokens, positions, tokens.gather(1, positions).flip(0) + 0)


@torch.no_grad()
def by_hand(model: Bert, batch: Batch, kept: list[int]) -> tuple[list[Tensor], float]:
    """Hidden states and loss of the listed layers, run in a plain loop."""
    positions = model.embedding.positions.weight[: batch.tokens_BS.shape[1]]
    x = model.embedding.norm(model.tokens(batch.tokens_BS) + positions)
    states = []
    inputs = model.inputs(Subnetwork.full(len(model.blocks))).blocks
    for layer in kept:
        x = model.blocks[layer](x, inputs[layer])
        states.append(x)
    y = model.head.final_norm(x)[torch.arange(len(x)).unsqueeze(1), batch.positions_BM]
    y = model.head.norm(torch.nn.functional.gelu(model.head.dense(y)))
    scores = y @ model.tokens.weight.T + model.head_bias
    return states, torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch.labels_BM.flatten()).item()


def test_our_model_equals_a_computation_by_hand() -> None:
    model, batch = model_of(60), batch_of(60)
    found = measure(probe_model(model), batch)
    states, loss = by_hand(model, batch, list(range(LAYERS)))
    final = states[-1]
    assert found["norms"] == pytest.approx([state.norm(dim=-1).mean().item() for state in states], rel=1e-5)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["tokens"] == 3 * LENGTH
    for layer in range(LAYERS):
        others, without = by_hand(model, batch, [other for other in range(LAYERS) if other != layer])
        psi = (others[-1] - final).norm(dim=-1)
        assert found["psi"][layer] == pytest.approx(psi.mean().item(), rel=1e-5)
        assert found["relative"][layer] == pytest.approx((psi / final.norm(dim=-1)).mean().item(), rel=1e-5)
        assert found["losses_without"][layer] == pytest.approx(without, rel=1e-5)
    assert found["losses_as_trained"] == found["losses_without"]
    assert max(found["psi"]) > 1.1 * min(found["psi"])
    assert not any(block._forward_hooks for block in model.blocks)


def stock_batch(batch: Batch, **more: Tensor) -> dict[str, Tensor]:
    return {"input_ids": batch.tokens_BS, "labels": batch.labels_BS(), **more}


def test_a_stock_model_on_the_same_weights_gives_the_same_numbers(store: TokenStore) -> None:
    size = store.vocabulary.size
    model = model_of(size)
    stock = to_transformers(model, Subnetwork.full(LAYERS), store.vocabulary)
    batches = [batch_of(size), batch_of(size, rows=2, shift=11)]
    mine = stability.stability(probe_model(model), batches)
    stock.train()
    theirs = stability_of(stock, [stock_batch(batch) for batch in batches])
    assert stock.training, "the model is left as it was"
    for key in ("norms", "psi", "relative", "loss", "losses_without", "mean_loss_without", "mean_relative"):
        assert theirs[key] == pytest.approx(mine[key], abs=1e-4), key
    for key in mine["exponents"]:
        assert theirs["exponents"][key]["mean"] == pytest.approx(mine["exponents"][key]["mean"], abs=1e-4)
    assert isinstance(stability.plot([mine, theirs]), Figure)


def test_padding_does_not_count(store: TokenStore) -> None:
    size = store.vocabulary.size
    stock = to_transformers(model_of(size), Subnetwork.full(LAYERS), store.vocabulary)
    short = batch_of(size, rows=2)
    plain = measure(probe_attached(stock), stock_batch(short))
    padded = {
        "input_ids": torch.cat([short.tokens_BS[:, :12], torch.full((2, 4), store.vocabulary["[PAD]"])], dim=1),
        "attention_mask": torch.tensor([[1] * 12 + [0] * 4] * 2),
    }
    cut = stock_batch(short._replace(tokens_BS=short.tokens_BS[:, :12]))
    labels = torch.cat([cut["labels"], torch.full((2, 4), -100)], dim=1)
    found = measure(probe_attached(stock), {**padded, "labels": labels})
    expected = measure(probe_attached(stock), cut)
    assert found["tokens"] == 24
    assert found["psi"] == pytest.approx(expected["psi"], rel=1e-4)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert found["psi"] != pytest.approx(plain["psi"], rel=1e-4)


def test_a_stock_bert_and_a_batch_without_labels() -> None:
    config = StockBertConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    torch.manual_seed(0)
    tokens = torch.arange(24).view(2, 12) + 3
    found = stability_of(BertForMaskedLM(config), [{"input_ids": tokens, "labels": tokens}])
    # its layers end with a normalisation, so norms cannot grow
    assert found["norms"] == pytest.approx([4.0] * 3, rel=0.01)
    assert found["environment"]["torch"]
    with pytest.raises(ValueError, match=r"input_ids.*labels"):
        stability_of(BertForMaskedLM(config), [{"input_ids": tokens}])
    with pytest.raises(ValueError, match="no batch"):
        stability_of(BertForMaskedLM(config), [])
    with pytest.raises(ValueError, match=r"1 layer.* 2 "):
        measure(probe_model(model_of(60, layers=1)), batch_of(60))


def made(power: float, growth: float, loss: float, weight: int, layers: int = 8) -> dict[str, Any]:
    places = range(1, layers + 1)
    return {
        "tokens": weight * 10,
        "weight": weight,
        "norms": [3 * place**growth for place in places],
        "psi": [0.5 * (layers / place) ** power for place in places],
        "relative": [0.1] * layers,
        "loss": loss,
        "losses_without": [loss + 0.01 * place for place in places],
        "losses_as_trained": [loss + 0.5] * layers,
    }


def test_exponents_means_and_gaps_of_made_up_numbers() -> None:
    found = stability.gather([made(0.12, 1.0, 2.0, 3), made(0.12, 1.0, 6.0, 1)])
    assert found["exponents"]["psi"]["mean"] == pytest.approx(0.12)
    assert found["exponents"]["psi_inner"]["mean"] == pytest.approx(0.12)
    assert found["exponents"]["norm"]["mean"] == pytest.approx(1)
    assert found["norm_line"] == pytest.approx({"slope": 3, "start": 0, "explained": 1}, abs=1e-9)
    assert found["loss"] == pytest.approx(3)  # three times as many tokens at 2 as at 6
    assert found["mean_loss_without"] == pytest.approx(3.045)
    assert found["gap"]["mean"] == pytest.approx(0.045)
    assert found["gap_as_trained"]["mean"] == pytest.approx(0.5)
    assert found["needed_constant"] == pytest.approx(0.45)
    inner = made(0.12, 1.0, 2.0, 1)
    inner["psi"][0], inner["psi"][-1] = 9.0, 0.01
    odd = stability.gather([inner])["exponents"]
    assert odd["psi_inner"]["mean"] == pytest.approx(0.12)
    assert odd["psi"]["mean"] > 0.5


def test_the_study_of_a_run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = study_stability(trained, tmp_path, batches=3, device="cpu", console=QUIET)
    assert folder == tmp_path / "stability-hamlet"
    result = json.loads((folder / "result.json").read_text())
    assert (result["step"], result["layers"], result["batches"], result["tokens"]) == (6, 4, 3, 3 * 4 * LENGTH)
    assert result["config"]["method"]["name"] == "raptr"
    assert (folder / "stability.png").stat().st_size > 10_000
    # a layer below the one left out is scaled in training, so the last differs and the first does not
    pairs = list(zip(result["losses_as_trained"], result["losses_without"], strict=True))
    assert pairs[0][0] == pytest.approx(pairs[0][1], rel=1e-6)
    assert pairs[1][0] != pytest.approx(pairs[1][1], rel=1e-6)
    # stopped after the first part, it goes on
    listed = sorted(folder.glob("job-*.json"))
    assert len(listed) == 3
    listed[1].unlink()
    calls: list[Any] = []
    original: Callable[..., dict[str, Any]] = stability.measure

    def counted(probe: Any, batch: Any) -> dict[str, Any]:
        calls.append(batch)
        return original(probe, batch)

    monkeypatch.setattr(stability, "measure", counted)
    study_stability(trained, tmp_path, batches=3, device="cpu", console=QUIET)
    assert len(calls) == 1
    again = json.loads((folder / "result.json").read_text())
    assert again == result


def test_a_run_that_was_trained_further_is_measured_anew_in_another_folder(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "hamlet")
    folder = study_stability(run, tmp_path / "out", batches=1, device="cpu", console=QUIET)
    before = json.loads((folder / "result.json").read_text())
    config = Config.read(yaml.safe_load((run / "config.yaml").read_text()))
    pretrain(config, run, console=QUIET)
    with pytest.raises(ValueError, match=r"stability-hamlet has jobs with other settings \(checkpoint: was .*--out"):
        study_stability(run, tmp_path / "out", batches=1, device="cpu", console=QUIET)
    assert json.loads((folder / "result.json").read_text()) == before
    folder = study_stability(run, tmp_path / "other", batches=1, device="cpu", console=QUIET)
    after = json.loads((folder / "result.json").read_text())
    assert (before["step"], after["step"]) == (6, 8)
    assert before["psi"] != after["psi"]


def test_an_earlier_checkpoint_is_measured_in_a_folder_of_its_own(trained: Path, tmp_path: Path) -> None:
    newest = study_stability(trained, tmp_path, batches=1, device="cpu", console=QUIET)
    run = shutil.copytree(trained, tmp_path / "hamlet")
    pretrain(Config.read(yaml.safe_load((run / "config.yaml").read_text())), run, until=7, console=QUIET)
    folder = study_stability(run, tmp_path, step=6, batches=1, device="cpu", console=QUIET)
    assert folder.name == "stability-hamlet-step-6"
    before, found = (json.loads((one / "result.json").read_text()) for one in (newest, folder))
    assert (found["step"], found["psi"]) == (6, before["psi"])
    with pytest.raises(ValueError, match=r"step is 8; allowed, since they have a checkpoint: 6, 7"):
        study_stability(run, tmp_path, step=8, batches=1, device="cpu", console=QUIET)
    assert not (tmp_path / "stability-hamlet-step-8").exists()


def test_the_whole_model_has_the_loss_that_the_loop_measured(trained: Path, tmp_path: Path) -> None:
    folder = study_stability(trained, tmp_path, batches=2, device="cpu", console=QUIET)
    found = checkpoint.load_latest(trained / "checkpoints")
    assert found is not None
    # two batches of four are the eight windows of the run's own evaluation
    assert json.loads((folder / "result.json").read_text())["loss"] == pytest.approx(found.state["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "method",
    [
        {"name": "raptr", "schedule": "2-4"},  # judged under keep probabilities in its first stage
        {"name": "stochastic-depth"},
        {"name": "msg", "schedule": "2-4", "mask_steps": 3},
    ],
    ids=lambda method: method["name"],
)
def test_the_whole_model_is_unscaled_whatever_the_run_judges(
    store: TokenStore, tmp_path: Path, method: dict[str, Any]
) -> None:
    config = config_of(store, method)
    run = tmp_path / "run"
    pretrain(config, run, until=6 if method["name"] == "msg" else 3, console=QUIET)
    folder = study_stability(run, tmp_path, batches=2, device="cpu", console=QUIET)
    result = json.loads((folder / "result.json").read_text())
    found = checkpoint.load_latest(run / "checkpoints")
    assert found is not None
    model = config.model.build(store.vocabulary.size, LENGTH).build(seed=0).eval()
    found.read({f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}, "model.")
    held_out = MaskedLM(store.vocabulary), EvalData(store, LENGTH - 1, 8)
    plain = evaluate(model, *held_out, Subnetwork.full(LAYERS), batch=4).loss
    assert result["loss"] == pytest.approx(plain, rel=1e-6)
    without = Subnetwork((1.0, 0.0, 1.0, 1.0))
    assert result["losses_without"][1] == pytest.approx(evaluate(model, *held_out, without, batch=4).loss, rel=1e-6)
    assert found.state["eval_loss"] is None or result["loss"] != pytest.approx(found.state["eval_loss"], rel=1e-7)


def test_parts_are_scaled_as_the_last_step_scaled_them(store: TokenStore, tmp_path: Path) -> None:
    config = config_of(store, {"name": "pld", "gamma": 3})
    pretrain(config, tmp_path / "run", until=3, console=QUIET)
    folder = study_stability(tmp_path / "run", tmp_path, batches=2, device="cpu", console=QUIET)
    result = json.loads((folder / "result.json").read_text())
    method = config.make_method()
    assert isinstance(method, PLD)
    scales = tuple(0.0 if layer == 2 else 1 / p for layer, p in enumerate(method.keep(2)))
    found = checkpoint.load_latest(tmp_path / "run" / "checkpoints")
    assert found is not None
    model = config.model.build(store.vocabulary.size, LENGTH).build(seed=0).eval()
    found.read({f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}, "model.")
    held_out = MaskedLM(store.vocabulary), EvalData(store, LENGTH - 1, 8)
    expected = evaluate(model, *held_out, Subnetwork(scales, scaled="branches"), batch=4).loss
    assert result["losses_as_trained"][2] == pytest.approx(expected, rel=1e-6)


def test_refusals(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"batches is 0.* 1 "):
        study_stability(trained, tmp_path, batches=0, console=QUIET)
    with pytest.raises(ValueError, match=r"run is .*config.yaml"):
        study_stability(tmp_path, tmp_path, console=QUIET)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    with pytest.raises(ValueError, match=r"run is .*new.*no checkpoint"):
        study_stability(tmp_path / "new", tmp_path, console=QUIET)
