"""A second family, written here from nothing but the contract: it trains, resumes, grows and is counted exactly."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from raptr.data import TokenStore
from raptr.data.batch import Batch
from raptr.data.source import Windows
from raptr.data.tokenizer import Specials, Vocabulary
from raptr.hashing import Stream
from raptr.models.contract import Family, ModelConfig
from raptr.models.inputs import BlockInputs
from raptr.models.model import Model
from raptr.models.registry import FAMILIES, register
from raptr.objectives.contract import Mixture, Objective
from raptr.objectives.registry import OBJECTIVES
from raptr.subnetworks import Subnetwork
from raptr.train import checkpoint
from raptr.train.config import Config
from raptr.train.execution import make_execution
from raptr.train.flops import flops
from raptr.train.loop import Trainer, pretrain
from raptr.train.run import RunFolder
from tests.train.legs import QUIET

LENGTH, STEPS = 16, 12


class NextToken(Objective):
    name, target, attention = "next-token", "token", "causal"
    specials = Specials("next-token", (), end="[SEP]")

    def __init__(self, vocabulary: Vocabulary) -> None:
        pass

    @staticmethod
    def window(length: int) -> int:
        return length + 1

    @staticmethod
    def targets(length: int, mixture: Mixture | None = None) -> int:
        return length

    def batch(self, windows: Windows, seed: int, stream: Stream) -> Batch:
        tokens = torch.from_numpy(windows.tokens_BW.astype("int64"))
        return Batch(tokens[:, :-1].contiguous(), None, tokens[:, 1:].contiguous())


class Layer(nn.Module):
    def __init__(self, config: "ToyConfig") -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width)
        self.up = nn.Linear(2 * config.width, config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.width, bias=False)

    def forward(self, x: Tensor, inputs: BlockInputs, context: None) -> Tensor:
        seen = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype).view(-1, 1)  # the mean so far
        update: Tensor = self.down(F.silu(self.up(torch.cat([self.norm(x), seen], -1))))
        return x + (update if inputs.layer_scale is None else inputs.layer_scale * update)


class Toy(Model):
    OUTPUTS = ("down",)

    def __init__(self, config: "ToyConfig", seed: int) -> None:
        super().__init__()
        self.config, self.layout = config, {}
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(self.new_block() for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.initialise(seed)

    def new_block(self) -> nn.Module:
        assert isinstance(self.config, ToyConfig)
        return Layer(self.config)

    def ends(self) -> tuple[nn.Module, ...]:
        return self.tokens, self.norm, self.head

    def enter(self, batch: Batch, stream: torch.dtype | None) -> Tensor:
        x: Tensor = self.tokens(batch.tokens_BS)
        return x

    def scores(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        scores: Tensor = self.head(self.norm(x_BSD))
        return scores


@dataclass(frozen=True)
class ToyConfig(ModelConfig):
    def build(self, seed: int) -> Toy:
        return Toy(self, seed)

    def layer_weights(self, heads: int, parts: int) -> int:
        return 3 * self.width * self.mlp

    def layer_flops(self, heads: int, parts: int, length: int) -> int:
        return length * 2 * self.layer_weights(heads, parts)

    def head_flops(self, targets: float) -> float:
        return targets * 2 * self.width * self.vocabulary


TINY = ToyConfig(layers=4, width=16, heads=1, head_size=16, mlp=32, parts=1)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(OBJECTIVES, NextToken.name, NextToken)
    register(Family("toy", {"tiny": TINY}, objectives=(NextToken.name,)))
    yield
    del FAMILIES["toy"]


def config(store: TokenStore, method: dict[str, Any], **train: Any) -> Config:
    return Config.read(
        {
            "model": {"family": "toy", "init": "fan-in"},
            "method": method,
            "data": {"source": str(store.path), "length": LENGTH},
            "optimizer": {"peak": 0.01},
            "train": {"steps": STEPS, "batch": 4, "eval_samples": 8, "log_every": 1, "device": "cpu", **train},
        }
    )


def weights(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    found = checkpoint.load(run / "checkpoints", step)
    tensors = found.blank(without="nothing.")
    found.read(tensors)
    return tensors


@pytest.mark.parametrize("method", [{"name": "raptr", "scaling": "sqrt"}, {"name": "stacking"}])
def test_it_trains_and_resumes_bit_for_bit(store: TokenStore, tmp_path: Path, method: dict[str, Any]) -> None:
    chosen = config(store, method)
    assert (chosen.objective.name, chosen.mapping()["model"]["family"]) == (NextToken.name, "toy")
    whole = pretrain(chosen, tmp_path / "whole", console=QUIET)
    for until in (5, 9, None):
        parts = pretrain(chosen, tmp_path / "parts", until=until, console=QUIET)
    assert parts.eval_loss == whole.eval_loss
    assert whole.eval_loss is not None
    assert whole.eval_loss < 5.4  # an untrained model has log(297) = 5.7
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_it_grows_by_stacking(store: TokenStore, tmp_path: Path) -> None:
    chosen = config(store, {"name": "stacking"}, checkpoint_every=1, keep=STEPS)
    pretrain(chosen, tmp_path / "run", console=QUIET)
    shapes = [checkpoint.load(tmp_path / "run" / "checkpoints", step).state["shape"]["layers"] for step in (1, STEPS)]
    assert shapes[0] < shapes[1] == TINY.layers


def test_it_is_counted_exactly(store: TokenStore, tmp_path: Path) -> None:
    chosen = config(store, {"name": "raptr"})
    trainer = Trainer(chosen, RunFolder(tmp_path), store, torch.device("cpu"))
    for kept in ((1, 1, 1, 1), (1, 0, 0, 1)):
        subnetwork = Subnetwork(tuple(map(float, kept)))
        with FlopCounterMode(display=False) as counter:
            trainer.gradients(subnetwork)
        assert counter.get_total_flops() == trainer.cost(subnetwork).total
    costs = {"sequences": 4, "length": LENGTH, "targets": LENGTH}
    full = flops(trainer.dimensions, Subnetwork.full(4), **costs)
    assert (full.layers, full.total - full.layers) == (3 * 4 * 16 * 4 * 2 * 3 * 16 * 32, 3 * 4 * 16 * 2 * 16 * 297)


def test_an_objective_that_it_cannot_learn_is_refused(store: TokenStore) -> None:
    with pytest.raises(ValueError, match=r"objective\.name is mlm.*toy.*next-token"):
        Config.read({**config(store, {"name": "full"}).mapping(), "objective": {"name": "mlm"}})


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match="'toy'"):
        register(Family("toy", {"tiny": TINY}, objectives=(NextToken.name,)))


@pytest.mark.parametrize(("form", "calls"), [("skip", 2), ("gather", 0)])
def test_a_forward_hook_sees_each_running_layer_once(store: TokenStore, tmp_path: Path, form: str, calls: int) -> None:
    """`gather` runs copies of the layers, which have no hooks."""
    chosen = config(store, {"name": "raptr"}, accumulate=2, execution=form, compile=False)
    trainer = Trainer(chosen, RunFolder(tmp_path), store, torch.device("cpu"))
    trainer.execution = make_execution(trainer.model, chosen.train, torch.device("cpu"))
    seen = dict.fromkeys(range(4), 0)

    def count(layer: int) -> None:
        seen[layer] += 1

    for layer, block in enumerate(trainer.model.blocks):
        block.register_forward_hook(lambda *_, layer=layer: count(layer))
    trainer.gradients(Subnetwork((1.0, 0.0, 1.0, 1.0)))
    assert seen == {0: calls, 1: 0, 2: calls, 3: calls}
