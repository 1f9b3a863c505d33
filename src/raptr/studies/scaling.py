"""What square-root scaling keeps equal at initialization (the paper's appendix "Scaling" and its proofs).

The theorem: in a stack of pre-layernorm layers whose updates are multiplied by scalars α, after any number of layers

    ‖y^(ℓ)‖² = ‖x‖² + Θ(d·Σ α_j²),   since one layer adds between d and 2d to the squared norm of any token.

The first part measures this in the paper's own setting, of `scaling_stack`. The second measures, in a BERT of this
project, the norms that the layers of RaPTr's parts get in relation to those that they get in the full model, for three
scalings and the values of `model.init`, of which `paper` is the theorem's. Under all of these the BERT has what the
theorem leaves out: GELU, several heads, scores divided by the root of a head's size.

Choices. The BERT's tokens are drawn uniformly from a small vocabulary. Norms are root mean squares over tokens, so
that their squares add up as in the theorem.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from raptr.data.batch import Batch
from raptr.hashing import bits
from raptr.methods import make_method
from raptr.models.contract import Init
from raptr.models.model import Model
from raptr.models.registry import FAMILIES
from raptr.report.plots import COLOURS, GREY, INK, MARKERS, clean
from raptr.studies.contract import Study, run_jobs
from raptr.studies.linear import exponent, interval
from raptr.studies.scaling_stack import CASES, QUANTITIES, mlp_spread, squared, stacks
from raptr.subnetworks import Subnetwork
from raptr.subnetworks.scaling import square_root

INITS: tuple[Init, ...] = get_args(Init)
SCALINGS = ("none", "sqrt", "linear")


@dataclass(frozen=True)
class Setting:
    """The sizes of both parts."""

    hidden: tuple[int, ...] = (64, 256, 1024, 4096)  # widths m of an MLP of the first width
    widths: tuple[int, ...] = (64, 256, 1024)
    depth: int = 24
    tokens: int = 64
    size: str = "mini"
    sizes: tuple[int, ...] = (6, 8, 10)  # of the parts, in layers
    draws: int = 20  # of parts of one size, with each seed
    batch: int = 2
    vocabulary: int = 1024
    cases: Mapping[str, Any] = field(default_factory=lambda: {name: asdict(case) for name, case in CASES.items()})


def started(setting: Setting, init: Init, seed: int) -> Model:
    """The project's BERT with its initial weights: the same normal numbers times other deviations."""
    config = FAMILIES["bert"].sizes[setting.size]
    return replace(config, vocabulary=setting.vocabulary, init=init).build(seed).eval()


def norms(model: Model, batch: Batch, subnetwork: Subnetwork) -> list[float]:
    """The norm of what each running layer gets, and last of what the last one gives."""
    states: list[Tensor] = []

    def noted(layer: int) -> Callable[..., Tensor]:
        def call(x_BSD: Tensor, *others: Any) -> Tensor:
            states.append(x_BSD)
            y_BSD: Tensor = model.blocks[layer](x_BSD, *others)
            return y_BSD

        return call

    with torch.no_grad():
        states.append(model.hidden(batch, model.inputs(subnetwork), [noted(layer) for layer in subnetwork.kept]))
    return [squared(state_BSD).mean().sqrt().item() for state_BSD in states]


def in_model(setting: Setting, init: Init, seed: int, device: str) -> dict[str, Any]:
    """The full model's norms, and what the layers of its parts get in relation to them."""
    model = started(setting, init, seed).to(device)
    places = range(setting.batch * setting.tokens)
    tokens = torch.tensor([bits(seed, "data", place) % setting.vocabulary for place in places], device=device)
    batch = Batch(tokens.view(setting.batch, -1), None, tokens.view(setting.batch, -1))
    shape = model.config.shape
    full = norms(model, batch, Subnetwork.full(shape.layers))
    found: dict[str, Any] = {
        "norms": full,
        "added": [(after**2 - before**2) / model.config.width for before, after in pairwise(full)],
        "exponent": exponent(range(1, shape.layers + 1), full[1:]),
        "parts": {},
    }
    for size, scaling in product(setting.sizes, SCALINGS):
        method = make_method("raptr", shape=shape, steps=1000, seed=0, scaling=scaling)
        ratios: list[list[float]] = [[] for _ in range(shape.layers)]
        ends = []
        for draw in range(seed * setting.draws, (seed + 1) * setting.draws):
            part = method.drawn(size, draw, 0)
            *given, end = norms(model, batch, part)
            ends.append(end)
            for layer, norm in zip(part.kept, given, strict=True):
                ratios[layer].append(norm / full[layer])
        after_first = [ratio for layer in ratios[1:] for ratio in layer]
        found["parts"][f"{size} {scaling}"] = {
            "given": [float(np.mean(layer)) if layer else None for layer in ratios],
            "mean": float(np.mean(after_first)),
            "off": float(np.mean(np.abs(np.array(after_first) - 1))),
            "end": float(np.mean(ends)) / full[-1],
            "end_norm": float(np.mean(ends)),
        }
    return found


def condition(layers: int, size: int, fixed: Sequence[int]) -> dict[str, Any]:
    """How often h_sqrt's condition holds, over all parts of a size that hold the fixed layers (counted from 1).

    As written: Σ_{i≤j} ζ_i² = j at every j. Below kept layers: Σ_{i<j} ζ_i² = j - 1 at every kept j.
    """
    free = [layer for layer in range(1, layers + 1) if layer not in fixed]
    written, below = [], []
    for chosen in combinations(free, size - len(fixed)):
        kept = [layer in fixed or layer in chosen for layer in range(1, layers + 1)]
        sums = [round(float(total)) for total in np.cumsum(np.square(square_root(kept)))]
        written += [total == place for place, total in enumerate(sums, 1)]
        below += [before == place for place, before in enumerate([0, *sums[:-1]]) if kept[place]]
    return {"size": size, "fixed": list(fixed), "written": float(np.mean(written)), "below": float(np.mean(below))}


def run(folder: Path, *, seeds: int, small: bool, device: str, console: Console) -> dict[str, Any]:
    """All stacks and models of all seeds, then means with intervals over seeds."""
    cut: dict[str, Any] = {
        "widths": (64,),
        "depth": 6,
        "tokens": 32,
        "size": "tiny",
        "sizes": (3, 4, 5),
        "draws": 5,
        "hidden": (64, 256),
    }
    setting = Setting(**cut) if small else Setting()

    def compute(key: str) -> dict[str, Any]:
        kind, seed = key.rsplit("-", 1)
        if kind == "mlp":
            return {str(hidden): mlp_spread(setting.widths[0], hidden, int(seed), device) for hidden in setting.hidden}
        if kind in INITS:
            return in_model(setting, kind, int(seed), device)
        return stacks(int(kind), setting.depth, setting.tokens, int(seed), device)

    keys = [f"{kind}-{seed}" for kind in ("mlp", *map(str, setting.widths), *INITS) for seed in range(seeds)]
    found = run_jobs(folder, asdict(setting), keys, compute, console, "square-root scaling")
    layers = FAMILIES["bert"].sizes[setting.size].layers
    return {
        "setting": asdict(setting),
        "theorem": [
            {"width": width, "case": name, **_stack([found[f"{width}-{seed}"][name] for seed in range(seeds)])}
            for width, name in product(setting.widths, CASES)
        ],
        "mlp": {
            str(hidden): interval([found[f"mlp-{seed}"][str(hidden)] for seed in range(seeds)])
            for hidden in setting.hidden
        },
        "models": {init: _model([found[f"{init}-{seed}"] for seed in range(seeds)]) for init in INITS},
        "condition": [
            condition(layers, size, fixed) for fixed in ((1, layers), ()) for size in (*setting.sizes, layers)
        ],
    }


def _stack(of_seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a case: intervals of means over tokens and layers; extremes over all tokens, layers and seeds."""
    curve = np.array([one["added"] for one in of_seeds])  # seeds, layers, (mean, least, largest)
    alone = {key: np.array([[layer[key] for layer in one["layers"]] for one in of_seeds]) for key in QUANTITIES}
    attention = alone["attention"][:, :, 0]
    return {
        "added": curve[:, :, 0].mean(axis=0).tolist(),
        "added_least": curve[:, :, 1].min(axis=0).tolist(),
        "added_largest": curve[:, :, 2].max(axis=0).tolist(),
        "last": interval(curve[:, -1, 0].tolist()),
        "alike": interval([one["alike"][-1] for one in of_seeds]),
        **{key: _spread(values) for key, values in alone.items()},
        "attention_first": interval(attention[:, 0].tolist()),
        "attention_last": interval(attention[:, -1].tolist()),
        "falls": interval([float(np.mean([layer["falls"] for layer in one["layers"]])) for one in of_seeds]),
    }


def _spread(values: NDArray[np.floating]) -> dict[str, float | None]:
    """An interval of the means of seeds, and the extremes."""
    means = values[:, :, 0].mean(axis=1).tolist()
    return {**interval(means), "least": float(values[:, :, 1].min()), "largest": float(values[:, :, 2].max())}


def _model(of_seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of an initialization: means for the figure, and intervals over seeds."""
    described = {}
    for name in of_seeds[0]["parts"]:
        entries = [one["parts"][name] for one in of_seeds]
        # A layer that no draw of a seed kept has no ratio there.
        by_layer = [
            [ratio for ratio in layer if ratio is not None]
            for layer in zip(*(e["given"] for e in entries), strict=True)
        ]
        described[name] = {
            "given": [float(np.mean(layer)) if layer else None for layer in by_layer],
            **{key: interval([entry[key] for entry in entries]) for key in ("mean", "off", "end", "end_norm")},
        }
    return {
        "norms": np.mean([one["norms"] for one in of_seeds], axis=0).tolist(),
        "added": np.mean([one["added"] for one in of_seeds], axis=0).tolist(),
        "layer": interval([float(np.mean(one["added"])) for one in of_seeds]),
        "entered": interval([one["norms"][0] for one in of_seeds]),
        "left": interval([one["norms"][-1] for one in of_seeds]),
        "exponent": interval([one["exponent"] for one in of_seeds]),
        "parts": described,
    }


def plot(result: dict[str, Any]) -> Figure:
    """The theorem above; norms of the model, and of what layers of its parts get, below."""
    figure = Figure(figsize=(12, 7.4), layout="constrained", facecolor="white")
    (cases, extremes, readings), (grown, paper, others) = figure.subplots(2, 3)
    setting, models = result["setting"], result["models"]
    widths, places = setting["widths"], range(1, setting["depth"] + 1)
    of = {(stack["width"], stack["case"]): stack for stack in result["theorem"]}
    for index, name in enumerate(list(CASES)[:5]):
        added = of[widths[-1], name]["added"]
        cases.plot(places, added, color=COLOURS[index], marker=MARKERS[index], markersize=3.5, label=name)
    for index, width in enumerate(widths):
        stack, style = of[width, "all one"], {"color": COLOURS[index], "linewidth": 1.4}
        extremes.plot(places, stack["added_least"], label=f"d = {width}", **style)
        extremes.plot(places, stack["added_largest"], **style)
    for axes in (cases, extremes):
        for bound in (1, 2):
            axes.axhline(bound, color=GREY, linewidth=1, linestyle="--")
    for index, name in enumerate(("all one", "read as variances")):
        measured = [of[width, name]["mlp"]["mean"] for width in widths]
        label = "read as deviations" if name == "all one" else name
        readings.plot(widths, measured, color=COLOURS[index], marker=MARKERS[index], label=label)
    readings.axhline(1, color=GREY, linewidth=1, linestyle="--", label="the lemma: 1")
    readings.set_xscale("log", base=2)
    readings.set_yscale("log")
    readings.set_xticks(widths, [f"{width}" for width in widths])
    readings.yaxis.set_major_formatter("{x:g}")
    for index, (init, model) in enumerate(models.items()):
        look = {"color": COLOURS[index], "marker": MARKERS[index], "markersize": 4, "label": init}
        grown.plot(range(len(model["norms"])), model["norms"], **look)
    size, layers = setting["sizes"][0], len(models["paper"]["norms"]) - 1
    for axes, inits in ((paper, ("paper",)), (others, ("bert", "fan-in"))):
        for init, (index, scaling) in product(inits, enumerate(SCALINGS)):
            one = models[init]["parts"][f"{size} {scaling}"]
            ratios = [ratio if ratio is not None else math.nan for ratio in (*one["given"], one["end"]["mean"])]
            look = {"color": COLOURS[index], "marker": MARKERS[index], "markersize": 4}
            shown = scaling if init != "fan-in" else None  # one entry of the legend for both
            axes.plot(range(1, layers + 2), ratios, linestyle=":" if init == "fan-in" else "-", label=shown, **look)
        axes.axhline(1, color=GREY, linewidth=1, linestyle="--")
    others.sharey(paper)
    grown.set_ylim(0)
    titles = {
        cases: (f"Added to ‖x‖², in d·Σα² (d = {widths[-1]})", "layer"),
        extremes: ("The same, least and largest of all tokens (α = 1)", "layer"),
        readings: ("‖MLP's output‖ / ‖its input‖", "d"),
        grown: (f"BERT, {setting['size']}: norm after each layer", "layer (0: embeddings)"),
        paper: (f"Norm given to a layer, {size} of {layers} / full: paper", f"layer ({layers + 1}: the output)"),
        others: ("The same: bert (solid), fan-in (dotted)", f"layer ({layers + 1}: the output)"),
    }
    for axes, (title, below) in titles.items():
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        axes.set_xlabel(below, color=INK)
        clean(axes)
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure


SCALING = Study(name="scaling", run=run, plot=plot)
