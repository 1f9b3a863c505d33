"""Growth plans from names alone: every tensor of the larger model, and where it comes from."""

from typing import Any

import pytest

from raptr.growth.plan import Growth, Rule, added, centred, inserted, repeated, stacked

WHERE: dict[str, Any] = {"layers": "blocks", "outputs": ("attention_out", "mlp_out")}


@pytest.mark.parametrize(
    ("old", "new", "on_top", "beside"),
    [
        (3, 3, (0, 1, 2), (0, 1, 2)),
        (3, 4, (0, 1, 2, 2), (0, 1, 2, 2)),
        (3, 5, (0, 1, 2, 1, 2), (0, 1, 1, 2, 2)),
        (3, 6, (0, 1, 2, 0, 1, 2), (0, 0, 1, 1, 2, 2)),
        (3, 7, (0, 1, 2, 0, 1, 2, 2), (0, 0, 1, 1, 2, 2, 2)),
        (1, 3, (0, 0, 0), (0, 0, 0)),
    ],
)
def test_sources(old: int, new: int, on_top: tuple[int, ...], beside: tuple[int, ...]) -> None:
    assert stacked(old, new) == on_top
    assert inserted(old, new) == beside


@pytest.mark.parametrize(
    ("old", "new", "sources"),
    [
        (3, 3, (0, 1, 2)),
        (3, 12, (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2)),
        (3, 5, (0, 1, 2, 0, 1)),
        (1, 3, (0, 0, 0)),
    ],
)
def test_sources_from_the_bottom_again(old: int, new: int, sources: tuple[int, ...]) -> None:
    assert repeated(old, new) == sources


@pytest.mark.parametrize(
    ("old", "new", "sources"),
    [
        (4, 4, (0, 1, 2, 3)),
        (1, 2, (0, 0)),
        (2, 3, (0, 0, 1)),  # the lower of two
        (3, 4, (0, 1, 1, 2)),
        (4, 6, (0, 1, 0, 1, 2, 3)),
        (6, 8, (0, 1, 2, 3, 2, 3, 4, 5)),
        (8, 10, (0, 1, 2, 3, 2, 3, 4, 5, 6, 7)),  # a whole block, not layers 3 and 4
        (10, 12, (0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9)),
        (6, 9, (0, 1, 2, 0, 1, 2, 3, 4, 5)),
        (3, 6, (0, 1, 2, 0, 1, 2)),
        (6, 10, (0, 1, 2, 3, 4, 1, 2, 3, 4, 5)),  # no whole blocks
        (5, 7, (0, 1, 2, 1, 2, 3, 4)),
        (2, 5, (0, 1, 0, 1, 1)),  # more than a doubling
    ],
)
def test_sources_in_the_middle(old: int, new: int, sources: tuple[int, ...]) -> None:
    assert centred(old, new) == sources


def test_new_layers_are_those_that_were_not_there() -> None:
    assert Growth(stacked(6, 9)).new == (6, 7, 8)
    assert Growth(inserted(6, 9)).new == (4, 6, 8)
    assert Growth(centred(6, 8)).new == (4, 5)
    assert Growth(stacked(3, 3)).new == ()


@pytest.mark.parametrize("sources", [(1, 0), (0, 2), (1, 1), (0, 0, 2)])
def test_no_layer_is_lost_or_moved_past_another(sources: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="drops layers, or changes their order"):
        Growth(sources)


def test_units_are_added_after_those_there_are() -> None:
    assert added(2, 5) == (0, 1, None, None, None)
    assert added(3, 3) is None


@pytest.mark.parametrize("units", [(1, 0), (0, 0), (0, 2), (1,), (None, 1)])
@pytest.mark.parametrize("axis", ["heads", "parts"])
def test_no_unit_is_lost_repeated_or_moved_past_another(axis: str, units: tuple[int | None, ...]) -> None:
    with pytest.raises(AssertionError, match="drops units"):
        Growth((0,), **{axis: units})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("tokens.weight", "tokens.weight"),
        ("head_bias", "head_bias"),
        ("blocks.0.qkv.weight", "blocks.0.qkv.weight"),
        ("blocks.5.mlp_out.bias", "blocks.5.mlp_out.bias"),
        ("blocks.6.qkv.weight", "blocks.3.qkv.weight"),
        ("blocks.8.attention_norm.bias", "blocks.5.attention_norm.bias"),
        ("blocks.10.qkv.weight", "blocks.1.qkv.weight"),
    ],
)
def test_where_a_tensor_comes_from(name: str, source: str) -> None:
    plan = Growth((0, 1, 2, 3, 4, 5, 3, 4, 5, 0, 1))
    assert plan.rule(name, **WHERE) == Rule(source, zero_weight=False, zero_moments=False)


@pytest.mark.parametrize(
    ("moments", "embedding", "old", "new"),
    [("copy", False, False, False), ("zero", False, False, True), ("reset", True, True, True)],
)
def test_whose_moments_start_anew(moments: Any, embedding: bool, old: bool, new: bool) -> None:
    plan = Growth(inserted(2, 4), moments=moments)
    names = ["tokens.weight", "blocks.2.qkv.weight", "blocks.3.qkv.weight"]
    assert [plan.rule(name, **WHERE).zero_moments for name in names] == [embedding, old, new]


@pytest.mark.parametrize("moments", ["copy", "zero", "reset"])
def test_an_identity_zeroes_what_new_layers_write(moments: Any) -> None:
    plan = Growth(inserted(2, 4), identity=True, moments=moments)
    modules = ("attention_norm", "qkv", "attention_out", "mlp_norm", "mlp_in", "mlp_out")
    inner = [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]
    names = [f"blocks.{layer}.{name}" for layer in range(4) for name in inner]
    rules = {name: plan.rule(name, **WHERE) for name in (*names, "mlp_out.weight")}
    zeroed = {name for name, rule in rules.items() if rule.zero_weight}
    assert zeroed == {
        f"blocks.{layer}.{module}.{kind}"
        for layer in (1, 3)
        for module in ("attention_out", "mlp_out")
        for kind in ("weight", "bias")
    }
    assert all(rules[name].zero_moments for name in zeroed)
    assert rules["blocks.1.qkv.weight"].zero_moments == (moments != "copy")
