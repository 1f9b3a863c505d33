"""Named complete runs."""

from collections.abc import Callable

from raptr.recipes.bert import Recipe, bert_base, bert_large, bert_mini, demo
from raptr.recipes.decoder import decoder_1_6b, decoder_100m, decoder_demo, decoder_mini

RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo": demo,
    "bert-mini": bert_mini,
    "bert-base": bert_base,
    "bert-large": bert_large,
    "decoder-demo": decoder_demo,
    "decoder-mini": decoder_mini,
    "decoder-100m": decoder_100m,
    "decoder-1.6b": decoder_1_6b,
}

# The recipe to begin with on text prepared for an objective: on the CPU, and on a GPU.
FIRST: dict[str, tuple[str, str]] = {
    "mlm": ("demo", "bert-mini"),
    "causal": ("decoder-demo", "decoder-mini"),
}

__all__ = ["FIRST", "RECIPES", "Recipe"]
