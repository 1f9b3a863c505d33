"""Square-root scaling: the layer against the paper's definitions, its lemmas at a large width, norms in a model."""

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from raptr.data.batch import Batch
from raptr.models.contract import Init
from raptr.models.model import Model
from raptr.studies import scaling, scaling_stack
from raptr.studies.contract import conduct
from raptr.studies.scaling import INITS, SCALING, SCALINGS, Setting
from raptr.studies.scaling_stack import CASES, Case, Weights
from raptr.subnetworks import Subnetwork

QUIET = Console(quiet=True)
TINY = Setting(hidden=(8,), widths=(16,), depth=4, tokens=4, size="tiny", sizes=(3, 5), draws=2, batch=1, vocabulary=32)


def written_out(x: list[list[float]], weights: Weights, *, divided: bool) -> list[list[float]]:
    """What a layer adds, by the paper's definitions, one number at a time."""

    def norm(v: list[float]) -> list[float]:
        mean = sum(v) / len(v)
        deviation = math.sqrt(sum((one - mean) ** 2 for one in v) / len(v))
        return [(one - mean) / deviation for one in v]

    def times(matrix: Tensor, v: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, v, strict=True)) for row in matrix.tolist()]

    def add(v: list[float], w: list[float]) -> list[float]:
        return [a + b for a, b in zip(v, w, strict=True)]

    normed, width = [norm(v) for v in x], len(x[0])
    added = []
    for v, own in zip(x, normed, strict=True):
        query = times(weights.query_DD, own)
        scores = [sum(a * b for a, b in zip(times(weights.key_DD, one), query, strict=True)) for one in normed]
        raised = [math.exp(score / (math.sqrt(width) if divided else 1)) for score in scores]
        mixed = [0.0] * width
        for share, one in zip(raised, normed, strict=True):
            mixed = add(mixed, [share / sum(raised) * value for value in times(weights.value_DD, one)])
        attention = times(weights.out_DD, mixed)
        hidden = [max(0.0, value) for value in times(weights.mlp_in_FD, norm(add(v, attention)))]
        added.append(add(attention, times(weights.mlp_out_DF, hidden)))
    return added


@pytest.mark.parametrize("divided", [False, True])
def test_a_layer_is_the_papers(divided: bool) -> None:
    weights = scaling_stack.initial(scaling_stack.normals(1, 6, 0, "cpu"), "deviation")
    x_ND = scaling_stack.sequence(Case(), 6, 5, 1, "cpu")
    attention_ND, mlp_ND = scaling_stack.branches(x_ND, weights, divided=divided)
    expected = torch.tensor(written_out(x_ND.tolist(), weights, divided=divided))
    torch.testing.assert_close(attention_ND + mlp_ND, expected, rtol=1e-4, atol=1e-5)


def test_the_two_readings_of_the_initial_weights() -> None:
    drawn = scaling_stack.normals(0, 100, 3, "cpu")
    for reading, power in (("deviation", 1.0), ("variance", 0.5)):
        weights = scaling_stack.initial(drawn, reading)
        for name, matrix in weights._asdict().items():
            claimed = math.sqrt(2) / math.sqrt(400) if name == "mlp_in_FD" else 1 / math.sqrt(100)
            assert matrix.std().item() == pytest.approx(claimed**power, rel=0.02), name


def test_what_one_layer_adds_to_squared_norms() -> None:
    x, attention, mlp = (torch.tensor([row]) for row in ([3.0, 4, 0, 0], [0.0, 0, 2, 0], [0.0, 0, 0, 6]))
    found = {key: values.item() for key, values in scaling_stack.one_layer(x, attention, mlp).items()}
    assert found == pytest.approx({"norm": 1, "mlp": 3, "attention": 1, "layer": 10})


@cache
def stacked(width: int, depth: int) -> dict[str, Any]:
    return scaling_stack.stacks(width, depth, 48, 0, "cpu")


def layers_of(name: str, width: int, depth: int = 4) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stacked(width, depth)[name]["layers"]
    return found


def test_the_lemmas_hold_at_a_large_width() -> None:
    for layer in layers_of("all one", 512):
        assert layer["norm"] == pytest.approx([1, 1, 1], rel=1e-6)
        assert all(0.8 < ratio < 1.2 for ratio in layer["mlp"])
        assert layer["mlp"][0] == pytest.approx(1, abs=0.08)
        # up to the lemmas' error terms, which are of order √(ℓ/d)
        assert 0 < layer["attention"][0] < 1.3
        assert 0.7 < layer["layer"][0] < 2.3
        assert all(0.5 < added < 3 for added in layer["layer"])


def test_read_as_variances_the_mlp_multiplies_norms_by_far_more() -> None:
    for layer in layers_of("read as variances", 128):
        # (m·d/2)^¼ with m = 4d
        assert layer["mlp"][0] == pytest.approx((4 * 128 * 128 / 2) ** 0.25, rel=0.15)
        assert layer["layer"][0] > 20


def test_the_spread_of_the_mlp_does_not_vanish_with_its_width() -> None:
    for hidden in (32, 2048):
        expected = 0.5 * math.sqrt(2 / 32 + 5 / hidden)
        assert scaling_stack.mlp_spread(32, hidden, 0, "cpu") == pytest.approx(expected, rel=0.25)


def test_attention_adds_d_where_tokens_are_equal_and_little_where_it_averages() -> None:
    equal = layers_of("equal tokens", 512)[0]["attention"]
    assert equal[0] == pytest.approx(1, abs=0.25)
    assert equal[1] == pytest.approx(equal[2], rel=1e-3)
    # scores of deviation 1 give N independent tokens shares whose squares sum to e/N
    averaged = layers_of("divided scores", 512)[0]["attention"]
    assert averaged[0] == pytest.approx(math.e / 48, abs=0.03)


def test_the_theorems_sums_follow_their_scalars() -> None:
    found = scaling_stack.stacks(16, 6, 8, 1, "cpu")
    one = scaling_stack.sequence(CASES["all one"], 16, 8, 1, "cpu")
    kept = sum(1 for alpha in scaling_stack.scalars(CASES["square root"], 6, 1) if alpha)
    assert kept == len(found["square root"]["layers"]) == 3
    assert len(found["square root"]["added"]) == 6
    assert sum(alpha**2 for alpha in scaling_stack.scalars(CASES["square root"], 6, 1)) == pytest.approx(6)
    # two random layers by hand
    case, start, total = CASES["random scalars"], one, 0.0
    for layer, alpha in enumerate(scaling_stack.scalars(case, 6, 1)[:2]):
        weights = scaling_stack.initial(scaling_stack.normals(1, 16, layer, "cpu"), "deviation")
        one = one + alpha * sum(scaling_stack.branches(one, weights, divided=False))
        total += alpha**2
    expected = (scaling_stack.squared(one) - scaling_stack.squared(start)) / (16 * total)
    assert found["random scalars"]["added"][1] == pytest.approx(
        [expected.mean().item(), expected.min().item(), expected.max().item()], rel=1e-5
    )


def test_scalars_and_inputs_of_the_cases() -> None:
    drawn = scaling_stack.scalars(CASES["random scalars"], 200, 0)
    assert all(0 <= alpha < 2 for alpha in drawn)
    assert sum(drawn) / 200 == pytest.approx(1, abs=0.12)
    lengths = {name: scaling_stack.sequence(case, 16, 3, 0, "cpu").norm(dim=1) for name, case in CASES.items()}
    assert lengths["all one"].tolist() == pytest.approx([4] * 3)
    assert lengths["long inputs"].tolist() == pytest.approx([160] * 3, rel=1e-6)
    equal = scaling_stack.sequence(CASES["equal tokens"], 16, 3, 0, "cpu")
    assert torch.equal(equal[0], equal[2])


@pytest.mark.parametrize(
    ("rows", "cosine"), [([[1.0, 2], [2, 4]], 1), ([[1.0, 0], [0, 3]], 0), ([[1.0, 0], [-5, 0]], -1)]
)
def test_how_alike_tokens_are(rows: list[list[float]], cosine: float) -> None:
    assert scaling_stack.alike(torch.tensor(rows)) == pytest.approx(cosine, abs=1e-6)


@pytest.mark.parametrize(
    ("layers", "size", "fixed", "written", "below"),
    [
        (4, 2, (1, 4), 1 / 2, 1),  # sums 3, 3, 3, 4
        (4, 4, (1, 4), 1, 1),
        (2, 1, (), 1 / 4, 1 / 2),  # sums 2, 2 and 0, 1
        (12, 6, (1, 12), 1 / 2, 1),
    ],
)
def test_how_often_the_papers_condition_holds(
    layers: int, size: int, fixed: Sequence[int], written: float, below: float
) -> None:
    found = scaling.condition(layers, size, fixed)
    assert (found["written"], found["below"]) == pytest.approx((written, below))


def tokens_of(model: Model) -> Batch:
    tokens_BS = torch.arange(12).view(2, 6) % model.config.vocabulary
    return Batch(tokens_BS, None, tokens_BS)


def test_norms_are_those_that_the_layers_of_a_part_get() -> None:
    model = scaling.started(TINY, "paper", 0)
    scales = (1.0, 0.0, 2.0, 0.0, 0.0, 1.5)
    batch = tokens_of(model)
    found = scaling.norms(model, batch, Subnetwork(scales))
    expected = []
    with torch.no_grad():
        x = model.enter(batch, None)
        inputs = model.inputs(Subnetwork.full(6)).blocks
        for layer, scale in enumerate(scales):
            if scale:
                expected.append(x.square().sum(dim=-1).mean().sqrt().item())
                x = x + scale * (model.blocks[layer](x, inputs[layer], None) - x)
        expected.append(x.square().sum(dim=-1).mean().sqrt().item())
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[0] == pytest.approx(math.sqrt(model.config.width), rel=1e-2)  # a normalisation ends the embedding


def test_the_papers_initialization_has_the_normal_numbers_of_the_models() -> None:
    paper, bert = (dict(scaling.started(TINY, init, 3).named_parameters()) for init in ("paper", "bert"))
    for name, weight in paper.items():
        if "embedding" not in name and name != "tokens.weight" and weight.dim() == 2:
            claimed = math.sqrt(2 / 512) if "mlp_in" in name else 1 / math.sqrt(128)
            torch.testing.assert_close(weight, bert[name] * (claimed / 0.02))
        else:
            assert torch.equal(weight, bert[name]), name
    assert scaling.started(TINY, "fan-in", 3).config.init == "fan-in"


def test_in_the_model_square_root_scaling_keeps_norms_where_layers_add_much() -> None:
    found = scaling.in_model(Setting(size="tiny", sizes=(3,), draws=8, batch=1), "paper", 0, "cpu")["parts"]
    off = {scaling_name: found[f"3 {scaling_name}"]["off"] for scaling_name in SCALINGS}
    assert off["sqrt"] < off["none"] / 2 < off["linear"] / 2
    assert found["3 none"]["end"] < 0.85 < 0.9 < found["3 sqrt"]["end"] < 1.1 < 1.3 < found["3 linear"]["end"]
    assert found["3 none"]["given"][0] == 1  # all get the same embeddings


def test_a_study_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "Setting", lambda **_: TINY)
    folder = conduct(SCALING, tmp_path, seeds=2, small=True, device="cpu", console=QUIET)
    whole = json.loads((folder / "result.json").read_text())
    assert (folder / "scaling.png").stat().st_size > 10_000
    kept = (folder / "job-16-0.json").stat().st_mtime_ns
    (folder / "job-16-1.json").unlink()
    (folder / "job-paper-0.json").unlink()
    drawn: list[tuple[str, int]] = []
    stacks, in_model = scaling_stack.stacks, scaling.in_model

    def counted_stacks(width: int, depth: int, tokens: int, seed: int, device: str) -> dict[str, Any]:
        drawn.append((str(width), seed))
        return stacks(width, depth, tokens, seed, device)

    def counted_model(setting: Setting, init: Init, seed: int, device: str) -> dict[str, Any]:
        drawn.append((init, seed))
        return in_model(setting, init, seed, device)

    monkeypatch.setattr(scaling, "stacks", counted_stacks)
    monkeypatch.setattr(scaling, "in_model", counted_model)
    conduct(SCALING, tmp_path, seeds=2, small=True, device="cpu", console=QUIET)
    assert drawn == [("16", 1), ("paper", 0)]
    assert (folder / "job-16-0.json").stat().st_mtime_ns == kept
    assert json.loads((folder / "result.json").read_text()) == whole


def test_result_has_every_case_and_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "Setting", lambda **_: TINY)
    result = scaling.run(tmp_path, seeds=3, small=True, device="cpu", console=QUIET)
    assert [stack["case"] for stack in result["theorem"]] == list(CASES)
    for stack in result["theorem"]:
        assert len(stack["added"]) == 4
        assert stack["layer"]["least"] <= stack["layer"]["mean"] <= stack["layer"]["largest"]
        assert stack["last"]["low"] < stack["last"]["mean"] < stack["last"]["high"]
    assert list(result["models"]) == list(INITS)
    for model in result["models"].values():
        assert len(model["norms"]) == 7
        assert list(model["parts"]) == [f"{size} {name}" for size in (3, 5) for name in SCALINGS]
        assert model["parts"]["5 sqrt"]["given"][0] == 1
    assert [row["size"] for row in result["condition"]] == [3, 5, 6, 3, 5, 6]
    figure = scaling.plot(result)
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
