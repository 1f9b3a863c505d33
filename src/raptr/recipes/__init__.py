"""Named complete runs."""

from collections.abc import Callable

from raptr.recipes.bert import Recipe, bert_base, bert_large, bert_mini, demo

RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo": demo,
    "bert-mini": bert_mini,
    "bert-base": bert_base,
    "bert-large": bert_large,
}

__all__ = ["RECIPES", "Recipe"]
