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
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import PreTrainedTokenizerFast, RobertaPreLayerNormConfig, RobertaPreLayerNormForMaskedLM

from raptr.data.tokenizer import BERT as SPECIALS
from raptr.data.tokenizer import Vocabulary, load, read_vocabulary
from raptr.models.bert.config import BertConfig
from raptr.models.bert.model import EPSILON, Bert, Block
from raptr.models.contract import PLAIN
from raptr.models.export import Exporter, check
from raptr.models.inputs import Folded, folded
from raptr.models.layout import split
from raptr.models.stock import Piece, StockFolder, whole
from raptr.subnetworks import Subnetwork

STOCK = RobertaPreLayerNormForMaskedLM
BODY = "roberta_prelayernorm"
TYPES = f"{BODY}.embeddings.token_type_embeddings.weight"


def to_transformers(model: Bert, subnetwork: Subnetwork, vocabulary: Vocabulary) -> RobertaPreLayerNormForMaskedLM:
    """The layers that run in this subnetwork as a stock model on the CPU, in evaluation mode."""
    if reason := model.config.unexportable():
        raise ValueError(reason)
    check(model.config, subnetwork, vocabulary)
    vocabulary.ordinary(SPECIALS)
    # The stock class draws initial weights from the global generator, which is the caller's.
    with torch.random.fork_rng(devices=[]):
        stock = _configuration(model.config, subnetwork.size, vocabulary)
        exported = STOCK(stock)
    tensors = {name: piece.exported() for name, piece in _pieces(model, subnetwork, vocabulary["[PAD]"]).items()}
    words, bias = tensors[f"{BODY}.embeddings.word_embeddings.weight"], tensors["lm_head.bias"]
    tied = {"lm_head.decoder.weight": words, "lm_head.decoder.bias": bias}
    exported.load_state_dict({**tensors, **tied, TYPES: torch.zeros_like(words[:1])})
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


def dimensions(folder: StockFolder) -> dict[str, Any]:
    """The settings of `model` that make a BERT of a stock model's dimensions."""
    needed = {"hidden_act": "gelu", "layer_norm_eps": EPSILON, "tie_word_embeddings": True, "is_decoder": False}
    stock = folder.read(RobertaPreLayerNormConfig, needed)
    if stock.pad_token_id is None:
        raise ValueError(f"model.start is {str(folder.path)!r}, whose pad_token_id is None; a token's id is allowed")
    return {
        "layers": stock.num_hidden_layers,
        "width": stock.hidden_size,
        "heads": stock.num_attention_heads,
        "head_size": stock.hidden_size // stock.num_attention_heads,
        "mlp": stock.intermediate_size,
        **PLAIN,
    }


def from_transformers(model: Bert, folder: StockFolder) -> None:
    """Give the BERT the weights of a stock model; what that adds for the first token type is added to positions."""
    stock = RobertaPreLayerNormConfig.from_dict(dict(folder.facts))
    assert stock.pad_token_id is not None
    positions = stock.max_position_embeddings - stock.pad_token_id - 1
    if model.config.positions > positions:
        raise ValueError(
            f"data.length is {model.config.positions}; model.start is {str(folder.path)!r}, which has {positions} "
            f"positions, so up to {positions} are allowed"
        )
    # The tied matrix and bias may be there twice; older versions also wrote the positions' numbers and a pooler.
    besides = rf"{TYPES}|lm_head\.decoder\.(weight|bias)|.*\.position_ids|{BODY}\.pooler\..*"
    folder.fill(_pieces(model, Subnetwork.full(model.config.layers), stock.pad_token_id), besides)
    table = model.embedding.positions.weight.detach()
    table += folder.tensor(TYPES)[0].to(table)


def _pieces(model: Bert, subnetwork: Subnetwork, pad: int) -> dict[str, Piece]:
    """Every tensor of the stock model but tied ones and token types, by its name there."""
    positions = model.embedding.positions.weight
    named = {
        f"{BODY}.embeddings.word_embeddings.weight": whole(model.tokens.weight),
        f"{BODY}.embeddings.position_embeddings.weight": Piece(positions, tuple(positions.shape), skip=pad + 1),
        **_pair(f"{BODY}.embeddings.LayerNorm", model.embedding.norm),
        **_pair(f"{BODY}.LayerNorm", model.head.final_norm),
        **_pair("lm_head.dense", model.head.dense),
        **_pair("lm_head.layer_norm", model.head.norm),
        "lm_head.bias": whole(model.head_bias),
    }
    for place, layer in enumerate(subnetwork.kept):
        block = model.blocks[layer]
        assert isinstance(block, Block)
        named |= _layer(f"{BODY}.encoder.layer.{place}", block, folded(subnetwork, layer, model.config))
    return named


def _layer(name: str, block: Block, scales: Folded) -> dict[str, Piece]:
    """The tensors of one layer, with the scales of its norms and of its branches folded into them."""
    weights = split(block.qkv.weight.detach(), block.layout["qkv.weight"])
    biases = split(block.qkv.bias.detach(), block.layout["qkv.bias"])
    named = {
        **_pair(f"{name}.attention.LayerNorm", block.attention_norm, scales.norm, scales.norm),
        **_pair(f"{name}.attention.output.dense", block.attention_out, scales.attention, scales.bias),
        **_pair(f"{name}.intermediate.LayerNorm", block.mlp_norm, scales.norm, scales.norm),
        **_pair(f"{name}.intermediate.dense", block.mlp_in),
        **_pair(f"{name}.output.dense", block.mlp_out, scales.mlp, scales.bias),
    }
    for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        named[f"{name}.attention.self.{part}.weight"] = whole(weight)
        named[f"{name}.attention.self.{part}.bias"] = whole(bias)
    return named


def _pair(name: str, module: nn.Linear | nn.LayerNorm, weight: float = 1.0, bias: float = 1.0) -> dict[str, Piece]:
    """A module's weight and bias, each times its scale."""
    return {f"{name}.weight": whole(module.weight, weight), f"{name}.bias": whole(module.bias, bias)}


EXPORTER = Exporter(
    stock=STOCK.__name__,
    convert=to_transformers,
    tokenizer=stock_tokenizer,
    dimensions=dimensions,
    load=from_transformers,
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
