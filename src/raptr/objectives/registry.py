"""The objectives that can be trained, by name."""

from raptr.objectives.causal import CausalLM
from raptr.objectives.contract import Objective
from raptr.objectives.mlm import MaskedLM
from raptr.objectives.ul2 import UL2

OBJECTIVES: dict[str, type[Objective]] = {kind.name: kind for kind in (MaskedLM, CausalLM, UL2)}
