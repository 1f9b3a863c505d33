"""Which model families of `transformers` can run subnetworks and grow, among those that can be built tiny.

    python -m benchmarks.families [FAMILY ...] [--out FILE.json]

Every family (a model type, in the first class that the automatic classes list for it) is built from its default
configuration with every dimension shrunk, with random weights and inputs. Then, for some choices of layers, it is
checked that

- the subnetwork's output and gradients equal those of a copy whose other layers were deleted from the list,
- scaling layers through `running` equals scaling them by a forward hook,
- where `attach` finds heads and MLP parts, the output and gradients with some of them equal those of a copy in which
  the output weights of the others are zero,
- a model of half of the layers, which takes a step and then grows inside the family's model, equals one whose upper
  layers hold copies of the lower ones' weights,
- afterwards the whole model gives the same output as before, bit for bit.

Each family runs in a process of its own, with a limit on time and memory; the sweep takes about 15 minutes on one core.
If families are named, only their lines in the record are replaced. docs/results/families.md is made from the record
(`make results`).
"""

import argparse
import copy
import inspect
import json
import multiprocessing
import re
import resource
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from raptr.integrations.steps import stepwise
from raptr.models.attach import attach, running
from raptr.subnetworks import Subnetwork
from raptr.train.run import environment

LAYERS, SECONDS, BYTES, PARAMETERS = 4, 60, 12 << 30, 40_000_000
BATCH, TOKENS, IMAGE, PATCH, WAVE = 2, 12, 32, 8, 4000
KINDS = {
    "SEQ_TO_SEQ_CAUSAL_LM": "text to text",
    "SPEECH_SEQ_2_SEQ": "speech to text",
    "MASKED_LM": "masked text",
    "CAUSAL_LM": "text",
    "IMAGE_CLASSIFICATION": "image",
    "VIDEO_CLASSIFICATION": "video",
    "CTC": "speech",
    "AUDIO_CLASSIFICATION": "audio",
    "IMAGE_TEXT_TO_TEXT": "image and text",
    "IMAGE": "image",
    "TEXT_ENCODING": "text",
}
# Which layers of each list run: choices that include the first layer, and choices that do not.
CHOICES: dict[str, tuple[tuple[int, ...], ...]] = {"first layer runs": ((0, 3), (0, 2)), "any": ((1, 3), (2,))}

# What integers in a configuration become, by patterns for their full name; the first match counts.
KEY_VALUE_HEADS, HEAD = r"(num_|n_)?(key_value|kv)_heads|.*num_key_value_heads", r"head_dim"
SIZES: dict[str, Any] = {
    r"(num|n)_?(hidden_|encoder_|decoder_|attention_|transformer_)*(layers?|blocks)|depth|n_layer|layers": LAYERS,
    r"(encoder|decoder|text|vision|audio|num_encoder|num_decoder)_(layers|depth)": LAYERS,
    r"num_(hidden_)?layers_.*|.*_num_(hidden_)?layers": LAYERS,
    r"mamba_n_heads|mamba_num_heads": 4,
    r"mamba_d_head|mamba_head_dim": 16,
    r"mamba_d_ssm": 64,
    KEY_VALUE_HEADS: 2,
    r"n_heads?|num_heads|.*attention_heads|.*_num_heads": 4,
    r"hidden_size_per_layer_input": 8,
    r"intra_bottleneck_size": 32,
    r"d_model|n_embd|dim|width|model_dim": 32,
    r".*(hidden_size|embedding_size|embed_dim|embedding_dim|hidden_dim|_d_model|projection_dim|emb_dim)": 32,
    r".*head_dim|d_kv|d_head|kv_channels|head_size": 8,
    r".*(intermediate_size|intermediate_dim|ffn_dim|d_ff|d_inner|n_inner|mlp_dim|ffn_hidden_size|ff_dim)": 64,
    r"(.*_)?vocab_size(_.*)?|.*vocabulary_size|num_embeddings": 120,
    r".*max_position_embeddings|n_positions|max_seq_len|max_sequence_length|max_.*_positions|n_ctx": 64,
    r"image_size|.*_image_size|img_size|input_size": IMAGE,
    r"patch_size|.*_patch_size": PATCH,
    r"(num|n)_(local_|routed_)?experts|moe_num_experts": 4,
    r".*(experts_per_tok(en)?|top_k|moe_topk|num_selected_experts)|moe_k": 2,
    r"(q|kv)_lora_rank": 16,
    r"rotary_dim": 8,
    r"(mamba_)?(d_state|state_size|ssm_state_size)": 8,
    r"n_groups|.*n_groups|n_group|topk_group": 1,
    r"num_mel_bins|.*num_mel_bins": 16,
    r"first_k_dense_replace|moe_layer_start_index": 1,
    r"sliding_window|attention_window|.*window_size|attention_chunk_size": 8,
    r".*token_id|.*token_index|.*_token_id_.*": 1,
}
# If these do not fit together, the following are tried in order; they also replace settings that are None.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {KEY_VALUE_HEADS: 4},
    {KEY_VALUE_HEADS: 4, HEAD: 8, r"vocab_size": 120, r"n_routed_experts": 4, r"num_experts_per_tok": 2},
    {KEY_VALUE_HEADS: 2, "mrope_section": [2, 1, 1]},
    {KEY_VALUE_HEADS: 4, HEAD: 64},
    {KEY_VALUE_HEADS: 2, HEAD: 128},
)
SWINS = ("swin", "swinv2", "donut-swin")
# Settings that depend on others in a way specific to the family.
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    **{name: {"embed_dim": 48, "window_size": 2, "image_size": 64, "patch_size": 4} for name in SWINS},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "esm": {"vocab_size": 120, "pad_token_id": 1, "mask_token_id": 2},
}


class NotTried(Exception):
    """A family that cannot be built or fed in this generic way."""


def families() -> dict[str, tuple[str, str]]:
    """Return, for each model type, its kind and the name of the first class listed for it."""
    classes: dict[str, tuple[str, str]] = {}
    for kind, words in KINDS.items():
        for family, name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").items():
            classes.setdefault(family, (words, name if isinstance(name, str) else name[0]))
    return dict(sorted(classes.items()))


def build(family: str, name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the family's tiny model and inputs on which it runs, or raise NotTried."""
    first: NotTried | None = None
    for variant in VARIANTS:
        try:
            model = make(family, name, variant)
            return model, fed(model)
        except NotTried as error:
            first = first or error
            if isinstance(error.__cause__, ImportError):
                break
    assert first is not None
    raise first


def make(family: str, name: str, variant: Mapping[str, Any]) -> nn.Module:
    """Return the family's model with a tiny configuration, and with weights large enough for mistakes to show."""
    try:
        model_class = getattr(transformers, name)
        config = shrunk(CONFIG_MAPPING[family](), variant)
        if not isinstance(config, model_class.config_class):
            parts = (part for part in vars(config).values() if isinstance(part, model_class.config_class))
            config = next(parts, config)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
        if size > PARAMETERS:
            raise NotTried(f"not built: the shrunk configuration still has {size / 1e6:.0f} million parameters")
        torch.manual_seed(0)
        model: nn.Module = model_class(config).train()
    except NotTried:
        raise
    except Exception as error:
        raise NotTried(f"not built: {_short(error)}") from error
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def shrunk(config: Any, variant: Mapping[str, Any]) -> Any:
    """Return the configuration with every dimension small, no dropout and no cache."""
    parts = {name: part for name, part in vars(config).items() if isinstance(part, transformers.PreTrainedConfig)}
    settings = {name: _small(name, value, variant) for name, value in config.to_dict().items() if name not in parts}
    settings = {name: value for name, value in settings.items() if value is not None}
    settings |= SPECIAL.get(config.model_type, {})
    return type(config)(**settings, **{name: shrunk(part, variant) for name, part in parts.items()})


def _small(name: str, value: Any, variant: Mapping[str, Any]) -> Any:
    forced = next((small for pattern, small in variant.items() if re.fullmatch(pattern, name)), None)
    if forced is not None:
        return forced
    if name == "use_cache":
        return False
    if isinstance(value, float) and re.search(r"drop|jitter|mask_(time|feature)_prob|noise", name):
        return 0.0
    if name == "rope_parameters" and "mrope_section" in {**(value or {}), **variant}:
        return {**(value or {}), "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    if type(value) is int:
        return next((small for pattern, small in SIZES.items() if re.fullmatch(pattern, name)), None)
    return None


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:140]}{'…' * (len(text) > 140)}"


def fed(model: nn.Module) -> dict[str, Tensor]:
    """Return the first of the possible inputs on which the model runs, or raise NotTried."""
    first: Exception | None = None
    for candidate in inputs(model):
        try:
            gradients(model, output_of(model, candidate))
            return candidate
        except Exception as error:
            first = first or error
    if first is None:
        asked = list(inspect.signature(model.forward).parameters)[:4]
        raise NotTried(f"no inputs made: the model asks for {', '.join(asked)}")
    raise NotTried(f"the tiny model does not run: {_short(first)}") from first


def inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield random inputs that the model's forward may ask for: its main input, alone and with another one."""
    config, asked = model.config, inspect.signature(model.forward).parameters
    torch.manual_seed(1)
    size = _setting(config, "image_size", IMAGE)
    image = (_setting(config, "num_channels", 3), *(size if isinstance(size, list | tuple) else (size, size)))
    frames, mel = _setting(config, "num_frames", 4), _setting(config, "num_mel_bins", 16)
    length = 2 * _setting(config, "max_source_positions", 32)
    pixels = [torch.randn(BATCH, *image), torch.randn(BATCH, frames, *image)]
    known: dict[str, list[Tensor]] = {
        "input_ids": [torch.randint(5, 100, (BATCH, TOKENS))],
        "pixel_values": pixels,
        "pixel_values_videos": pixels[1:],
        "input_features": [torch.randn(BATCH, length, mel), torch.randn(BATCH, mel, length)],
        "input_values": [
            torch.randn(BATCH, WAVE),
            torch.randn(BATCH, 1, WAVE),
            torch.randn(BATCH, _setting(config, "max_length", 1024), mel),
        ],
    }
    always = {"decoder_input_ids": torch.randint(5, 100, (BATCH, TOKENS - 2))} if "decoder_input_ids" in asked else {}
    main = model.main_input_name
    for value in known.get(main, []) if main in asked else []:
        yield {main: value, **always}
        for other in ("input_ids", "pixel_values", "input_values", "input_features"):
            if other in asked and other != main:
                for second in known[other]:
                    yield {main: value, other: second, **always}


def _setting(config: Any, name: str, default: Any) -> Any:
    """Return a setting of the configuration or of a part of it, else the default."""
    parts = [part for part in vars(config).values() if isinstance(part, transformers.PreTrainedConfig)]
    values = (getattr(part, name, None) for part in (config, *parts))
    return next((value for value in values if value is not None), default)


def output_of(model: nn.Module, given: Mapping[str, Tensor]) -> Tensor:
    """Return the model's logits or first output, computed with a fixed random seed."""
    torch.manual_seed(2)
    return next(_tensors(model(**given)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.ndim:
            yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=lambda key: "logits" not in key):
            yield from _tensors(value[key])
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a random projection of the output, for parameters that have one."""
    torch.manual_seed(3)
    model.zero_grad()
    torch.autograd.backward((output * torch.randn(output.shape)).sum())
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def smaller(model: nn.Module, paths: Sequence[str], kept: tuple[int, ...]) -> tuple[nn.Module, dict[str, str]]:
    """Return a copy without the other layers, and each parameter's name in the copy (empty if it was deleted)."""
    copied = copy.deepcopy(model)
    names = {name: name for name, _ in model.named_parameters()}
    for path in paths:
        blocks: Any = copied.get_submodule(path)
        parent, _, last = path.rpartition(".")
        entries = [blocks[layer] for layer in kept]
        less = nn.ModuleList(entries) if isinstance(blocks, nn.ModuleList) else nn.Sequential(*entries)
        setattr(copied.get_submodule(parent), last, less)
        for name in names:
            if match := re.match(rf"{re.escape(path)}\.(\d+)(\..*)", name):
                layer = int(match[1])
                names[name] = f"{path}.{kept.index(layer)}{match[2]}" if layer in kept else ""
    # Lists in the configuration say what each layer is, for example its kind of attention.
    for module in copied.modules():
        config = getattr(module, "config", None)
        if isinstance(config, transformers.PreTrainedConfig):
            for key, value in list(vars(config).items()):
                if isinstance(value, list | tuple) and len(value) == LAYERS:
                    setattr(config, key, [value[layer] for layer in kept])
                elif type(value) is int and value == LAYERS and "layer" in key:
                    setattr(config, key, len(kept))
    return copied, names


def scaled(model: nn.Module, paths: Sequence[str], scales: Sequence[float]) -> None:
    """Scale each block's update by a forward hook; a scale of 0 discards it."""

    def hook(scale: float) -> Callable[..., Any]:
        def change(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            x = args[0] if args else kwargs[next(iter(inspect.signature(block.forward).parameters))]
            first, *rest = (output,) if isinstance(output, Tensor) else output
            y = x + scale * (first - x) if scale else x
            return y if isinstance(output, Tensor) else type(output)((y, *rest))

        return change

    for path in paths:
        for block, scale in zip(model.get_submodule(path).children(), scales, strict=True):
            if scale != 1:
                block.register_forward_hook(hook(scale), with_kwargs=True)


def chains(model: nn.Module, given: Mapping[str, Tensor]) -> list[str]:
    """Return the outermost lists with LAYERS blocks in which blocks get what the block before returned."""
    lists = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) == LAYERS
        and not any(isinstance(block, nn.ModuleList) for block in module)
    ]
    lists = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    linked: dict[str, int] = dict.fromkeys(lists, 0)
    last: dict[str, Any] = {}

    def watch(path: str) -> Callable[..., None]:
        def note(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            linked[path] += any(value is last.get(path) for value in tensors)
            last[path] = output[0] if isinstance(output, list | tuple) else output

        return note

    hooks = [
        block.register_forward_hook(watch(path), with_kwargs=True)
        for path in lists
        for block in model.get_submodule(path).children()
    ]
    output_of(model, given)
    for hook in hooks:
        hook.remove()
    return [path for path in lists if linked[path] >= LAYERS // 2]


def check(model: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Any]:
    """Check a family's model and return its line of the record."""
    whole = output_of(model, given).detach().clone()
    if not bool(whole.isfinite().all()):
        raise NotTried("the tiny model's output is not finite")
    if not torch.equal(output_of(model, given), whole):
        raise NotTried("the tiny model gives another output with the same random numbers")
    linked = chains(model, given)
    row: dict[str, Any] = {"named": False}
    try:
        paths = [attach(model).path]
    except ValueError as error:
        if not linked:
            return {"result": "refused", "reason": str(error)}
        paths = []
    if linked and paths != linked and not set(paths) & set(linked):
        paths, row = linked, {"named": True}
    row["blocks"] = paths
    layers = [len(blocks.module) for blocks in attach(model, paths).lists]
    if set(layers) != {LAYERS}:
        # The list has one block for all layers, or its blocks are stages: neither should run a subnetwork.
        scales = [1.0] * LAYERS if sum(layers) == 1 else [1.0] + [0.0] * (sum(layers) - 1)
        outcome = run(model, paths, scales, given)
        strange = {
            "result": "not tried",
            "reason": f"the list has {sum(layers)} blocks where the model has {LAYERS} layers",
        }
        return row | (outcome if isinstance(outcome, dict) else strange)
    reached = ""
    for name, choices in CHOICES.items():
        for kept in choices:
            problem = compare(model, paths, kept, 1.0, given, whole)
            if problem is not None and problem["result"] == "refused" and reached:
                more = axes(model, paths, given) | growth(model, paths, given)
                return row | {"result": reached, "reason": problem["reason"]} | more
            if problem is not None:
                return row | problem
        reached = name
        problem = compare(model, paths, choices[0], 0.5, given, whole)
        row["scales"] = problem is None
        if problem is not None and problem["result"] != "refused":
            return row | problem
    return row | {"result": reached} | axes(model, paths, given) | growth(model, paths, given)


def growth(model: nn.Module, paths: Sequence[str], given: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return whether a model of half of the layers grows inside this one, or what is wrong with the grown model."""
    model, half = copy.deepcopy(model), LAYERS // 2
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2, momentum=0.9
    )
    schedule = f"{half}-{LAYERS}"  # of each list
    try:
        steps = stepwise(model, "progressive-stacking", steps=2, schedule=schedule, blocks=paths, optimizer=optimizer)
    except ValueError as error:
        return {"grows": False, "growth": str(error)}
    with warnings.catch_warnings():  # norms have noise here, as if they were trained
        warnings.filterwarnings("ignore", r"method progressive-stacking overwrites .* loaded or trained before")
        steps.begin(0)
    grads = gradients(model, output_of(model, given))
    steps.end()
    for name, parameter in model.named_parameters():
        parameter.grad = grads.get(name)
    optimizer.step()
    optimizer.zero_grad()
    reference = copy.deepcopy(model)
    for path in paths:
        blocks = list(reference.get_submodule(path).children())
        for upper, lower in zip(blocks[half:], blocks, strict=False):
            upper.load_state_dict(lower.state_dict(), strict=False)  # the first layer may differ, for example in a norm
    steps.begin(1)
    output = output_of(model, given)
    steps.end()
    if not torch.equal(output, output_of(reference, given)):
        return {"result": "wrong", "reason": "growth: another output than that of copied layers"}
    return {"grows": True}


def axes(model: nn.Module, paths: Sequence[str], given: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return whether some of the heads and MLP parts can run alone, or what is wrong when they do."""
    routed = attach(model, paths)
    if not routed.anatomies:
        return {"axes": False}
    shape = routed.shape
    scales = tuple(float(layer % LAYERS in (0, LAYERS - 1)) for layer in range(routed.layers))
    heads, parts = (tuple((layer % units,) for layer in range(routed.layers)) for units in (shape.heads, shape.parts))
    subnetwork = Subnetwork(scales, heads=heads, parts=parts, head_scale=1.5, part_scale=0.5)
    if shape.heads == 1:
        subnetwork = replace(subnetwork, heads=None, head_scale=1.0)
    try:
        with running(routed, subnetwork):
            output = output_of(model, given)
    except ValueError as error:
        if "only depth is available" not in str(error):
            raise
        return {"axes": False}
    grads, reference, factors = gradients(model, output), copy.deepcopy(model), {}
    names = [f"{blocks.path}.{name}" for blocks in routed.lists for name in blocks.entries()]
    for layer in subnetwork.kept:
        for path, cut in routed.anatomies[layer].layout.items():
            kept, scale = (
                (subnetwork.heads, subnetwork.head_scale)
                if cut.axis == "heads"
                else (subnetwork.parts, subnetwork.part_scale)
            )
            if cut.dim == 1 and kept is not None:
                units = routed.anatomies[layer].units(cut.axis)
                factor = torch.tensor([scale * (unit in kept[layer]) for unit in range(units)])
                weight = reference.get_submodule(f"{names[layer]}.{path}").get_parameter("weight")
                factors[f"{names[layer]}.{path}.weight"] = factor.repeat_interleave(weight.shape[1] // units)
                weight.data.mul_(factors[f"{names[layer]}.{path}.weight"])
    with running(attach(reference, paths), Subnetwork(scales)):
        expected = output_of(reference, given)
    wanted = gradients(reference, expected)
    if not _close(output, expected):
        return {"result": "wrong", "reason": "heads and MLP parts: another output than the smaller model's"}
    if grads.keys() != wanted.keys():
        return {"result": "wrong", "reason": "heads and MLP parts: gradients of other parameters"}
    # Some gradients, such as that of a bias of keys, are zero up to rounding, which depends on the shapes.
    least = 1e-3 * max(float(gradient.abs().max()) for gradient in wanted.values())
    if wrong := [name for name in grads if not _close(grads[name], wanted[name] * factors.get(name, 1.0), least)]:
        return {"result": "wrong", "reason": f"heads and MLP parts: another gradient of {wrong[0]}"}
    return {"axes": True}


def run(
    model: nn.Module, paths: Sequence[str], scales: Sequence[float], given: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]] | dict[str, str]:
    """Return a subnetwork's output and gradients, or why there are none."""
    try:
        with running(attach(model, paths), Subnetwork(tuple(scales))):
            output = output_of(model, given)
        return output, gradients(model, output)
    except Exception as error:
        if str(error).startswith("running:"):
            return {"result": "refused", "reason": str(error)}
        return {"result": "fails", "reason": _short(error)}


def compare(
    model: nn.Module,
    paths: Sequence[str],
    kept: tuple[int, ...],
    scale: float,
    given: Mapping[str, Tensor],
    whole: Tensor,
) -> dict[str, str] | None:
    """Return None if the subnetwork equals the smaller model, otherwise what happened."""
    scales = [scale * (layer in kept) for layer in range(LAYERS)]
    keys, choice = list(model.state_dict()), f"layers {[layer + 1 for layer in kept]}, scale {scale:g}"
    outcome = run(model, paths, scales * len(paths), given)
    if isinstance(outcome, dict):
        return outcome
    output, grads = outcome
    if list(model.state_dict()) != keys or not torch.equal(output_of(model, given), whole):
        return {"result": "wrong", "reason": f"{choice}: the whole model is not what it was"}
    # Some models index a layer's inputs by its place in the list. For these, the output of the other layers is
    # discarded instead of deleting them.
    small, names = smaller(model, paths, kept)
    scaled(small, paths, [scale] * len(kept))
    deleted = difference(output, grads, small, names, given, whole)
    if deleted is None:
        return None
    emptied = copy.deepcopy(model)
    scaled(emptied, paths, scales)
    emptied_too = difference(output, grads, emptied, {name: name for name in names}, given, whole)
    if emptied_too is None:
        return None
    return {"result": "wrong", "reason": f"{choice}: {deleted}; {emptied_too}"}


def difference(
    output: Tensor,
    grads: Mapping[str, Tensor],
    reference: nn.Module,
    names: Mapping[str, str],
    given: Mapping[str, Tensor],
    whole: Tensor,
) -> str | None:
    """Return how a subnetwork differs from a reference model, or None if it does not."""
    try:
        expected = output_of(reference, given)
        wanted = gradients(reference, expected)
    except Exception as error:
        return _short(error)
    if torch.equal(expected, whole):
        return "leaving out layers changes nothing"
    if not _close(output, expected):
        return "another output than the smaller model's"
    if odd := sorted({names[name] for name in grads} ^ wanted.keys()):
        return f"gradients of other parameters, such as {odd[0]}"
    wrong = [name for name, grad in grads.items() if not _close(grad, wanted[names[name]])]
    return f"another gradient of {wrong[0]}" if wrong else None


def _close(left: Tensor, right: Tensor, least: float = 1e-6) -> bool:
    if left.shape != right.shape:
        return False
    return left.numel() == 0 or bool((left - right).abs().max() <= 1e-4 * (right.abs().max() + least))


def line(family: str, name: str) -> dict[str, Any]:
    """Return the record of one family."""
    try:
        return check(*build(family, name))
    except NotTried as error:
        return {"result": "not tried", "reason": str(error)}


def _child(send: Connection, family: str, name: str) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    try:
        send.send(line(family, name))
    except Exception as error:
        send.send({"result": "not tried", "reason": f"the check fails: {_short(error)}"})


def apart(family: str, name: str) -> dict[str, Any]:
    """Run `line` in a process of its own, with limits on time and memory."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(send, family, name))
    child.start()
    send.close()
    record: dict[str, Any] = {"result": "not tried", "reason": f"not finished in {SECONDS} seconds"}
    try:
        if receive.poll(SECONDS):
            record = receive.recv()
    except EOFError:
        record = {"result": "not tried", "reason": "the process ended, for want of memory for example"}
    child.kill()
    child.join()
    return record


def main() -> None:
    """Sweep, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "families.json")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    before = json.loads(arguments.out.read_text("utf-8"))["families"] if arguments.families else []
    lines = {line["family"]: line for line in before}
    for family, (kind, name) in families().items():
        if not arguments.families or family in arguments.families:
            lines[family] = {"family": family, "class": name, "kind": kind, **apart(family, name)}
            print(json.dumps(lines[family]), flush=True)
    record = {
        "command": "python -m benchmarks.families",
        "environment": environment(),
        "families": list(lines.values()),
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
