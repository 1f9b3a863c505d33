"""The special tokens of objectives for decoders.

Causal: every document ends with [EOS]. UL2 (Tay et al., 2022): beside these the three mode tokens, for R, S and X
denoisers in this order, and the sentinels of T5 (Raffel et al., 2020), of which sequences of 512 tokens need 64.
A vocabulary for UL2 thus serves causal training too. [PAD] is for those who batch texts of different lengths.
"""

from raptr.data.tokenizer import Specials

MODES = ("[NLU]", "[S2S]", "[NLG]")
SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))

CAUSAL = Specials("causal", ("[PAD]", "[EOS]"), end="[EOS]")
UL2 = Specials("ul2", (*CAUSAL.tokens, *MODES, *SENTINELS), end="[EOS]")
