"""Export a trained decoder as a stock `LlamaForCausalLM` and tokenizer, and load a stock Llama into a decoder.

Both are the same network. The stock model stores separately the matrices that are fused here, and its query heads are
ordered by group: query head r of group g is number g·R + r there (R query heads per group). Scales of the branches are
folded into the output projections, which is exact; a scale of the whole layer cannot be folded.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from raptr.data.tokenizer import Vocabulary, load, read_vocabulary
from raptr.models.contract import PLAIN
from raptr.models.decoder.config import DecoderConfig
from raptr.models.decoder.model import Block, Decoder
from raptr.models.export import Exporter, check
from raptr.models.inputs import Folded, folded
from raptr.models.layout import split
from raptr.models.stock import Piece, StockFolder, whole
from raptr.subnetworks import Subnetwork

DIMENSIONS = {  # the stock model's setting: ours
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "head_dim": "head_size",
    "intermediate_size": "mlp",
    "tie_word_embeddings": "tied",
    "rms_norm_eps": "norm_epsilon",
}


def to_transformers(model: Decoder, subnetwork: Subnetwork, vocabulary: Vocabulary) -> LlamaForCausalLM:
    """Return the layers that run in the subnetwork as a stock model on the CPU, in evaluation mode.

    Raise ValueError if no stock model can represent them.
    """
    check(model.config, subnetwork, vocabulary)
    # The stock class draws initial weights from torch's global generator: restore the caller's state.
    with torch.random.fork_rng(devices=[]):
        exported = LlamaForCausalLM(_configuration(model.config, subnetwork.size, vocabulary))
    tensors = {name: piece.exported() for name, piece in _pieces(model, subnetwork).items()}
    exported.load_state_dict({"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors})
    exported.train(False)
    return exported


def stock_tokenizer(file: Path, positions: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer in a `tokenizer.json` as a `transformers` one, for sequences of up to `positions` tokens.

    Texts get the same ids as in training; no tokens are added around them. In training, documents follow the end token
    of the one before, so the end token also starts generation without a prompt.
    """
    tokenizer, vocabulary = load(file), read_vocabulary(file)
    tokenizer.post_processor = None
    end = vocabulary.name("[EOS]")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=positions,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        bos_token=end,
        eos_token=end,
        pad_token=vocabulary.name("[PAD]") if "[PAD]" in vocabulary else end,
    )


def _configuration(config: DecoderConfig, layers: int, vocabulary: Vocabulary) -> LlamaConfig:
    """Return the stock model's configuration."""
    end, padded = vocabulary["[EOS]"], "[PAD]" in vocabulary
    return LlamaConfig(
        architectures=[LlamaForCausalLM.__name__],
        vocab_size=config.vocabulary,
        **{theirs: getattr(config, ours) for theirs, ours in DIMENSIONS.items()},
        num_hidden_layers=layers,
        num_key_value_heads=config.groups,
        max_position_embeddings=config.positions,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=vocabulary["[PAD]"] if padded else end,
    )


def dimensions(folder: StockFolder) -> dict[str, Any]:
    """Return the settings of `model` for a decoder of the stock model's dimensions.

    Raise ValueError if the stock model computes anything differently.
    """
    needed = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    stock = folder.read(LlamaConfig, needed)
    rope = stock.rope_parameters
    if rope["rope_type"] != "default":
        raise ValueError(
            f"model.start is {str(folder.path)!r}, whose rope_type is {rope['rope_type']!r}; 'default' is allowed"
        )
    return {
        "layers": stock.num_hidden_layers,
        **{ours: getattr(stock, theirs) for theirs, ours in DIMENSIONS.items()},
        "kv_heads": stock.num_key_value_heads,
        "rope_base": float(rope["rope_theta"]),
        **PLAIN,
    }


def from_transformers(model: Decoder, folder: StockFolder) -> None:
    """Load a stock model's weights into the decoder; raise ValueError if its tensors do not match."""
    # Files may hold a copy of a tied output matrix; older versions also saved the rotary frequencies.
    besides = r".*\.rotary_emb\.inv_freq" + (r"|lm_head\.weight" if model.config.tied else "")
    folder.fill(_pieces(model, Subnetwork.full(model.config.layers)), besides)


def _pieces(model: Decoder, subnetwork: Subnetwork) -> dict[str, Piece]:
    """Return the stock model's tensors by their names there, except a tied output matrix."""
    named = {
        "model.embed_tokens.weight": whole(model.tokens.weight),
        "model.norm.weight": whole(model.head.norm.weight),
    }
    if model.output is not None:
        named["lm_head.weight"] = whole(model.output.weight)
    for place, layer in enumerate(subnetwork.kept):
        block = model.blocks[layer]
        assert isinstance(block, Block)
        pieces = _layer(block, folded(subnetwork, layer, model.config))
        named |= {f"model.layers.{place}.{name}.weight": piece for name, piece in pieces.items()}
    return named


def _layer(block: Block, scales: Folded) -> dict[str, Piece]:
    """Return the weights of one layer by their stock names, with the scales of norms and branches folded in."""
    cuts, groups, size = block.layout, block.heads, block.head_size
    qkv, out = block.qkv.weight.detach(), block.attention_out.weight.detach()
    queries, width = out.shape[1], out.shape[0]
    *_, key, value = split(qkv, cuts["qkv.weight"])
    gate, up = split(block.mlp_in.weight.detach(), cuts["mlp_in.weight"])
    query_GRKD = qkv[:queries].view(-1, groups, size, width).transpose(0, 1)
    output_DGRK = out.view(width, -1, groups, size).transpose(1, 2)
    return {
        "input_layernorm": whole(block.attention_norm.weight, scales.norm),
        "self_attn.q_proj": Piece(query_GRKD, (queries, width)),
        "self_attn.k_proj": whole(key),
        "self_attn.v_proj": whole(value),
        "self_attn.o_proj": Piece(output_DGRK, (width, queries), scales.attention),
        "post_attention_layernorm": whole(block.mlp_norm.weight, scales.norm),
        "mlp.gate_proj": whole(gate),
        "mlp.up_proj": whole(up),
        "mlp.down_proj": whole(block.mlp_out.weight, scales.mlp),
    }


# `generate` refuses 4D masks, so `complete` first runs the prefix to fill the cache. It then drops the prefix's last
# token from the cache, so that `generate` also chooses the first new token, with its own options and stopping criteria.
PREFIX = '''## The prefix

This model was trained with UL2. A sequence is `[mode] inputs targets [EOS]`; the mode token and the inputs are a prefix
whose positions see each other. The code above attends causally, as `LlamaForCausalLM` does by itself. With the
attention of training:

```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

folder = "."
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
tokenizer = AutoTokenizer.from_pretrained(folder)


def prefix_mask(prefix, length):
    """True where position q sees k, that is k <= q or k < prefix; (batch, 1, length, length)."""
    place = torch.arange(length, device=model.device)
    return (place <= place[:, None]) | (place < torch.as_tensor(prefix, device=model.device).view(-1, 1, 1, 1))


@torch.no_grad()
def logits(ids, prefix):
    """Scores of the next token at every position; `prefix` is how many tokens mode and inputs have, in each row."""
    return model(ids, attention_mask=prefix_mask(prefix, ids.shape[1])).logits


@torch.no_grad()
def complete(text, **options):
    """The targets for a text that begins with a mode token; the options are those of `generate`."""
    ids = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
    length = ids.shape[1]
    cache = DynamicCache()
    model(ids, attention_mask=prefix_mask(length, length), past_key_values=cache)
    cache.crop(-1)  # generate starts from the last token of the prefix; the others stay in the cache
    out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
    return tokenizer.decode(out[0, length:])


print(complete("[S2S]import os", max_new_tokens=8, do_sample=False))
print(complete("[NLU]import<extra_id_0>\\nimport<extra_id_1>\\n", max_new_tokens=8, do_sample=False))
```

- The mode says what is missing: `[S2S]` the rest of a text (S denoisers), `[NLU]` short spans that are a small part of
  it (R), `[NLG]` long spans or a large part (X). The table names the denoisers of the training:
  `R-3-0.15` hides spans of 3 tokens on average, 15% of the text.
- In the inputs a sentinel stands for each hidden span: `<extra_id_0>` for the first, then `<extra_id_1>` and so on. In
  the targets each span follows its sentinel. The tokenizer reads mode tokens and sentinels in a text as single tokens,
  unless it is called with `split_special_tokens=True`. Put no space before a sentinel: a space belongs to the word
  behind it.
- Keep `attn_implementation="sdpa"`. With `"eager"` a bool mask gives wrong scores without an error.
- `complete` takes one text. For `logits`, pad shorter sequences on the right. Padding on the left needs `position_ids`
  that count from the mode token, and a mask that hides the padding.'''


EXPORTER = Exporter(
    stock=LlamaForCausalLM.__name__,
    convert=to_transformers,
    tokenizer=stock_tokenizer,
    dimensions=dimensions,
    load=from_transformers,
    task="text-generation",
    tags=("raptr", "llama"),
    says="A decoder with Llama's architecture, trained by raptr to predict the next token.",
    example="""from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

folder = "."
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
print(pipeline("text-generation", model=model, tokenizer=tokenizer)("import os\\n", max_new_tokens=40))""",
    sections={"ul2": PREFIX},
)
