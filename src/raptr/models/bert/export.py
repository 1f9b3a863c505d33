"""A trained BERT as what others can load: a stock model and a stock tokenizer of `transformers`.

The stock class is `RobertaPreLayerNormForMaskedLM`, the same network under other names, with two additions of
its own. Positions count from padding id + 1, so its position table has that many more rows, in front. It adds
an embedding of the token's type: there is one type, and its embedding is zero. (`BertForMaskedLM` is another
network, post-LN: asked to load an export, it finds none of its weights and starts with random ones.)

A subnetwork becomes a smaller stock model that holds the kept layers only. Scales of the branches are folded
into the output projections, which is exact. A scale of the whole layer cannot be folded: in x + s·(layer(x) - x)
the MLP sees the unscaled attention, in a stock layer it would see the scaled one.

No code and nothing pickled goes along. The exported model reads an id equal to the padding id as padding
wherever it stands, as all stock models of this class do.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, RobertaPreLayerNormConfig, RobertaPreLayerNormForMaskedLM

from raptr.data.tokenizer import BERT as SPECIALS
from raptr.data.tokenizer import Vocabulary, load, read_vocabulary
from raptr.models.bert.config import BertConfig
from raptr.models.bert.model import EPSILON, Bert, Block
from raptr.models.export import Exporter, check
from raptr.models.inputs import folded
from raptr.models.layout import split
from raptr.subnetworks import Subnetwork

STOCK = RobertaPreLayerNormForMaskedLM
BODY = "roberta_prelayernorm"


def to_transformers(model: Bert, subnetwork: Subnetwork, vocabulary: Vocabulary) -> RobertaPreLayerNormForMaskedLM:
    """The layers that run in this subnetwork as a stock model on the CPU, in evaluation mode."""
    config = model.config
    if config.heads * config.head_size != config.width:
        raise ValueError(
            f"model.head_size is {config.head_size} with {config.heads} heads and width {config.width}. "
            "In a stock model heads × head_size is the width, so this model cannot be exported."
        )
    check(config, subnetwork, vocabulary)
    vocabulary.ordinary(SPECIALS)
    # The stock class draws initial weights from the global generator, which is the caller's.
    with torch.random.fork_rng(devices=[]):
        stock = _configuration(model.config, subnetwork.size, vocabulary)
        exported = STOCK(stock)
    exported.load_state_dict(_weights(model, subnetwork, vocabulary["[PAD]"]))
    exported.train(False)
    return exported


def stock_tokenizer(file: Path, positions: int) -> PreTrainedTokenizerFast:
    """The tokenizer in a `tokenizer.json`, as `transformers` has it, for sequences of up to `positions` tokens.

    Texts get the same ids as in training, with one difference: a special token written out in a text, such as
    [MASK], becomes that token.
    """
    tokenizer, vocabulary = load(file), read_vocabulary(file)
    vocabulary.ordinary(SPECIALS)
    pad, unknown, start, end, mask = (vocabulary.name(token) for token in SPECIALS.tokens)
    # A word's token holds the space before it, so the mask that stands for a word has to take that space too.
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["lstrip"] = token["id"] == vocabulary["[MASK]"]
    changed = Tokenizer.from_str(json.dumps(description))
    # The model knows one type of token; the pair's second text must not ask for another.
    changed.post_processor = TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:0 {end}:0",
        special_tokens=[(token, vocabulary.ids[token]) for token in (start, end)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=changed,
        model_max_length=positions,
        # Said outright, since by default some versions hand the model types too.
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        pad_token=pad,
        unk_token=unknown,
        cls_token=start,
        sep_token=end,
        bos_token=start,
        eos_token=end,
        mask_token=mask,
    )


def _configuration(config: BertConfig, layers: int, vocabulary: Vocabulary) -> RobertaPreLayerNormConfig:
    """The stock model's dimensions."""
    return RobertaPreLayerNormConfig(
        architectures=[STOCK.__name__],
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        num_hidden_layers=layers,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp,
        hidden_act="gelu",
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=config.positions + vocabulary["[PAD]"] + 1,
        type_vocab_size=1,
        layer_norm_eps=EPSILON,
        pad_token_id=vocabulary["[PAD]"],
        bos_token_id=vocabulary["[CLS]"],
        eos_token_id=vocabulary["[SEP]"],
        tie_word_embeddings=True,
    )


def _weights(model: Bert, subnetwork: Subnetwork, pad: int) -> dict[str, Tensor]:
    """Every tensor of the stock model, by its name there."""
    words, positions = model.tokens.weight.detach(), model.embedding.positions.weight.detach()
    unused = positions.new_zeros(pad + 1, positions.shape[1])
    named = {
        f"{BODY}.embeddings.word_embeddings.weight": words,
        f"{BODY}.embeddings.position_embeddings.weight": torch.cat([unused, positions]),
        f"{BODY}.embeddings.token_type_embeddings.weight": torch.zeros_like(words[:1]),
        **_pair(f"{BODY}.embeddings.LayerNorm", model.embedding.norm),
        **_pair(f"{BODY}.LayerNorm", model.head.final_norm),
        **_pair("lm_head.dense", model.head.dense),
        **_pair("lm_head.layer_norm", model.head.norm),
        "lm_head.decoder.weight": words,
        "lm_head.decoder.bias": model.head_bias.detach(),
        "lm_head.bias": model.head_bias.detach(),
    }
    for place, layer in enumerate(subnetwork.kept):
        block = model.blocks[layer]
        assert isinstance(block, Block)
        named |= _layer(f"{BODY}.encoder.layer.{place}", block, *folded(subnetwork, layer))
    return named


def _layer(name: str, block: Block, attention_scale: float, mlp_scale: float) -> dict[str, Tensor]:
    """The tensors of one layer, the scales of its branches folded into their last projections."""
    weights = split(block.qkv.weight.detach(), block.layout["qkv.weight"])
    biases = split(block.qkv.bias.detach(), block.layout["qkv.bias"])
    named = {
        **_pair(f"{name}.attention.LayerNorm", block.attention_norm),
        **_pair(f"{name}.attention.output.dense", block.attention_out, attention_scale),
        **_pair(f"{name}.intermediate.LayerNorm", block.mlp_norm),
        **_pair(f"{name}.intermediate.dense", block.mlp_in),
        **_pair(f"{name}.output.dense", block.mlp_out, mlp_scale),
    }
    for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        named[f"{name}.attention.self.{part}.weight"] = weight
        named[f"{name}.attention.self.{part}.bias"] = bias
    return named


def _pair(name: str, module: nn.Linear | nn.LayerNorm, scale: float = 1.0) -> dict[str, Tensor]:
    """A module's weight and bias, scaled."""
    return {f"{name}.weight": module.weight.detach() * scale, f"{name}.bias": module.bias.detach() * scale}


EXPORTER = Exporter(
    convert=to_transformers,
    tokenizer=stock_tokenizer,
    task="fill-mask",
    tags=("raptr", "bert"),
    says="An encoder like BERT, trained by raptr to fill in masked tokens.",
    example="""from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

folder = "."
model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
print(pipeline("fill-mask", model=model, tokenizer=tokenizer)("import [MASK]"))""",
    note=f"""**Load it with an `Auto` class, or with `{STOCK.__name__}`.** Its layers normalise their inputs
(pre-LN), which BERT's do not, so `BertForMaskedLM.from_pretrained` does not fit: it finds none of its own weights here
and starts with random ones, without an error.""",
)
