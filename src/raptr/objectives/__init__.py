"""WHAT is predicted: from windows of tokens to the batches that a model is trained and judged on.

An objective is one file with one class, an entry in OBJECTIVES, and its special tokens in SPECIALS. Vocabularies can
be prepared for those of SPECIALS that have no class yet.
"""

from raptr.data.tokenizer import BERT, Specials
from raptr.objectives.contract import Objective
from raptr.objectives.mlm import MaskedLM
from raptr.objectives.specials import CAUSAL, UL2

OBJECTIVES: dict[str, type[Objective]] = {MaskedLM.name: MaskedLM}
SPECIALS: dict[str, Specials] = {specials.objective: specials for specials in (BERT, CAUSAL, UL2)}

__all__ = ["OBJECTIVES", "SPECIALS", "MaskedLM", "Objective", "specials_of"]


def specials_of(objective: str) -> Specials:
    """The special tokens that a vocabulary for this objective has."""
    if objective not in SPECIALS:
        raise ValueError(f"objective is {objective!r}. Use one of: {', '.join(SPECIALS)}.")
    return SPECIALS[objective]
