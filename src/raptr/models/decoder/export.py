"""A trained decoder as a stock `LlamaForCausalLM` and a stock tokenizer.

The network is the same; only what is fused here is apart there, and a query head r of group g is number g·R + r there.
Scales of the branches are folded into the output projections, which is exact; a scale of the whole layer cannot be.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from raptr.data.tokenizer import Vocabulary, load, read_vocabulary
from raptr.models.decoder.config import DecoderConfig
from raptr.models.decoder.model import EPSILON, Block, Decoder
from raptr.models.export import Exporter, check
from raptr.models.inputs import folded
from raptr.models.layout import split
from raptr.subnetworks import Subnetwork


def to_transformers(model: Decoder, subnetwork: Subnetwork, vocabulary: Vocabulary) -> LlamaForCausalLM:
    """The layers that run in this subnetwork as a stock model on the CPU, in evaluation mode."""
    check(model.config, subnetwork, vocabulary)
    # The stock class draws initial weights from the global generator, which is the caller's.
    with torch.random.fork_rng(devices=[]):
        exported = LlamaForCausalLM(_configuration(model.config, subnetwork.size, vocabulary))
    exported.load_state_dict(_weights(model, subnetwork))
    exported.train(False)
    return exported


def stock_tokenizer(file: Path, positions: int) -> PreTrainedTokenizerFast:
    """The tokenizer in a `tokenizer.json`, as `transformers` has it, for sequences of up to `positions` tokens.

    Texts get the same ids as in training: nothing is put before or behind them. Documents begin after an end token, so
    that is also the token with which generation from nothing begins.
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
    """The stock model's dimensions."""
    end, padded = vocabulary["[EOS]"], "[PAD]" in vocabulary
    return LlamaConfig(
        architectures=[LlamaForCausalLM.__name__],
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        intermediate_size=config.mlp,
        num_hidden_layers=layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.groups,
        head_dim=config.head_size,
        max_position_embeddings=config.positions,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        tie_word_embeddings=config.tied,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=vocabulary["[PAD]"] if padded else end,
    )


def _weights(model: Decoder, subnetwork: Subnetwork) -> dict[str, Tensor]:
    """Every tensor of the stock model, by its name there."""
    named = {
        "model.embed_tokens.weight": model.tokens.weight.detach(),
        "model.norm.weight": model.head.norm.weight.detach(),
        "lm_head.weight": model.output_VD.detach(),
    }
    for place, layer in enumerate(subnetwork.kept):
        block = model.blocks[layer]
        assert isinstance(block, Block)
        parts = _layer(block, *folded(subnetwork, layer))
        named |= {f"model.layers.{place}.{name}.weight": tensor for name, tensor in parts.items()}
    return named


def _layer(block: Block, attention_scale: float, mlp_scale: float) -> dict[str, Tensor]:
    """The tensors of one layer, the scales of its branches folded into their last projections."""
    cuts, groups = block.layout, block.heads
    *queries, key, value = split(block.qkv.weight.detach(), cuts["qkv.weight"])
    outputs = split(block.attention_out.weight.detach(), cuts["attention_out.weight"])
    gate, up = split(block.mlp_in.weight.detach(), cuts["mlp_in.weight"])
    query_GRKD = torch.stack([one.view(groups, block.head_size, -1) for one in queries], 1)
    output_DGRK = torch.stack([one.view(-1, groups, block.head_size) for one in outputs], 2)
    return {
        "input_layernorm": block.attention_norm.weight.detach(),
        "self_attn.q_proj": query_GRKD.flatten(0, 2),
        "self_attn.k_proj": key,
        "self_attn.v_proj": value,
        "self_attn.o_proj": output_DGRK.flatten(1) * attention_scale,
        "post_attention_layernorm": block.mlp_norm.weight.detach(),
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": block.mlp_out.weight.detach() * mlp_scale,
    }


EXPORTER = Exporter(
    convert=to_transformers,
    tokenizer=stock_tokenizer,
    task="text-generation",
    tags=("raptr", "llama"),
    says="A decoder of Llama's kind, trained by raptr to go on with a text.",
    example="""from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

folder = "."
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
print(pipeline("text-generation", model=model, tokenizer=tokenizer)("import os\\n", max_new_tokens=40))""",
)
