"""Named complete runs."""

from collections.abc import Callable

from raptr.recipes.bert import Recipe, bert_base, bert_large, bert_mini, demo
from raptr.recipes.decoder import decoder_1_6b, decoder_100m, decoder_demo, decoder_mini
from raptr.recipes.ul2 import ul2_demo, ul2_large, ul2_small

RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo": demo,
    "bert-mini": bert_mini,
    "bert-base": bert_base,
    "bert-large": bert_large,
    "decoder-demo": decoder_demo,
    "decoder-mini": decoder_mini,
    "decoder-100m": decoder_100m,
    "decoder-1.6b": decoder_1_6b,
    "ul2-demo": ul2_demo,
    "ul2-small": ul2_small,
    "ul2-1.6b": ul2_large,
}

# The recipes to begin with on text prepared for an objective: the first on a CPU, the second on a GPU.
FIRST: dict[str, tuple[str, str]] = {
    "mlm": ("demo", "bert-mini"),
    "causal": ("decoder-demo", "decoder-mini"),
    "ul2": ("ul2-demo", "ul2-small"),
}

__all__ = ["FIRST", "RECIPES", "Recipe"]
