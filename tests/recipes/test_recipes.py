"""The paper's runs, as its tables and appendix state them."""

import pytest

from raptr.recipes import RECIPES
from raptr.train.config import Config
from raptr.train.plan import plan


def test_bert_large_spends_the_layer_flops_of_the_papers_625k_steps_of_full_training() -> None:
    config = Config.read(RECIPES["bert-large"]())
    dimensions = config.model.build(config.data.vocabulary, config.data.length)
    method = config.make_method(dimensions)
    planned = plan(method, dimensions, sequences=config.train.batch, length=config.data.length, targets=19)
    assert planned.relative_layers * config.train.steps == pytest.approx(625_000)
    assert config.train.steps == 1_000_000


@pytest.mark.parametrize("name", RECIPES)
def test_only_the_demo_names_its_text(name: str) -> None:
    assert Config.read(RECIPES[name]()).data.source == ("builtin" if name == "demo" else None)
