"""Linear networks whose layers are dropped one at a time (the paper's section 5 and the appendix "Noise stability").

A layer is y + W·y/‖y‖ (residual and normalisation), y + W·y, W·y/‖y‖ or W·y; a dropped layer is the identity. Its
weights are W = √τ·A + √(1-τ)·G, with A shared by all layers and G drawn for each. Measured for every depth L:

    ‖y^(ℓ)‖      the norm after layer ℓ
    Ψ_ℓ          ‖F_-ℓ - F‖, where F is the network of depth L and F_-ℓ is F without layer ℓ
    gap          (1/L)·Σ Ψ_ℓ / ‖F‖, which bounds the loss gap between stages up to a constant (the paper's theorem)

Deviations and choices: G has entries N(0, 1/d), as in the appendix; the main text's N(0, d^-½), read as a variance,
gives no norm of √ℓ. The paper says of A only that its norm is at most 1. Here A is symmetric, with one eigenvalue of 1
and the others evenly spaced from -(1-δ) to 1-δ, δ = 0.1 (the lemma on aligned layers assumes such a gap); a Gaussian
matrix of norm 1 and a projection onto one direction are measured too. A layer's weights depend only on the seed and its
place, so each network is the beginning of the deeper ones, and one pass over copies that each lack one layer gives all
depths. The text bounds a loss by the gap and the loss's Lipschitz constant; this step is not simulated.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import linear_regression
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from raptr.models.init import normal
from raptr.report.plots import GREY, INK, clean
from raptr.report.statistics import mean
from raptr.studies.contract import Study, run_jobs

COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#000000")
CLAIMED = -0.4  # the gap's exponent for every τ, according to the paper's text
DELTAS = (0.1, 0.5, 1.0)  # gaps between A's first and next eigenvalue at which alignment is measured
EARLY = 4  # the layer, from 1, whose Ψ is measured at every depth


@dataclass(frozen=True)
class Architecture:
    """What surrounds the matrix of a layer."""

    residual: bool
    norm: bool


ARCHITECTURES = {
    "residual + norm": Architecture(residual=True, norm=True),
    "residual": Architecture(residual=True, norm=False),
    "norm": Architecture(residual=False, norm=True),
    "neither": Architecture(residual=False, norm=False),
}


@dataclass(frozen=True)
class Setting:
    """The settings of the study; `inputs` has one number of inputs for each width."""

    depth: int = 128
    widths: tuple[int, ...] = (100, 400)
    inputs: tuple[int, ...] = (100, 10)
    taus: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    shared: tuple[str, ...] = ("spread", "gaussian", "one direction")
    delta: float = 0.1
    alignment_depth: int = 1024

    @property
    def depths(self) -> list[int]:
        """The depths that are measured: from 4 on, two per octave."""
        steps = round(2 * math.log2(self.depth / 4))
        return [round(4 * 2 ** (step / 2)) for step in range(steps + 1)]


@dataclass(frozen=True)
class Profile:
    """Means over inputs: norms after each layer, Ψ by depth and dropped layer, gap by depth."""

    norms_L: list[float]
    psi_LL: list[list[float]]
    gap_L: list[float]


def apply(y: Tensor, weight_DD: Tensor, architecture: Architecture) -> Tensor:
    """Apply one layer to any number of inputs (..., D)."""
    x = y / y.norm(dim=-1, keepdim=True) if architecture.norm else y
    z = x @ weight_DD.T
    return y + z if architecture.residual else z


def profile(layers: Iterator[Tensor], inputs_ND: Tensor, architecture: Architecture) -> Profile:
    """Run the network and, beside it, every network that lacks one of the layers so far."""
    y_ND, copies_LND, result = inputs_ND, inputs_ND.new_empty(0, *inputs_ND.shape), Profile([], [], [])
    for weight_DD in layers:
        # The copy that lacks this layer is the network up to here.
        copies_LND = torch.cat([apply(copies_LND, weight_DD, architecture), y_ND.unsqueeze(0)])
        y_ND = apply(y_ND, weight_DD, architecture)
        norm_N = y_ND.norm(dim=-1)
        psi_LN = (copies_LND - y_ND).norm(dim=-1)
        result.norms_L.append(norm_N.mean().item())
        result.psi_LL.append(psi_LN.mean(dim=1).tolist())
        result.gap_L.append((psi_LN / norm_N).mean().item())
    return result


def gaussians(seed: int, width: int, count: int, device: str) -> Tensor:
    """Return the layers' random matrices with entries N(0, 1/d), (L, D, D)."""
    drawn = [normal(seed, f"linear.{width}.{layer}", width * width) for layer in range(count)]
    return _tensor(np.stack(drawn) / np.sqrt(width), device, count, width, width)


def unit_inputs(seed: int, width: int, count: int, device: str) -> Tensor:
    """Return directions drawn uniformly from the sphere, (N, D)."""
    drawn = normal(seed, f"linear.{width}.inputs", count * width)
    return torch.nn.functional.normalize(_tensor(drawn, device, count, width), dim=-1)


def shared_matrix(kind: str, seed: int, width: int, delta: float, device: str) -> Tensor:
    """Return the matrix A that the layers share, of spectral norm 1."""
    drawn = _tensor(normal(seed, f"linear.{width}.shared", width * width), device, width, width)
    if kind == "gaussian":
        return torch.div(drawn, torch.linalg.matrix_norm(drawn, 2))
    basis_DD, _ = torch.linalg.qr(drawn)
    values_D = drawn.new_zeros(width)
    if kind == "spread":
        values_D[1:] = torch.linspace(1 - delta, delta - 1, width - 1, dtype=drawn.dtype, device=device)
    else:
        assert kind == "one direction", kind
    values_D[0] = 1
    return torch.matmul(basis_DD * values_D, basis_DD.T)


def _tensor(drawn: NDArray[np.floating], device: str, *shape: int) -> Tensor:
    return torch.tensor(drawn, dtype=torch.float64, device=device).view(*shape)


def mixed(tau: float, shared_DD: Tensor, gaussians_LDD: Tensor) -> Iterator[Tensor]:
    """Yield the layers' weights √τ·A + √(1-τ)·G."""
    for gaussian_DD in gaussians_LDD:
        yield math.sqrt(tau) * shared_DD + math.sqrt(1 - tau) * gaussian_DD


def wide_psi(depth: int) -> list[float]:
    """Return Ψ_ℓ of random layers with residual and normalisation at infinite width, where ‖F‖ = √(L+1).

    There ‖y^(m)‖² = m + 1, and one less for the copy without layer ℓ. Their inner product c is ℓ at layer ℓ and grows
    by the factor 1 + 1/√(m·(m-1)) in each later layer m; Ψ_ℓ² = (L + 1) + L - 2c.
    """
    factors = [1 + 1 / math.sqrt(m * (m - 1)) for m in range(depth, 1, -1)]
    later = np.cumprod([1.0, *factors])[::-1]
    psi: list[float] = np.sqrt(2 * depth + 1 - 2 * np.arange(1, depth + 1) * later).tolist()
    return psi


def wide_gap(depth: int) -> float:
    """Return the gap of random layers with residual and normalisation at infinite width."""
    return sum(wide_psi(depth)) / depth / math.sqrt(depth + 1)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the power of x that y follows: the least-squares slope of log y on log x."""
    return slope(np.log(x).tolist(), np.log(y).tolist())


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the least-squares slope of y on x."""
    return linear_regression(x, y).slope


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean and its 95% interval by Student's t distribution (None for a single value)."""
    estimate = mean(values)
    assert estimate is not None
    ends = [None if estimate.interval is None else estimate.mean + side * estimate.interval for side in (-1, 1)]
    return {"mean": estimate.mean, "low": ends[0], "high": ends[1]}


def alignment(setting: Setting, delta: float, seed: int, device: str) -> dict[str, float]:
    """Measure how fast layers that all equal A turn inputs towards its first eigenvector, and how norms grow.

    The tangent of the angle is measured up to a large depth; its exponent is fitted to the last three octaves.
    """
    width, depth = setting.widths[0], setting.alignment_depth
    shared_DD = shared_matrix("spread" if delta < 1 else "one direction", seed, width, delta, device)
    top_D = torch.linalg.eigh(shared_DD)[1][:, -1]
    y_ND = unit_inputs(seed, width, setting.inputs[0], device)
    tangents, norms = [], []
    for _ in range(depth):
        y_ND = apply(y_ND, shared_DD, ARCHITECTURES["residual + norm"])
        along_N = (y_ND @ top_D).abs()
        across_N = (y_ND - (y_ND @ top_D).unsqueeze(1) * top_D).norm(dim=-1)
        tangents.append((across_N / along_N).median().item())
        norms.append(y_ND.norm(dim=-1).mean().item())
    late = [depth // 8, depth // 4, depth // 2, depth]
    return {
        "tangent_exponent": exponent(late, [tangents[at - 1] for at in late]),
        "norm_exponent": exponent(late, [norms[at - 1] for at in late]),
        "last_tangent": tangents[-1],
    }


def cases(setting: Setting, width: int) -> list[tuple[str, str, float]]:
    """Return each (architecture, kind of A, τ) measured at a width; other kinds of A only at the first width."""
    (first, *others), (kind, *kinds) = ARCHITECTURES, setting.shared
    listed = [(first, kind, tau) for tau in setting.taus]
    # The lemmas are about random layers (τ = 0) and equal ones (τ = 1).
    listed += [(name, kind, tau) for name, tau in product(others, (setting.taus[0], setting.taus[-1]))]
    if width == setting.widths[0]:
        listed += [(first, other, tau) for other, tau in product(kinds, setting.taus[1:])]
    return listed


def run(folder: Path, *, seeds: int, small: bool, device: str, console: Console) -> dict[str, Any]:
    """Compute all profiles for all seeds, then their exponents with intervals over seeds."""
    setting = Setting(depth=32, widths=(100,), inputs=(20,), alignment_depth=256) if small else Setting()
    inputs = dict(zip(setting.widths, setting.inputs, strict=True))

    def compute(key: str) -> list[dict[str, Any]]:
        width, seed = map(int, key.split("-"))
        gaussians_LDD = gaussians(seed, width, setting.depth, device)
        inputs_ND = unit_inputs(seed, width, inputs[width], device)
        measured = []
        for name, kind, tau in cases(setting, width):
            shared_DD = shared_matrix(kind, seed, width, setting.delta, device)
            curves = profile(mixed(tau, shared_DD, gaussians_LDD), inputs_ND, ARCHITECTURES[name])
            measured.append(
                {
                    "norms": curves.norms_L,
                    "psi": curves.psi_LL[-1],
                    "early_psi": [row[EARLY - 1] for row in curves.psi_LL[EARLY - 1 :]],
                    "gap": [curves.gap_L[depth - 1] for depth in setting.depths],
                }
            )
        return measured

    keys = [f"{width}-{seed}" for width, seed in product(setting.widths, range(seeds))]
    finished = run_jobs(folder, asdict(setting), keys, compute, console, "linear networks")
    measured: list[dict[str, Any]] = []
    for width in setting.widths:
        for number, (name, kind, tau) in enumerate(cases(setting, width)):
            of_seeds = [finished[f"{width}-{seed}"][number] for seed in range(seeds)]
            case = {"width": width, "architecture": name, "shared": kind, "tau": tau}
            measured.append({**case, **_gather(setting, of_seeds, normed=ARCHITECTURES[name].norm)})
    alignments = {str(delta): [alignment(setting, delta, seed, device) for seed in range(seeds)] for delta in DELTAS}
    return {
        "setting": asdict(setting),
        "depths": setting.depths,
        "cases": measured,
        "alignment": {
            name: {key: interval([entry[key] for entry in entries]) for key in entries[0]}
            for name, entries in alignments.items()
        },
        "wide_limit": _wide_limit(setting.depths),
    }


def _wide_limit(depths: Sequence[int]) -> dict[str, Any]:
    """Return the noise-free exponents of random layers at infinite width, over the same depths and beyond."""
    gap, psi = [wide_gap(depth) for depth in depths], wide_psi(depths[-1])
    early = [depth for depth in depths if depth >= 2 * EARLY]
    beyond = [128 * 2**octave for octave in range(8)]
    return {
        "gap": gap,
        "psi": psi,
        "norm_growth": exponent(depths, [math.sqrt(depth + 1) for depth in depths]),
        "psi_by_depth": exponent(early, [wide_psi(depth)[EARLY - 1] for depth in early]),
        "psi_by_layer": exponent(depths, [psi[depth - 1] for depth in depths]),
        "gap_exponent": exponent(depths, gap),
        "late_gap_exponent": exponent(*_late(depths, gap)),
        "local_exponents": {str(depth): math.log2(wide_gap(2 * depth) / wide_gap(depth)) for depth in beyond},
    }


def _gather(setting: Setting, of_seeds: Sequence[Mapping[str, Any]], *, normed: bool) -> dict[str, Any]:
    """Return means over seeds for the figure, and exponents fitted seed by seed."""
    depths = setting.depths

    def fitted(fit: Callable[[Mapping[str, Any]], float]) -> dict[str, float | None]:
        return interval([fit(entry) for entry in of_seeds])

    def growth(at: Sequence[int], values: Sequence[float]) -> float:
        # Without normalisation norms grow exponentially, so this is a rate in doublings a layer instead of a power.
        return exponent(at, values) if normed else slope(at, np.log2(values).tolist())

    early = [depth for depth in depths if depth >= 2 * EARLY]
    return {
        "growth": "exponent" if normed else "doublings a layer",
        "norm_growth": fitted(lambda one: growth(depths, [one["norms"][depth - 1] for depth in depths])),
        "psi_by_depth": fitted(lambda one: growth(early, [one["early_psi"][depth - EARLY] for depth in early])),
        "psi_by_layer": fitted(lambda one: exponent(depths, [one["psi"][depth - 1] for depth in depths])),
        "gap_exponent": fitted(lambda one: exponent(depths, one["gap"])),
        "late_gap_exponent": fitted(lambda one: exponent(*_late(depths, one["gap"]))),
        "last_gap": fitted(lambda one: one["gap"][-1]),
        "psi_spread": fitted(lambda one: max(one["psi"]) / min(one["psi"])),
        **{key: np.mean([one[key] for one in of_seeds], axis=0).tolist() for key in ("norms", "psi", "gap")},
    }


def _late(depths: Sequence[int], values: Sequence[float]) -> tuple[Sequence[int], Sequence[float]]:
    """Return the last two octaves of depth and the values there."""
    first = next(index for index, depth in enumerate(depths) if 4 * depth >= depths[-1])
    return depths[first:], values[first:]


def plot(result: dict[str, Any]) -> Figure:
    """Draw norms, Ψ and the gap for every τ above; architectures and the gap's fitted exponents below."""
    figure = Figure(figsize=(12, 7.4), layout="constrained", facecolor="white")
    (norms, psi, gap), (kinds, gaps, fits) = figure.subplots(2, 3)
    setting, depths, limit = result["setting"], result["depths"], result["wide_limit"]
    width, depth, usual = setting["widths"][0], setting["depth"], setting["shared"][0]
    layers = range(1, depth + 1)
    cases_here = [case for case in result["cases"] if (case["width"], case["shared"]) == (width, usual)]
    mixtures = [case for case in cases_here if case["architecture"] == "residual + norm"]
    for case, colour in zip(mixtures, COLOURS, strict=False):
        line = {"color": colour, "linewidth": 1.6, "label": f"τ = {case['tau']:g}"}
        norms.plot(layers, case["norms"], **line)
        psi.plot(layers, case["psi"], **line)
        gap.plot(depths, case["gap"], marker="o", markersize=3.5, **line)
    dotted = {"color": INK, "linewidth": 1.0, "linestyle": (0, (1, 2)), "label": "random, d → ∞"}
    norms.plot(layers, [math.sqrt(layer + 1) for layer in layers], **dotted)
    psi.plot(layers, limit["psi"], **dotted)
    gap.plot(depths, limit["gap"], **dotted)
    claim = [1.25 * mixtures[0]["gap"][0] * (at / depths[0]) ** CLAIMED for at in depths]
    gap.plot(depths, claim, color=GREY, linewidth=1.0, linestyle="--", label="paper: L^−0.4")
    for case in cases_here:
        if case["tau"] in (0, 1):
            place = list(ARCHITECTURES).index(case["architecture"])
            style = {"color": COLOURS[(0, 4, 2, 3)[place]], "linestyle": "-" if case["tau"] == 0 else "--"}
            label = case["architecture"] if case["tau"] == 0 else None
            kinds.plot(layers, case["norms"], linewidth=1.6, label=label, **style)
            gaps.plot(depths, case["gap"], linewidth=1.6, label=label, marker="o", markersize=3.5, **style)
    _draw_fits(fits, result)
    for axes in (norms, psi, gap, kinds, gaps):
        axes.set_yscale("log", base=2 if axes in (norms, psi) else 10)
        if axes is not kinds:  # exponential growth is a straight line over a linear axis
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}" if axes is not kinds else "{x:.0e}")
    low, high = gap.get_ylim()
    two_decades = high > 100 * low  # over a smaller range, powers of ten alone are too few labels
    gap.yaxis.set_minor_formatter("" if two_decades else lambda at, _: f"{at:g}" if f"{at:e}"[0] in "25" else "")
    gap.tick_params(axis="y", which="minor", labelsize=9, labelcolor=INK)
    gaps.set_ylim(max(1e-3, gaps.dataLim.y0 / 8), 4)  # room for the legend
    titles = {
        norms: f"Norm after layer ℓ (residual + norm, d = {width})",
        psi: f"Ψ of layer ℓ, L = {depth} (residual + norm)",
        gap: "Gap: mean of Ψ/‖F‖ (residual + norm)",
        kinds: "Norm by architecture (solid: random, dashed: equal)",
        gaps: "Gap by architecture (solid: random, dashed: equal)",
        fits: f"Exponent of the gap, fitted over L = {depths[0]} to {depth}",
    }
    for axes, title in titles.items():
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        axes.set_xlabel({fits: "τ (0: random layers, 1: equal layers)"}.get(axes, "L" if axes in (gap, gaps) else "ℓ"))
        clean(axes)
        corner = {psi: "upper right", gap: "lower left", gaps: "lower left", fits: "lower left"}
        axes.legend(frameon=False, fontsize=7.5, labelcolor=INK, loc=corner.get(axes, "upper left"))
    return figure


def _draw_fits(axes: Axes, result: Mapping[str, Any]) -> None:
    """Draw the fitted exponents against τ, one line for each width and kind of A."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for case in result["cases"]:
        if case["architecture"] == "residual + norm":
            groups.setdefault(f"A {case['shared']}, d = {case['width']}", []).append(case)
    for place, (name, group) in enumerate(groups.items()):
        fits = [case["gap_exponent"] for case in group]
        taus, means = [case["tau"] for case in group], [fit["mean"] for fit in fits]
        errors = [[0 if fit["low"] is None else fit["mean"] - fit["low"] for fit in fits]] * 2
        # Other widths are open squares, since their points lie on those of the first width.
        again = group[0]["width"] != result["setting"]["widths"][0]
        look = {"marker": "s", "markersize": 8, "fillstyle": "none", "linestyle": "none"} if again else {"marker": "o"}
        axes.errorbar(taus, means, errors, color=COLOURS[(0, 2, 4, 6)[place % 4]], capsize=2, label=name, **look)
    axes.set_ylim(-1.42)
    for value, text in ((CLAIMED, "paper, every τ: −0.4"), (-0.5, "lemma, τ = 0: −½"), (-1, "lemma, τ = 1: −1")):
        axes.axhline(value, color=GREY, linewidth=0.9, linestyle="--")
        at, side = (1.03, "right") if value > -1 else (-0.03, "left")
        axes.text(at, value + 0.01, text, fontsize=7.5, color=GREY, horizontalalignment=side)


LINEAR = Study(name="linear", run=run, plot=plot)
