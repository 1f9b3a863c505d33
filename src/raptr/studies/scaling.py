"""What square-root scaling keeps equal at initialization (the paper's appendix "Scaling" and its proofs).

The theorem: in a stack of pre-layernorm layers whose updates are multiplied by scalars α, after any number of layers

    ‖y^(ℓ)‖² = ‖x‖² + Θ(d·Σ α_j²),   since one layer adds between d and 2d to the squared norm of any token.

The first part measures this in the paper's own setting, that of `scaling_stack`. The second part compares, in a BERT of
this project, the norms of the layers' inputs in RaPTr's subnetworks with those in the full model, for three scalings
and all values of `model.init`, of which `paper` is the theorem's. Under all of these the BERT has what the theorem
leaves out: GELU, several heads, and scores divided by the root of the head size.

Choices: The BERT's tokens are drawn uniformly from a small vocabulary. Norms are root mean squares over tokens, so
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
    """The settings of both parts of the study."""

    hidden: tuple[int, ...] = (64, 256, 1024, 4096)  # hidden units m of MLPs of the first width
    widths: tuple[int, ...] = (64, 256, 1024)
    depth: int = 24
    tokens: int = 64
    size: str = "mini"
    sizes: tuple[int, ...] = (6, 8, 10)  # of the subnetworks, in layers
    draws: int = 20  # subnetworks of each size, for each seed
    batch: int = 2
    vocabulary: int = 1024
    cases: Mapping[str, Any] = field(default_factory=lambda: {name: asdict(case) for name, case in CASES.items()})


def started(setting: Setting, init: Init, seed: int) -> Model:
    """Return the project's BERT with its initial weights: the same normal numbers times the deviations of `init`."""
    config = FAMILIES["bert"].sizes[setting.size]
    return replace(config, vocabulary=setting.vocabulary, init=init).build(seed).eval()


def norms(model: Model, batch: Batch, subnetwork: Subnetwork) -> list[float]:
    """Return the norm of each running layer's input and, last, that of the final output."""
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
    """Measure the norms in the full model and, relative to them, those of the layers' inputs in its subnetworks."""
    model = started(setting, init, seed).to(device)
    places = range(setting.batch * setting.tokens)
    tokens = torch.tensor([bits(seed, "data", place) % setting.vocabulary for place in places], device=device)
    batch = Batch(tokens.view(setting.batch, -1), None, tokens.view(setting.batch, -1))
    shape = model.config.shape
    full = norms(model, batch, Subnetwork.full(shape.layers))
    result: dict[str, Any] = {
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
            subnetwork = method.drawn(size, draw, 0)
            *inputs, end = norms(model, batch, subnetwork)
            ends.append(end)
            for layer, norm in zip(subnetwork.kept, inputs, strict=True):
                ratios[layer].append(norm / full[layer])
        after_first = [ratio for layer in ratios[1:] for ratio in layer]
        result["parts"][f"{size} {scaling}"] = {
            "given": [float(np.mean(layer)) if layer else None for layer in ratios],
            "mean": float(np.mean(after_first)),
            "off": float(np.mean(np.abs(np.array(after_first) - 1))),
            "end": float(np.mean(ends)) / full[-1],
            "end_norm": float(np.mean(ends)),
        }
    return result


def condition(layers: int, size: int, fixed: Sequence[int]) -> dict[str, Any]:
    """Return how often h_sqrt's condition holds, over all subnetworks of a size with the fixed layers (counted from 1).

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
    """Compute all stacks and models for all seeds, then means with intervals over seeds."""
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
    done = run_jobs(folder, asdict(setting), keys, compute, console, "square-root scaling")
    layers = FAMILIES["bert"].sizes[setting.size].layers
    return {
        "setting": asdict(setting),
        "theorem": [
            {"width": width, "case": name, **_stack([done[f"{width}-{seed}"][name] for seed in range(seeds)])}
            for width, name in product(setting.widths, CASES)
        ],
        "mlp": {
            str(hidden): interval([done[f"mlp-{seed}"][str(hidden)] for seed in range(seeds)])
            for hidden in setting.hidden
        },
        "models": {init: _model([done[f"{init}-{seed}"] for seed in range(seeds)]) for init in INITS},
        "condition": [
            condition(layers, size, fixed) for fixed in ((1, layers), ()) for size in (*setting.sizes, layers)
        ],
    }


def _stack(of_seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Gather a case: intervals of means over tokens and layers; extremes over all tokens, layers and seeds."""
    curve = np.array([entry["added"] for entry in of_seeds])  # seeds, layers, (mean, least, largest)
    alone = {key: np.array([[layer[key] for layer in entry["layers"]] for entry in of_seeds]) for key in QUANTITIES}
    attention = alone["attention"][:, :, 0]
    return {
        "added": curve[:, :, 0].mean(axis=0).tolist(),
        "added_least": curve[:, :, 1].min(axis=0).tolist(),
        "added_largest": curve[:, :, 2].max(axis=0).tolist(),
        "last": interval(curve[:, -1, 0].tolist()),
        "alike": interval([entry["alike"][-1] for entry in of_seeds]),
        **{key: _spread(values) for key, values in alone.items()},
        "attention_first": interval(attention[:, 0].tolist()),
        "attention_last": interval(attention[:, -1].tolist()),
        "falls": interval([float(np.mean([layer["falls"] for layer in entry["layers"]])) for entry in of_seeds]),
    }


def _spread(values: NDArray[np.floating]) -> dict[str, float | None]:
    """Return an interval of the seeds' means, and the extremes."""
    means = values[:, :, 0].mean(axis=1).tolist()
    return {**interval(means), "least": float(values[:, :, 1].min()), "largest": float(values[:, :, 2].max())}


def _model(of_seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Gather an initialization: means for the figure, and intervals over seeds."""
    described = {}
    for name in of_seeds[0]["parts"]:
        entries = [entry["parts"][name] for entry in of_seeds]
        # A layer has no ratio for a seed of which no draw kept it.
        by_layer = [
            [ratio for ratio in layer if ratio is not None]
            for layer in zip(*(e["given"] for e in entries), strict=True)
        ]
        described[name] = {
            "given": [float(np.mean(layer)) if layer else None for layer in by_layer],
            **{key: interval([entry[key] for entry in entries]) for key in ("mean", "off", "end", "end_norm")},
        }
    return {
        "norms": np.mean([entry["norms"] for entry in of_seeds], axis=0).tolist(),
        "added": np.mean([entry["added"] for entry in of_seeds], axis=0).tolist(),
        "layer": interval([float(np.mean(entry["added"])) for entry in of_seeds]),
        "entered": interval([entry["norms"][0] for entry in of_seeds]),
        "left": interval([entry["norms"][-1] for entry in of_seeds]),
        "exponent": interval([entry["exponent"] for entry in of_seeds]),
        "parts": described,
    }


def plot(result: dict[str, Any]) -> Figure:
    """Draw the theorem above, and below the norms of the model and of the layers' inputs in its subnetworks."""
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
            numbers = models[init]["parts"][f"{size} {scaling}"]
            ratios = [ratio if ratio is not None else math.nan for ratio in (*numbers["given"], numbers["end"]["mean"])]
            look = {"color": COLOURS[index], "marker": MARKERS[index], "markersize": 4}
            shown = scaling if init != "fan-in" else None  # one legend entry for both
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
