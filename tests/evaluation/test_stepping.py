"""A step is the plain training loop's, in bfloat16 too; what is replayed is what was captured; nothing is read back."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    FNetConfig,
    FNetForSequenceClassification,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormForSequenceClassification,
    RoFormerConfig,
    RoFormerForSequenceClassification,
    masking_utils,
)

from raptr.evaluation import stepping
from raptr.evaluation.coding import Coded, coded
from raptr.evaluation.encoder import load_encoder
from raptr.evaluation.stepping import WARM_UP, Steps
from tests.evaluation.tiny import make_bert

RATES = [1e-3 * min(1.0, (step + 1) / 4) for step in range(12)]
BATCH = 4
SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def examples() -> Coded:
    """Examples of 3 to 12 tokens, so that batches of neighbours are 8 or 12 wide."""
    lengths = [3 + 9 * (place // BATCH % 2) for place in range(32)]
    rows = [
        {"input_ids": [2, *range(5, 3 + length), 3], "token_type_ids": [0] * length, "attention_mask": [1] * length}
        for length in lengths
    ]
    return coded(rows, torch.arange(len(rows)) % 2, 0)


def model(bert: Path, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return load_encoder(bert).classifier(2, dropout).train()


def steps(
    made: Any, examples: Coded, *, half: bool = False, capture: Any = None, joined: int = 1, say: Any = print
) -> Steps:
    loss = partial(functional.cross_entropy, reduction="none")
    return Steps(made, examples, loss, weight_decay=0.01, clip=1.0, half=half, capture=capture, joined=joined, say=say)


def at(rate: float) -> Tensor:
    return torch.tensor([rate])


def batches(examples: Coded) -> list[tuple[Tensor, int]]:
    order = torch.arange(len(examples))
    places = torch.split(order.to(examples.targets_N.device), BATCH)
    return list(zip(places, examples.widths(order, BATCH), strict=True))


def trained(made: Any, examples: Coded, **settings: Any) -> Steps:
    """Go through the examples until there is a step for each learning rate."""
    stepped = steps(made, examples, **settings)
    torch.manual_seed(1)
    every = batches(examples) * 2
    for (places, width), rate in zip(every, RATES, strict=False):
        stepped(places, width, at(rate))
    return stepped


def plainly(made: Any, examples: Coded) -> float:
    """The same steps as anybody would write them."""
    groups = [
        {"params": [p for p in made.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in made.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, eps=1e-6)
    for (places, width), rate in zip(batches(examples) * 2, RATES, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs = {name: column[places, :width].long() for name, column in examples.columns_NW.items()}
        loss = functional.cross_entropy(made(**inputs).logits, examples.targets_N[places])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
    return float(loss.detach())


def test_batches_are_cut_from_tables(examples: Coded) -> None:
    assert [width for _, width in batches(examples)] == [8, 12] * 4
    rows = [
        {"input_ids": [2, 700, 700, 3], "attention_mask": [1, 1, 1, 1]},
        {"input_ids": [2, 3], "attention_mask": [1, 1]},
        {"input_ids": [2] * 11, "attention_mask": [1] * 11},
    ]
    table = coded(rows, torch.zeros(3), 9)
    batch = table.batch(torch.tensor([1, 0]), 6)
    assert batch["input_ids"].tolist() == [[2, 3, 9, 9, 9, 9], [2, 700, 700, 3, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.long}
    assert table.widths(torch.tensor([1, 0, 2]), 2) == [8, 11]  # no wider than the table
    assert table.columns_NW["attention_mask"].dtype == torch.uint8


def test_the_steps_are_those_of_a_plain_loop(bert: Path, examples: Coded) -> None:
    ours, plain = model(bert), model(bert)
    assert trained(ours, examples).losses[0] == pytest.approx(plainly(plain, examples), abs=1e-5)
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4, msg=name)


def test_bfloat16_weights_follow_float32_ones(bert: Path, examples: Coded) -> None:
    made, plain = model(bert), model(bert)
    before = plain.state_dict()["classifier.weight"].clone()
    stepped = trained(made, examples, half=True)
    assert {parameter.dtype for parameter in made.parameters()} == {torch.bfloat16}
    assert stepped.losses[0] == pytest.approx(plainly(plain, examples), abs=0.03)
    moved = (made.state_dict()["classifier.weight"].float() - before).flatten()
    wanted = (plain.state_dict()["classifier.weight"] - before).flatten()
    assert float(functional.cosine_similarity(moved, wanted, dim=0)) > 0.95

    tiny = steps(model(bert), examples, half=True)  # changes below bfloat16's precision add up
    weight = next(iter(tiny._weights)).clone()
    for places, width in batches(examples)[:1] * 60:
        tiny(places, width, at(2e-5))
    assert not torch.equal(next(iter(tiny._weights)), weight)


def test_weights_that_are_not_trained_are_bfloat16_too(examples: Coded) -> None:
    config = RoFormerConfig(vocab_size=30, **SIZES)  # its table of positions is fixed
    made = RoFormerForSequenceClassification(config).train()
    assert not all(parameter.requires_grad for parameter in made.parameters())
    stepped = steps(made, examples, half=True)
    for places, width in batches(examples)[:2]:
        stepped(places, width, at(1e-3))
    assert stepped.diverged() == [None]
    assert {parameter.dtype for parameter in made.parameters()} == {torch.bfloat16}


def test_a_model_that_cannot_compute_in_bfloat16_trains_in_float32(bert: Path, examples: Coded) -> None:
    config = FNetConfig(vocab_size=30, max_position_embeddings=16, **SIZES)  # there is no bfloat16 Fourier transform
    made = FNetForSequenceClassification(config).train()
    taken = replace(examples, columns_NW={name: examples.columns_NW[name] for name in ("input_ids", "token_type_ids")})
    before = torch.random.get_rng_state()
    stepped = steps(made, taken, half=True)
    assert torch.equal(torch.random.get_rng_state(), before)  # the trial draws nothing
    assert made.training
    assert stepped.precision == "float32"
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}
    for places, width in batches(taken)[:2]:
        stepped(places, width, at(1e-3))
    assert stepped.diverged() == [None]
    assert steps(model(bert), examples, half=True).precision == "bfloat16"
    assert steps(model(bert), examples).precision == "float32"


class Replays:
    """Captures as a GPU does: the call is not run, and what it reads is fixed."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            step()

        return replay


def test_replayed_steps_are_the_same(bert: Path, examples: Coded) -> None:
    alone, replayed, replays = model(bert, 0.1), model(bert, 0.1), Replays()
    first, second = trained(alone, examples), trained(replayed, examples, capture=replays)
    assert (replays.captured, second.captured) == (2, 2)
    assert replays.replayed == len(RATES) - 2 * WARM_UP
    assert first.losses == second.losses
    for one, other in zip(alone.parameters(), replayed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_that_cannot_be_captured_is_trained_all_the_same(bert: Path, examples: Coded) -> None:
    def refuse(step: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nwith hints")

    said: list[str] = []
    first, second = trained(model(bert), examples), trained(model(bert), examples, capture=refuse, say=said.append)
    assert second.captured == 0
    assert first.losses == second.losses
    assert said == ["steps are not replayed as CUDA graphs: operation not permitted when stream is capturing"]


def test_a_graph_without_room_is_given_up_alone_and_halves_several(bert: Path, examples: Coded) -> None:
    def full(step: Callable[[], None]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert trained(model(bert), examples, capture=full).captured == 0
    stepped = steps(model(bert), examples, capture=full)
    stepped._joined = 2  # as it is for several
    stepped._seen.update({(BATCH, 8): WARM_UP})
    with pytest.raises(torch.OutOfMemoryError):
        stepped(*batches(examples)[0], at(1e-3))


def test_the_first_step_that_is_not_finite_is_remembered(bert: Path, examples: Coded) -> None:
    made = model(bert)
    stepped = steps(made, examples, capture=Replays())
    for number, (places, width) in enumerate(batches(examples) * 2):
        if number == 10:
            with torch.no_grad():
                made.classifier.bias.fill_(torch.nan)
        stepped(places, width, at(1e-4))
    assert stepped.diverged() == [10]


class _ReadsBack(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what a CUDA graph cannot hold: to read a number back, and to send one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select"), name
        return func(*args, **(kwargs or {}))


def test_a_step_of_an_export_neither_reads_back_nor_sends(examples: Coded, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RobertaPreLayerNormConfig(vocab_size=30, pad_token_id=0, **SIZES)
    stepped = trained(RobertaPreLayerNormForSequenceClassification(config).train(), examples)
    monkeypatch.setattr(stepped._optimizer, "step", lambda: None)  # reads its step count on the CPU alone
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)  # as it is while a graph is captured
    for places, width in batches(examples)[:2]:
        with _ReadsBack():  # type: ignore[no-untyped-call]
            stepped._step(places, width)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_captured_steps_are_the_plain_ones(bert: Path, examples: Coded) -> None:
    device = torch.device("cuda")
    with stepping.on_stream(device) as capture:
        assert capture is not None
        alone, replayed = model(bert).to(device), model(bert).to(device)
        first = trained(alone, examples.to(device), half=True)
        second = trained(replayed, examples.to(device), half=True, capture=capture)
        assert second.captured == 2
        assert first.losses == pytest.approx(second.losses, abs=0.01)
        for (name, one), other in zip(alone.named_parameters(), replayed.parameters(), strict=True):
            torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-2, msg=name)
        dropping = trained(model(bert, 0.1).to(device), examples.to(device), half=True, capture=capture)
        assert (dropping.captured, dropping.diverged()) == (2, [None])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_a_model_that_reads_a_number_back_is_trained_all_the_same(bert: Path, examples: Coded) -> None:
    def read(module: Any, inputs: Any, outputs: Any) -> None:
        outputs.logits.sum().item()

    device = torch.device("cuda")
    with stepping.on_stream(device) as capture:
        made = model(bert, 0.1).to(device)
        made.register_forward_hook(read)
        failed = trained(made, examples.to(device), half=True, capture=capture)
        assert (failed.captured, failed.diverged()) == (0, [None])
    with stepping.on_stream(device) as capture:  # nor does the next model notice
        after = trained(model(bert, 0.1).to(device), examples.to(device), half=True, capture=capture)
        assert (after.captured, after.diverged()) == (2, [None])


def test_without_a_gpu_nothing_is_captured() -> None:
    with stepping.on_stream(torch.device("cpu")) as capture:
        assert capture is None
