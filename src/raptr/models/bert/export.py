"""Export a trained BERT as a stock model and tokenizer of `transformers`, and load a stock model into a BERT.

The stock class is `RobertaPreLayerNormForMaskedLM`, the same network under other names, with two differences. It
counts positions from the padding id + 1, so its position table has that many extra rows in front. It adds a token type
embedding, which an export sets to zero for the only type. (`BertForMaskedLM` is a different, post-LN network: if it
loads an export, it finds none of its weights and starts with random ones.)

A subnetwork becomes a smaller stock model that has only the kept layers. Scales of the branches are folded into the
output projections, which is exact. A scale of the whole layer cannot be folded: in x + s·(layer(x) - x) the MLP sees
the unscaled attention output, in a stock layer it would see the scaled one.

An export contains no code and no pickle. The exported model treats every token with the padding id as padding,
wherever it occurs, as all stock models of this class do.
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
    """Return the layers that run in the subnetwork as a stock model on the CPU, in evaluation mode.

    Raise ValueError if no stock model can represent them.
    """
    if reason := model.config.unexportable():
        raise ValueError(reason)
    check(model.config, subnetwork, vocabulary)
    vocabulary.ordinary(SPECIALS)
    # The stock class draws initial weights from torch's global generator: restore the caller's state.
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
    """Return the tokenizer in a `tokenizer.json` as a `transformers` one, for sequences of up to `positions` tokens.

    Texts get the same ids as in training, with one difference: a special token spelled out in a text, such as
    [MASK], becomes that token.
    """
    tokenizer, vocabulary = load(file), read_vocabulary(file)
    vocabulary.ordinary(SPECIALS)
    pad, unknown, start, end, mask = (vocabulary.name(token) for token in SPECIALS.tokens)
    # A word's token includes the space before it, so a mask that replaces the word must absorb that space too.
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["lstrip"] = token["id"] == vocabulary["[MASK]"]
    changed = Tokenizer.from_str(json.dumps(description))
    # The model has only one token type, so the second text of a pair must not use another.
    changed.post_processor = TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:0 {end}:0",
        special_tokens=[(token, vocabulary.ids[token]) for token in (start, end)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=changed,
        model_max_length=positions,
        # Explicit, because by default some versions also pass token types to the model.
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
    """Return the stock model's configuration."""
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
    """Return the settings of `model` for a BERT of the stock model's dimensions.

    Raise ValueError if the stock model computes anything differently, or has no padding id.
    """
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
    """Load a stock model's weights into the BERT, adding the first token type's embedding to every position.

    Raise ValueError if the stock model has fewer positions than the BERT, or if its tensors do not match.
    """
    stock = RobertaPreLayerNormConfig.from_dict(dict(folder.facts))
    assert stock.pad_token_id is not None
    positions = stock.max_position_embeddings - stock.pad_token_id - 1
    if model.config.positions > positions:
        raise ValueError(
            f"data.length is {model.config.positions}; model.start is {str(folder.path)!r}, which has {positions} "
            f"positions, so up to {positions} are allowed"
        )
    # Files may hold the tied matrix and bias twice; older versions also saved position ids and a pooler.
    besides = rf"{TYPES}|lm_head\.decoder\.(weight|bias)|.*\.position_ids|{BODY}\.pooler\..*"
    folder.fill(_pieces(model, Subnetwork.full(model.config.layers), stock.pad_token_id), besides)
    table = model.embedding.positions.weight.detach()
    table += folder.tensor(TYPES)[0].to(table)


def _pieces(model: Bert, subnetwork: Subnetwork, pad: int) -> dict[str, Piece]:
    """Return the stock model's tensors by their names there, except tied ones and the token type embedding."""
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
    """Return the tensors of one layer by their stock names, with the scales of norms and branches folded in."""
    weights = split(block.qkv.weight.detach(), block.layout["qkv.weight"])
    biases = split(block.qkv.bias.detach(), block.layout["qkv.bias"])
    named = {
        **_pair(f"{name}.attention.LayerNorm", block.attention_norm, scales.norm, scales.norm),
        **_pair(f"{name}.attention.output.dense", block.attention_out, scales.attention, scales.bias),
        **_pair(f"{name}.intermediate.LayerNorm", block.mlp_norm, scales.norm, scales.norm),
        **_pair(f"{name}.intermediate.dense", block.mlp_in),
        **_pair(f"{name}.output.dense", block.mlp_out, scales.mlp, scales.bias),
    }
    for projection, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        named[f"{name}.attention.self.{projection}.weight"] = whole(weight)
        named[f"{name}.attention.self.{projection}.bias"] = whole(bias)
    return named


def _pair(name: str, module: nn.Linear | nn.LayerNorm, weight: float = 1.0, bias: float = 1.0) -> dict[str, Piece]:
    """Return a module's weight and bias, each multiplied by its scale in an export."""
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
