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

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, RobertaPreLayerNormConfig, RobertaPreLayerNormForMaskedLM
from transformers.utils import logging

from raptr.data.tokenizer import BERT, Vocabulary, load, read_vocabulary
from raptr.models.bert import EPSILON, Bert, Block
from raptr.models.sizes import BertConfig
from raptr.subnetworks import Subnetwork

STOCK = RobertaPreLayerNormForMaskedLM
BODY = "roberta_prelayernorm"


def to_transformers(model: Bert, subnetwork: Subnetwork, vocabulary: Vocabulary) -> RobertaPreLayerNormForMaskedLM:
    """The layers that run in this subnetwork as a stock model on the CPU, in evaluation mode."""
    _check(model.config, subnetwork, vocabulary)
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
    vocabulary.ordinary(BERT)
    pad, unknown, start, end, mask = (vocabulary.name(token) for token in BERT.tokens)
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


def save(model: RobertaPreLayerNormForMaskedLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the files that `from_pretrained` reads into a folder."""
    with _without_bars():
        model.save_pretrained(folder)
    # The weights come readable by their owner only, the other files as the system's habit is.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    tokenizer.save_pretrained(folder)
    # Newer versions write a name of the class that older ones do not know; this one they all know.
    file = folder / "tokenizer_config.json"
    facts = {**json.loads(file.read_text(encoding="utf-8")), "tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8", newline="\n")


def _check(config: BertConfig, subnetwork: Subnetwork, vocabulary: Vocabulary) -> None:
    """Refuse what no stock model can hold."""
    if config.heads * config.head_size != config.width:
        raise ValueError(
            f"model.head_size is {config.head_size} with {config.heads} heads and width {config.width}. "
            "In a stock model heads × head_size is the width, so this model cannot be exported."
        )
    if vocabulary.size != config.vocabulary:
        raise ValueError(
            f"the tokenizer has {vocabulary.size} tokens and the model {config.vocabulary}. "
            "Use the tokenizer that the model was trained with."
        )
    vocabulary.ordinary(BERT)
    if subnetwork.layers != config.layers:
        raise ValueError(f"the subnetwork is made for {subnetwork.layers} layers; the model has {config.layers}")
    for layer in subnetwork.kept:
        if subnetwork.scaled == "layer" and subnetwork.scales[layer] != 1:
            raise ValueError(
                f"layer {layer + 1} is scaled by {subnetwork.scales[layer]:.4g} as a whole. Only scales of its "
                "branches can be folded into a stock model's weights; a whole layer's scale must be 1 there."
            )
        for axis, kept, count in (
            ("heads", subnetwork.heads, config.heads),
            ("MLP parts", subnetwork.parts, config.parts),
        ):
            if kept is not None and len(kept[layer]) != count:
                raise ValueError(
                    f"layer {layer + 1} runs {len(kept[layer])} of {count} {axis}. "
                    "A stock model has whole layers, so all of them must run."
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
    words, positions = model.tokens.weight.detach(), model.positions.weight.detach()
    unused = positions.new_zeros(pad + 1, positions.shape[1])
    named = {
        f"{BODY}.embeddings.word_embeddings.weight": words,
        f"{BODY}.embeddings.position_embeddings.weight": torch.cat([unused, positions]),
        f"{BODY}.embeddings.token_type_embeddings.weight": torch.zeros_like(words[:1]),
        **_pair(f"{BODY}.embeddings.LayerNorm", model.embedding_norm),
        **_pair(f"{BODY}.LayerNorm", model.final_norm),
        **_pair("lm_head.dense", model.head_dense),
        **_pair("lm_head.layer_norm", model.head_norm),
        "lm_head.decoder.weight": words,
        "lm_head.decoder.bias": model.head_bias.detach(),
        "lm_head.bias": model.head_bias.detach(),
    }
    for place, layer in enumerate(subnetwork.kept):
        block = model.blocks[layer]
        assert isinstance(block, Block)
        branch = subnetwork.scales[layer] if subnetwork.scaled == "branches" else 1.0
        scales = branch * subnetwork.head_scale, branch * subnetwork.part_scale
        named |= _layer(f"{BODY}.encoder.layer.{place}", block, *scales)
    return named


def _layer(name: str, block: Block, attention_scale: float, mlp_scale: float) -> dict[str, Tensor]:
    """The tensors of one layer, the scales of its branches folded into their last projections."""
    weights, biases = block.qkv.weight.detach().chunk(3), block.qkv.bias.detach().chunk(3)
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


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of `transformers`."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
