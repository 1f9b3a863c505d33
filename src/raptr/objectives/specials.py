"""The special tokens of each objective.

Masked LM: BERT's. Causal: [EOS], which ends every document, and [PAD]. UL2 (Tay et al., 2022): these, the three mode
tokens for R, S and X denoisers in this order, and the sentinels of T5 (Raffel et al., 2020), of which sequences of 512
tokens need 64. So a vocabulary for UL2 serves causal training too. [PAD] is for users who batch texts of different
lengths; training does not pad.
"""

from raptr.data.tokenizer import BERT, Specials

MODES = ("[NLU]", "[S2S]", "[NLG]")
SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))

CAUSAL = Specials("causal", ("[PAD]", "[EOS]"), end="[EOS]", optional=("[PAD]",))
UL2 = Specials("ul2", (*CAUSAL.tokens, *MODES, *SENTINELS), end="[EOS]", optional=CAUSAL.optional)
SPECIALS: dict[str, Specials] = {specials.objective: specials for specials in (BERT, CAUSAL, UL2)}


def specials_of(objective: str) -> Specials:
    """Return the special tokens of an objective; raise a ValueError if there is no such objective."""
    if objective not in SPECIALS:
        raise ValueError(f"objective is {objective!r}. Use one of: {', '.join(SPECIALS)}.")
    return SPECIALS[objective]
