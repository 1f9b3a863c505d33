"""The paper's runs, as its tables and appendix state them, and what all recipes have in common."""

from dataclasses import replace
from pathlib import Path

import pytest

from raptr.objectives.registry import OBJECTIVES
from raptr.recipes import FIRST, RECIPES
from raptr.train.config import Config
from raptr.train.plan import plan
from raptr.train.resolve import resolve


def test_bert_large_spends_the_layer_flops_of_the_papers_625k_steps_of_full_training() -> None:
    config = Config.read(RECIPES["bert-large"]())
    cost = {"sequences": config.train.batch, "length": config.data.length, "targets": 19}
    planned = plan(config.make_method(), config.dimensions, **cost)
    assert planned.relative_layers * config.train.steps == pytest.approx(625_000)
    assert config.train.steps == 1_000_000


@pytest.mark.parametrize("name", RECIPES)
def test_only_demos_name_their_text(name: str) -> None:
    assert Config.read(RECIPES[name]()).data.source == ("builtin" if name.endswith("demo") else None)


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_is_evaluated_twenty_times_and_a_short_one_less_often(name: str) -> None:
    train = Config.read(RECIPES[name]()).train
    assert train.eval_interval == train.steps // 20
    for steps in (1, 20, 40):  # no evaluation reads more sequences than were trained on since the last one
        short = replace(train, steps=steps)
        assert short.eval_interval * short.batch >= short.eval_samples
        assert (short.eval_interval - 1) * short.batch < short.eval_samples
    assert replace(train, eval_every=1).eval_interval == 1


@pytest.mark.parametrize("objective", FIRST)
def test_the_first_recipes_of_an_objective_train_it(objective: str) -> None:
    on_cpu, on_gpu = (Config.read(RECIPES[name]()) for name in FIRST[objective])
    assert {on_cpu.objective.name, on_gpu.objective.name} == {objective}
    assert objective == "ul2" or on_cpu.model.size == "tiny"  # there is no small run of UL2 yet


def test_every_objective_that_can_be_trained_has_a_first_recipe() -> None:
    assert FIRST.keys() == OBJECTIVES.keys()


def test_decoders_start_with_their_familys_weights_and_have_the_size_of_their_name() -> None:
    """Weights in layers and token matrix, by which such models are called."""
    for name, about in (("decoder-100m", 110e6), ("decoder-1.6b", 1.65e9)):
        config = Config.read(RECIPES[name]())
        dimensions = config.dimensions
        assert (dimensions.init, config.data.length, config.data.vocabulary) == ("fan-in", 512, 32_768)
        layers = dimensions.layers * dimensions.layer_weights(dimensions.shape.heads, dimensions.shape.parts)
        assert layers + dimensions.width * dimensions.vocabulary == pytest.approx(about, rel=0.03)


@pytest.mark.parametrize("name", RECIPES)
def test_a_warm_up_that_does_not_fit_into_fewer_steps_keeps_its_share_of_them(name: str) -> None:
    recipe = Config.read(RECIPES[name]())
    usual, warmup = recipe.train.steps, recipe.optimizer.warmup
    given = {"train.steps": 20, "method.full_start": 0 if "full_start" in recipe.method else None}
    message = rf"optimizer\.warmup is 1: the recipe {name}'s warm-up of {warmup} steps.*into 20 steps.*--set"
    with pytest.warns(UserWarning, match=message):
        short = resolve(name, None, given, [])
    assert short.optimizer.warmup == max(1, round(20 * warmup / usual)) == 1
    assert resolve(name, None, {}, []).optimizer.warmup == warmup  # a warning would be an error
    assert resolve(name, None, {"train.steps": usual - 1}, []).optimizer.warmup == warmup  # it fits


def test_a_warm_up_that_is_given_is_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("optimizer: {warmup: 40}")
    with pytest.raises(ValueError, match=r"optimizer\.warmup is 40.*to 15 or less"):
        resolve("demo", None, {"train.steps": 20}, ["optimizer.warmup=40"])
    with pytest.raises(ValueError, match=r"optimizer\.warmup is 40.*to 15 or less"):
        resolve("demo", file, {"train.steps": 20}, [])
    assert resolve("demo", file, {"train.steps": 20}, ["optimizer.warmup=7"]).optimizer.warmup == 7
    with pytest.warns(UserWarning, match=r"warmup is 0: .*warm-up of 40 steps and a decay of 20 do not fit"):
        assert resolve("demo", None, {"train.steps": 20}, ["optimizer.decay=1"]).optimizer.warmup == 0
