"""Named complete runs."""

from collections.abc import Callable

from raptr.recipes.bert import Recipe, bert_base, bert_large, bert_mini, demo
from raptr.recipes.ul2 import ul2_large, ul2_small

RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo": demo,
    "bert-mini": bert_mini,
    "bert-base": bert_base,
    "bert-large": bert_large,
    "ul2-small": ul2_small,
    "ul2-1.6b": ul2_large,
}

__all__ = ["RECIPES", "Recipe"]
