"""Joined models compute and learn what each does alone; architectures that cannot be joined are recognised."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from raptr.evaluation import stepping
from raptr.evaluation.coding import Coded, coded
from raptr.evaluation.joined import join
from raptr.evaluation.stepping import Steps

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "num_labels": 3,
}
SMALL: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta-prelayernorm": {},
    "roberta": {},
    "electra": {"embedding_size": 8},
    "albert": {"embedding_size": 8},
    "xlm-roberta": {},
    "distilbert": {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 24},
}
ALONE: dict[str, dict[str, Any]] = {  # with other layers than those that can be joined, a look into them, or at padding
    "roformer": {"embedding_size": 16},
    "mpnet": {},
    "convbert": {"embedding_size": 16, "head_ratio": 1},
    "fnet": {},
}
MODELS, ROWS, WIDTH = 3, 4, 10


def make(kind: str, seed: int, dropout: float = 0.0, **settings: Any) -> PreTrainedModel:
    config = CONFIG_MAPPING[kind](**{**SIZES, **(SMALL | ALONE)[kind], **settings})
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, dropout)
    config.classifier_dropout = config.seq_classif_dropout = config.classifier_dropout_prob = dropout
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms differ between models too
                parameter.add_(0.05 * torch.randn_like(parameter))
    assert isinstance(model, PreTrainedModel)
    model.train()
    return model


@pytest.fixture(scope="module")
def examples() -> Coded:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, WIDTH + 1, (48,), generator=draw).tolist()
    rows = [
        {"input_ids": torch.randint(3, 40, (length,), generator=draw).tolist(), "attention_mask": [1] * length}
        for length in [WIDTH, *lengths[1:]]
    ]
    return coded(rows, torch.randint(0, 3, (len(rows),), generator=draw), 0)


def places(step: int, model: int) -> Tensor:
    return torch.arange(ROWS) + ROWS * ((3 * step + model) % 12)


def tried(examples: Coded) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The batch of each model, and all of them together, padded further."""
    order = examples.lengths_N.argsort()[: MODELS * ROWS]
    alone = [examples.batch(part, int(examples.lengths_N[part].max())) for part in torch.split(order, ROWS)]
    return alone, examples.batch(order, WIDTH)


def joined(models: list[PreTrainedModel], examples: Coded) -> Any:
    found = join(models, *tried(examples))
    assert found is not None
    return found


def steps(model: nn.Module, examples: Coded, count: int = 1, **settings: Any) -> Steps:
    loss = partial(functional.cross_entropy, reduction="none")
    given = {"half": False, "capture": None, **settings}
    return Steps(model, examples, loss, weight_decay=0.1, clip=0.5, joined=count, **given)


@pytest.mark.parametrize("kind", SMALL)
def test_joined_models_learn_what_each_learns_alone(kind: str, examples: Coded) -> None:
    models = [make(kind, seed) for seed in range(MODELS)]
    together = joined(models, examples)
    rates = torch.tensor([1e-2, 3e-3, 1e-3])
    ours, theirs = steps(together, examples, MODELS), [steps(model, examples) for model in models]
    for step in range(6):
        ours(torch.cat([places(step, number) for number in range(MODELS)]), WIDTH, rates)
        for number, one in enumerate(theirs):
            one(places(step, number), WIDTH, rates[number : number + 1])
        assert ours.losses == pytest.approx([one.losses[0] for one in theirs], abs=1e-4)
    assert len({round(loss, 4) for loss in ours.losses}) == MODELS
    weights = dict(together.named_parameters())
    for number, model in enumerate(models):
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weights[name][number], weight, atol=2e-4, rtol=1e-3, msg=f"{name} of {number}")


@pytest.mark.parametrize("kind", SMALL)
def test_the_models_that_are_joined_stay_as_they_are(kind: str, examples: Coded) -> None:
    models = [make(kind, seed) for seed in range(MODELS)]
    before = [{name: weight.clone() for name, weight in model.state_dict().items()} for model in models]
    ours = steps(joined(models, examples), examples, MODELS)
    ours(torch.cat([places(0, model) for model in range(MODELS)]), WIDTH, torch.full((MODELS,), 0.1))
    for model, weights in zip(models, before, strict=True):
        assert model.training
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, weights[name])


@pytest.mark.parametrize("kind", ALONE)
def test_architectures_that_cannot_be_joined(kind: str, examples: Coded) -> None:
    models = [make(kind, seed) for seed in range(MODELS)]
    assert join(models, *tried(examples)) is None
    for model in models:
        assert model.training
        model(**tried(examples)[1])


def test_models_of_other_shapes_are_not_joined(examples: Coded) -> None:
    models = [make("bert", seed, intermediate_size=size) for seed, size in enumerate((24, 32, 24))]
    assert join(models, *tried(examples)) is None


class _Mixes(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden.mean(0, keepdim=True)


class _Reversed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        outputs: Tensor = self.layer(hidden.flip(0))
        return outputs.flip(0)


class _Hidden(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.same = layer, [layer]  # no module of its own, so nobody can replace it

    def forward(self, hidden: Tensor) -> Tensor:
        outputs: Tensor = self.same[0](hidden)
        return outputs


ODD: dict[str, tuple[str, Callable[[Any], nn.Module]]] = {
    "mixes its rows": ("dropout", lambda model: _Mixes()),
    "mixes its rows in training": ("dropout", lambda model: nn.BatchNorm1d(16, affine=False)),
    "reverses its rows": ("classifier", lambda model: _Reversed(model.classifier)),
    "holds a layer twice": ("classifier", lambda model: _Hidden(model.classifier)),
}


@pytest.mark.parametrize(("name", "change"), ODD.values(), ids=ODD)
def test_a_model_that_does_not_keep_its_rows_and_layers_apart_is_not_joined(
    name: str, change: Callable[[Any], nn.Module], examples: Coded
) -> None:
    models = [make("bert", 0) for _ in range(MODELS)]  # fine-tunings of one model start alike
    for model in models:
        model.set_submodule(name, change(model))
    assert join(models, *tried(examples)) is None


def test_as_many_rows_as_tokens_are_not_mistaken_for_a_batch(examples: Coded) -> None:
    models = [make("mpnet", 0) for _ in range(MODELS)]
    alone = [examples.batch(torch.arange(3) + 3 * model, MODELS * 3) for model in range(MODELS)]
    assert join(models, alone, examples.batch(torch.arange(MODELS * 3), MODELS * 3)) is None


def test_layers_that_share_a_weight_are_not_joined(examples: Coded) -> None:
    models = [make("bert", seed) for seed in range(MODELS)]
    for model in models:
        first, second = (model.get_submodule(f"bert.encoder.layer.{number}.output.dense") for number in range(2))
        first.weight = second.weight
    assert join(models, *tried(examples)) is None


def test_norms_without_weights_are_kept(examples: Coded) -> None:
    models = [make("bert", seed) for seed in range(MODELS)]
    for model in models:
        model.set_submodule("dropout", nn.LayerNorm(16, elementwise_affine=False))
    joined(models, examples)


def test_gradients_lie_in_memory_as_their_weights_do(examples: Coded) -> None:
    model = joined([make("bert", seed) for seed in range(MODELS)], examples)
    _, together = tried(examples)
    weights = list(model.parameters())
    gradients = torch.autograd.grad(model(**together).logits.sum(), weights)
    assert [gradient.stride() for gradient in gradients] == [weight.stride() for weight in weights]


def test_dropout_differs_between_joined_models(examples: Coded) -> None:
    model = make("bert", 0, dropout=0.5)
    together = joined([model] * MODELS, examples)
    same = examples.batch(places(0, 0).repeat(MODELS), WIDTH)
    outputs = together(**same).logits.view(MODELS, -1)
    assert len({tuple(row.tolist()) for row in outputs}) == MODELS


def test_one_that_is_not_finite_leaves_the_others_alone(examples: Coded) -> None:
    models = [make("bert", seed) for seed in range(MODELS)]
    healthy = steps(joined(models, examples), examples, MODELS)
    sick = steps(joined(models, examples), examples, MODELS)
    rates = torch.full((MODELS,), 1e-3)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                sick._weights[0][1].fill_(torch.nan)
                sick._masters[0][1].fill_(torch.nan)
        for one in (healthy, sick):
            one(torch.cat([places(step, model) for model in range(MODELS)]), WIDTH, rates)
    assert sick.diverged() == [None, 2, None]
    assert healthy.diverged() == [None] * 3
    assert sick.losses[::2] == healthy.losses[::2]


def test_joined_models_compute_in_bfloat16(examples: Coded) -> None:
    models = [make("roberta-prelayernorm", seed) for seed in range(MODELS)]
    together = joined(models, examples)
    ours, exact = steps(together, examples, MODELS, half=True), steps(joined(models, examples), examples, MODELS)
    assert ours.precision == "bfloat16"
    assert {parameter.dtype for parameter in together.parameters()} == {torch.bfloat16}
    for step in range(6):
        for one in (ours, exact):
            one(torch.cat([places(step, model) for model in range(MODELS)]), WIDTH, torch.full((MODELS,), 3e-3))
    assert ours.losses == pytest.approx(exact.losses, abs=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_joined_models_are_captured(examples: Coded) -> None:
    device = torch.device("cuda")
    table = examples.to(device)
    rates = torch.tensor([1e-2, 3e-3, 1e-3], device=device)
    with stepping.on_stream(device) as capture:
        models = [make("roberta-prelayernorm", seed).to(device) for seed in range(MODELS)]  # type: ignore[arg-type]
        given = [table.batch(places(0, model).to(device), WIDTH) for model in range(MODELS)]
        together = join(models, given, table.batch(torch.arange(MODELS * ROWS, device=device), WIDTH))
        assert together is not None
        ours = steps(together, table, MODELS, half=True, capture=capture)
        theirs = [steps(model, table, half=True) for model in models]
        for step in range(12):
            ours(torch.cat([places(step, model) for model in range(MODELS)]).to(device), WIDTH, rates)
            for model, one in enumerate(theirs):
                one(places(step, model).to(device), WIDTH, rates[model : model + 1])
        assert ours.captured == 1
        assert ours.losses == pytest.approx([one.losses[0] for one in theirs], abs=0.05)
