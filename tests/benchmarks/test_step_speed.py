"""The speed benchmark: its peers compute the stock loss, and each way's share counts its own FLOPs."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import step_speed, stock
from raptr.data import TokenStore, TrainData
from raptr.data.batch import Batch
from raptr.data.prepare import Document, prepare
from raptr.models import model as family
from raptr.models.bert.config import SIZES, BertConfig
from raptr.models.decoder.config import DecoderConfig
from raptr.models.init import initialise
from raptr.models.registry import FAMILIES
from raptr.objectives.causal import CausalLM
from raptr.objectives.contract import Objective
from raptr.objectives.mlm import MaskedLM
from raptr.objectives.ul2 import UL2

# The compiler looks at every tensor's gradient, and torch then warns of those that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

TINY = BertConfig(layers=2, width=32, heads=2, head_size=16, mlp=64, vocabulary=600, positions=32)


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, with its compiler replaced by one that only traces: speed is not the matter here."""
    monkeypatch.setitem(SIZES, "tiny", TINY)
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **rest: compiler(fn, **{**rest, "backend": "eager"}))
    return step_speed


def first_batch(store: TokenStore) -> Batch:
    return MaskedLM(store.vocabulary).training(TrainData(store, 31, 4, 0).windows(0), 0)


def losses(speed: ModuleType, store: TokenStore, how: str) -> dict[str, float]:
    """Of every head, and of the stock model itself."""
    batch = first_batch(store)
    model = stock.Stock(TINY)
    plain = model.model(input_ids=batch.tokens_BS, labels=batch.labels_BS()).loss.item()
    return {"stock": plain} | {
        name: stock.peer_loss(model, head, how)(batch).item() for name, head in stock.HEADS.items()
    }


@pytest.mark.parametrize("how", stock.COMPILED)
def test_the_masked_head_has_the_stock_loss(speed: ModuleType, store: TokenStore, how: str) -> None:
    found = losses(speed, store, how)
    assert found["all positions"] == pytest.approx(found["stock"], rel=1e-6)
    assert found["masked positions"] == pytest.approx(found["stock"], rel=1e-6)


def test_the_masked_head_has_the_stock_gradient(speed: ModuleType, store: TokenStore) -> None:
    batch, gradients = first_batch(store), []
    model = stock.Stock(TINY)
    for head in stock.HEADS.values():
        model.zero_grad()
        torch.autograd.backward(stock.peer_loss(model, head, "eager")(batch))
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(gradient is not None for gradient in gradients[0].values())
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-5)


def test_peers_are_timed_beside_our_full_model(speed: ModuleType, store: TokenStore, tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    arguments = ["--data", str(store.path), "--case", "bert/tiny:4x32", "--blocks", "2", "--steps", "1", "--peers-only"]
    speed.main([*arguments, "--out", str(out)])
    result: dict[str, Any] = json.loads(out.read_text())
    case = result["cases"][0]
    assert list(case["milliseconds"]) == ["static 2", *speed.PEERS]
    assert {len(times) for times in case["milliseconds"].values()} == {2}
    assert case["recompiled graphs"] == 0
    ours, flops = case["flops"]["static 2"], case["flops"]
    for name in speed.PEERS:
        assert (flops[name] == ours) == ("masked" in name), name
        assert flops[name] >= ours
    speed.main(["--show", "--out", str(out)])


def decoder_text(folder: Path, monkeypatch: pytest.MonkeyPatch, objective: type[Objective]) -> Path:
    """Prepared text; the decoder that reads it is tiny."""
    tiny = DecoderConfig(layers=4, width=32, heads=4, head_size=8, mlp=64, kv_heads=2)
    monkeypatch.setitem(FAMILIES["decoder"].sizes, "tiny", tiny)
    documents = [Document(f"{i}", f"a text with the number {i} and {i * i}. " * 9) for i in range(40)]
    return prepare(folder, lambda: documents, 400, specials=objective.specials).path


@pytest.mark.parametrize("apart", [(), ("--apart",)], ids=["in turns", "apart"])
def test_a_decoder_is_timed_beside_the_stock_llama(
    speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: tuple[str, ...]
) -> None:
    data, out = decoder_text(tmp_path / "data", monkeypatch, CausalLM), tmp_path / "peers.json"
    arguments = ["--data", str(data), "--case", "decoder/tiny:4x16", "--blocks", "1", "--steps", "1", "--peers-only"]
    speed.main([*arguments, *apart, "--out", str(out)])
    assert vars(family)["initialise"] is initialise  # as before
    case = json.loads(out.read_text())["cases"][0]
    assert list(case["milliseconds"]) == ["static 4", *(name for name in speed.PEERS if "all positions" in name)]
    assert len(set(case["flops"].values())) == 1


@pytest.mark.parametrize(
    ("objective", "more"), [(CausalLM, set()), (UL2, {"causal 4", "adafactor 4"})], ids=["causal", "ul2"]
)
def test_models_that_share_weights_are_timed(
    speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: type[Objective], more: set[str]
) -> None:
    data, out = decoder_text(tmp_path / "data", monkeypatch, objective), tmp_path / "shared.json"
    chosen = ["--objective", "ul2"] if more else []
    arguments = ["--data", str(data), "--case", "decoder/tiny:16x32", "--blocks", "1", "--steps", "1", "--no-peers"]
    speed.main([*arguments, *chosen, "--shared", "--out", str(out)])
    case = json.loads(out.read_text())["cases"][0]
    ways = {f"{form} {size}" for form in ("gather", "static") for size in case["sizes"]}
    assert case["milliseconds"].keys() == case["flops"].keys() == ways | more
    assert len(case["sizes"]) > 1
    assert case["flops"]["gather 4"] == case["flops"]["static 4"]
    if more:
        assert case["flops"]["causal 4"] > case["flops"]["adafactor 4"] == case["flops"]["gather 4"]
    speed.main(["--show", "--out", str(out)])


def test_a_shared_model_trains_the_weights_of_the_other(
    speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = speed.Bench(speed.Case("decoder", "tiny", 4, 16), decoder_text(tmp_path / "data", monkeypatch, CausalLM))
    whole = bench.trainer("full", "gather")
    bench.way("whole", whole, 0)
    bench.ways["whole"]()
    first = speed._sharing(bench.trainer("full", "gather", layers=1), whole)
    before = {name: weight.clone() for name, weight in whole.model.state_dict().items()}
    bench.way("first", first, 0)
    bench.ways["first"]()
    moved = {name for name, weight in whole.model.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if not name.startswith(("blocks.1.", "blocks.2.", "blocks.3."))}


def test_stages_are_as_long_as_their_schedule_says() -> None:
    result = {"sizes": [1, 2], "milliseconds": {"gather 1": [10.0], "gather 2": [20.0]}}
    counted = {"flops": {"gather 1": 1.0, "gather 2": 3.0}}
    assert step_speed.speed_up(result | counted, "gather") == pytest.approx((20 / 15, 3 / 2))
    seen = step_speed.speed_up(result | counted, "gather", "proportional")
    assert seen == pytest.approx((20 / (10 / 3 + 40 / 3), 3 / (1 / 3 + 2)))


@pytest.mark.parametrize("head", stock.HEADS)
def test_flops_are_those_of_the_peer(
    speed: ModuleType, store: TokenStore, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = speed.Bench(speed.Case("bert", "tiny", 4, 32), store.path)
    name = f"Hugging Face, {head}, eager"
    speed.add_peers(bench, (name,))

    def plain(query: Any, key: Any, value: Any, *_: Any, **rest: Any) -> Any:
        # The fused kernel of the CPU is not counted by torch.
        scale = rest.get("scale") or query.shape[-1] ** -0.5
        return (query @ key.transpose(-1, -2) * scale).softmax(-1) @ value

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", plain)
    with FlopCounterMode(display=False) as counter:
        bench.ways[name]()
    assert counter.get_total_flops() == bench.flops[name]


def test_a_share_counts_the_ways_own_flops() -> None:
    result = {
        "case": "base:1x1",
        "tokens": 1,
        "flops": {"static 2": 1e12, "Hugging Face, all positions, eager": 2e12},
        "milliseconds": {"static 2": [10.0], "Hugging Face, all positions, eager": [10.0]},
        "recompiled graphs": 0,
    }
    rows = [line for line in step_speed.tables(result, 1e15).splitlines() if line.startswith(("| static", "| Hugging"))]
    assert [row.split("|")[5].strip() for row in rows] == ["0.100", "0.200"]


@pytest.mark.parametrize(
    "name",
    ["bert_speed.json", "bert_speed_large.json", "decoder_speed.json", "decoder_speed_100m.json", "ul2_speed.json"],
)
def test_committed_results_name_the_flops_of_every_way(name: str) -> None:
    result = json.loads((Path(step_speed.__file__).parent / "results" / name).read_text())
    for case in result["cases"]:
        assert case["flops"].keys() == case["milliseconds"].keys()
        assert step_speed.tables(case, result["matrix product, FLOP/s"])
