"""Methods, which decide how training progresses: one file per paper, one registry."""

from raptr.methods.contract import Method, Phase
from raptr.methods.registry import METHODS, make_method

__all__ = ["METHODS", "Method", "Phase", "make_method"]
