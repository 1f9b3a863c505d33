"""How training progresses: one file per paper, one registry."""

from raptr.methods.contract import Method, Phase
from raptr.methods.registry import METHODS, make_method, settings_of

__all__ = ["METHODS", "Method", "Phase", "make_method", "settings_of"]
