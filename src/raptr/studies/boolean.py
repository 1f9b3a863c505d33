"""Study `boolean`: the paper's two-neuron theorem and its expressivity theorem, checked with exact gradients
(section 3, "Theoretical Analysis", and the appendix "RaPTr motivation with boolean data: Theory").

The three phases (bias only, RaPTr 1-2's one-layer stage, its full stage with the first layer frozen) are run as
the paper defines them, by gradient descent of step size η on the exact expectation over {±1}^d, in float64. This
project's RaPTr draws the layer of each step. Time is measured as η·t, which makes runs of different η comparable.

Deviations: p₀ is held fixed in phase 1 (the paper assumes that it stays) unless a variant says otherwise. d = 2
unless said otherwise: one part of the study shows that further inputs change nothing.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from raptr.report.plots import COLOURS, GREY, INK, MARKERS, clean
from raptr.report.statistics import student
from raptr.studies.boolean_dynamics import (
    AMPLITUDE,
    BIAS_TIME,
    BOTH,
    FIRST_ALONE,
    HALF,
    LIMIT1,
    LIMIT2,
    PHASE1_TIME,
    PHASE2_TIME,
    SECOND_ALONE,
    THIRD,
    WINDOW,
    Network,
    Trained,
    bias_after,
    curvature,
    descend,
    direction,
    features,
    flow,
    least_loss,
    leaving,
    limit,
    losses,
    output,
    same,
    stacked,
    steps_to_eta,
    target,
    theorem_run,
    two_stages,
)
from raptr.studies.contract import Study, mean_and_deviation, run_jobs

LONG_TIMES = (100, 200)
BIAS_TIMES = (2, 5, 10, 20, 30)
SMALLNESS = (1e-3, 1e-5, 1e-7, 1e-9, 1e-11)
TITLE: dict[str, Any] = {"loc": "left", "color": INK, "fontsize": 10.5, "fontweight": "bold"}


def slope(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Return the least-squares slope with its 95% interval (Student's t), and the intercept."""
    x_K, y_K = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    free = len(x_K) - 2
    spread = ((x_K - x_K.mean()) ** 2).sum()
    estimate, intercept = linear_regression(x, y)
    error = math.sqrt(float(((y_K - intercept - estimate * x_K) ** 2).sum()) / max(free, 1) / spread)
    reach = error * student(max(free, 1))
    return {"slope": estimate, "low": estimate - reach, "high": estimate + reach, "intercept": intercept}


def laws(eta: float, longest: float) -> dict[str, Any]:
    """Run phase 2 from the exact limit of phase 1: errors and loss over η·t, and their exponents from η·t = 10 on."""
    points = sorted({round(time / eta) for time in np.geomspace(1, longest, 61)} | {round(10 / eta)})
    _, seen, _ = descend(limit(), eta, points[-1], same(BOTH), Trained(second=True), at=points)
    errors = np.array([np.abs(seen[step].second_RP[0] - LIMIT2) for step in points])
    curves = {
        "w1": errors[:, 0].tolist(),
        "w2": errors[:, 1].tolist(),
        "b": errors[:, 2].tolist(),
        "loss": [float(losses(seen[step], features(2), same(BOTH))[0]) for step in points],
    }
    late = [index for index, step in enumerate(points) if step * eta >= 10]
    logs = [math.log(points[index] * eta) for index in late]
    at_10 = seen[round(10 / eta)].second_RP[0, 1]
    return {
        "eta": eta,
        "time": [step * eta for step in points],
        **curves,
        "slopes": {name: slope(logs, [math.log(values[i]) for i in late]) for name, values in curves.items()},
        "w2_from_flow": abs(float(at_10) - flow(round(10 / eta) * eta)),
    }


def saddle(etas: Sequence[float], seeds: int) -> dict[str, Any]:
    """Study phase 1's limit, which is a saddle.

    Return its Hessian, when descent leaves it, and how near descent comes after bias phases of several lengths.
    """
    phi = features(2)
    z, residual = phi @ np.array(LIMIT1), -(target(phi) - AMPLITUDE - AMPLITUDE * phi[:, 0])
    hessian = curvature(z, residual, phi)
    values, vectors = np.linalg.eigh(hessian)
    mixed = (phi.T @ np.cos(z) / len(phi))[:, None]  # the output's derivative in p₀ is 1
    with_bias = np.linalg.eigvalsh(np.block([[hessian, mixed], [mixed.T, np.ones((1, 1))]]))
    eta, every = etas[-1], 0.05
    by_seed: list[dict[str, Any]] = []
    for seed in range(seeds):
        push = direction(seed)
        starts = np.array([[*(np.array(LIMIT1) + size * push)] for size in SMALLNESS])
        times, _, _ = leaving(np.full((len(starts), 1), AMPLITUDE), starts, eta, 80, every)
        by_seed.append(
            {"towards": float(push @ vectors[:, 0]), "times": times, **slope(np.log(SMALLNESS).tolist(), times)}
        )
    biases = np.array([[bias_after(eta, round(time / eta))] for time in BIAS_TIMES])
    times, clock, curves = leaving(biases, np.zeros((len(biases), 3)), eta, 90, every)
    rounding = []
    for each in etas:
        bias = bias_after(each, round(BIAS_TIME / each))
        left, _, _ = leaving(np.array([[bias]]), np.zeros((1, 3)), each, 120, every)
        rounding.append({"eta": each, "bias_error": abs(bias - AMPLITUDE), "time": left[0]})
    return {
        "hessian": hessian.tolist(),
        "eigenvalues": values.tolist(),
        "eigenvalues_with_p0": with_bias.tolist(),
        "lowest_direction": vectors[:, 0].tolist(),
        "claimed": 0.25 - AMPLITUDE,
        "at_phase2_limit": float(np.abs(curvature(phi @ np.full(3, HALF), np.zeros(4), phi)).max()),
        "sizes": list(SMALLNESS),
        "eta": eta,
        "by_seed": by_seed,
        "slope": mean_and_deviation(row["slope"] for row in by_seed),
        "approach": {
            "bias_times": list(BIAS_TIMES),
            "left": times,
            "nearest": [min(curve) for curve in curves],
            "time": clock[::10],
            "curves": [curve[::10] for curve in curves],
            "slope": slope(BIAS_TIMES[1:], times[1:]),
        },
        "rounding": rounding,
    }


def after_escape(etas: Sequence[float], seeds: int, longest: float, eta: float = 0.1) -> dict[str, Any]:
    """Find where an escaped layer ends, where phase 2 stalls from there, and what the frozen layer would allow."""
    phi, full = features(2), same(BOTH)
    start = Network.start(1, 2, bias=AMPLITUDE, first=(THIRD, 1e-3, 1e-3))
    net, _, _ = descend(start, eta, round(300 / eta), same(FIRST_ALONE), Trained(first=True))
    end = net.first_RP[0]
    z, residual = phi @ end, output(net, phi, same(FIRST_ALONE))[0] - target(phi)
    signs = np.array([[1.0, sign, sign] for sign in (1, -1)])
    pairs = Network(
        np.full((4, 1), AMPLITUDE), np.repeat(end * signs, 2, axis=0), np.tile(end * signs, (2, 1))
    )  # each layer may have escaped to either side
    stalled, _, _ = descend(pairs, eta, round(longest / eta), full, Trained(second=True))
    y1 = AMPLITUDE + np.sin(phi @ end)
    z2, r2 = phi @ stalled.second_RP[0] + y1, output(stalled, phi, full)[0] - target(phi)
    free, _, _ = descend(pairs, eta, round(longest / eta), full, Trained(bias=True, first=True, second=True))
    best = least_loss(y1, y1, free_bias=False, tolerance=1e-3)
    chains = [(each, time, theorem_run(each, seeds, phase1_time=time)) for each in etas for time in LONG_TIMES]
    return {
        "end": end.tolist(),
        "one_layer_loss": float(losses(net, phi, same(FIRST_ALONE))[0]),
        "end_eigenvalues": np.linalg.eigvalsh(curvature(z, residual, phi)).tolist(),
        "stall": stalled.second_RP[0].tolist(),
        "stall_losses": losses(stalled, phi, full).tolist(),
        "stall_eigenvalues": np.linalg.eigvalsh(curvature(z2, r2, phi)).tolist(),
        "best_with_frozen_layer": {"bound": best.bound, "loss": best.loss, "at": best.at},
        "all_trained_losses": losses(free, phi, full).tolist(),
        "chains": [
            {"eta": each, "phase1_time": time, **{key: chain[key] for key in ("after_phase1", "after_phase2")}}
            for each, time, chain in chains
        ],
    }


def bound(tolerance: float) -> dict[str, Any]:
    """Return the least loss of one layer: with p₀ free, at √3/2, and at 0."""
    zeros = np.zeros(4)
    settings = {"free": (zeros, True), "sqrt3/2": (zeros + AMPLITUDE, False), "zero": (zeros, False)}
    results = {}
    for name, (added, free_bias) in settings.items():
        least = least_loss(added, zeros, free_bias=free_bias, tolerance=tolerance)
        results[name] = {"bound": least.bound, "loss": least.loss, "at": least.at, "evaluations": least.evaluations}
    return {"tolerance": tolerance, "least": results}


def further_inputs(dims: int, eta: float = 0.1) -> dict[str, Any]:
    """Run the theorem's phases in d dimensions, and measure how irrelevant weights of 0.01 fade in each phase."""
    run = theorem_run(eta, 1, dims)
    faded: list[float] = []
    if dims > 2:
        first = np.zeros((1, dims + 1))
        first[:, 2:-1] = 0.01
        net = Network(np.full((1, 1), AMPLITUDE), first, first)
        for kept, moved, time in ((FIRST_ALONE, "first", 30), (SECOND_ALONE, "second", 30), (BOTH, "second", 100)):
            net, _, _ = descend(net, eta, round(time / eta), same(kept), Trained(**{moved: True}))
            faded.append(float(np.abs((net.first_RP if moved == "first" else net.second_RP)[:, 2:-1]).max()))
    return {
        "dims": dims,
        "loss": run["after_phase2"]["loss"][0],
        "w22_error": run["after_phase2"]["w2"][0],
        "irrelevant": run["after_phase2"]["irrelevant"],
        "faded": faded,
    }


def variants(longest: float, eta: float = 0.1) -> dict[str, Any]:
    """Run phase 1 for η·t = 60, then phase 2, without some of the paper's simplifications."""
    steps1, steps2 = round(PHASE1_TIME / eta), round(longest / eta)
    phi, full, everything = features(2), same(BOTH), Trained(bias=True, first=True, second=True)
    layers, second = Trained(first=True, second=True), Trained(second=True)
    settings: dict[str, tuple[Trained, Trained, bool]] = {
        "as the paper": (layers, second, False),
        "p0 trained in phase 1": (everything, second, False),
        "second neuron reads p0 in phase 1": (layers, second, True),
        "both, p0 read and trained": (everything, second, True),
        "all trained in phase 2": (layers, everything, False),
    }
    results: dict[str, Any] = {}
    for name, (phase1, phase2, reads_bias) in settings.items():
        net = Network.start(1, 2, bias=bias_after(eta, round(BIAS_TIME / eta)))
        draws = stacked([two_stages(steps1, steps2, 0)])
        middle, _, _ = descend(net, eta, steps1, draws, phase1, reads_bias=reads_bias)
        end, seen, _ = descend(middle, eta, steps2, full, phase2, at=[round(PHASE2_TIME / eta)])
        results[name] = {
            "first": middle.first_RP[0].tolist(),
            "second": middle.second_RP[0].tolist(),
            "loss_at_100": float(losses(seen[round(PHASE2_TIME / eta)], phi, full)[0]),
            "loss": float(losses(end, phi, full)[0]),
        }
    whole, _, _ = descend(Network.start(1, 2), eta, steps2, full, everything)
    results["full training from zeros"] = {"loss": float(losses(whole, phi, full)[0])}
    return results


def run(folder: Path, *, seeds: int, small: bool, device: str, console: Console) -> dict[str, Any]:
    """Compute the study. A seed decides phase 1's layers, and the direction of a push off the saddle.

    All else is deterministic. The study runs on the CPU whatever `device` says, since it has only four inputs and seven
    parameters.
    """
    etas = (0.1, 0.03) if small else (0.1, 0.03, 0.01, 0.003)
    step_etas = (0.2, 0.1, 0.07) if small else (0.1, 0.05, 0.03, 0.02, 0.015, 0.005, 0.001)
    dims = (2, 3) if small else (2, 3, 4, 5, 6)
    longest, tolerance = (100.0, 1e-2) if small else (1000.0, 1e-3)
    jobs: dict[str, Callable[[], Any]] = {
        **{f"run-{eta}": partial(theorem_run, eta, seeds) for eta in etas},
        **{f"laws-{eta}": partial(laws, eta, longest) for eta in etas},
        **{f"steps-{eta}": partial(steps_to_eta, eta) for eta in step_etas},
        **{f"dims-{count}": partial(further_inputs, count) for count in dims},
        "saddle": partial(saddle, etas, seeds),
        "escape": partial(after_escape, (0.1,) if small else (0.1, 0.01), seeds, longest),
        "bound": partial(bound, tolerance),
        "variants": partial(variants, longest),
    }
    setting = {
        "seeds": seeds, "etas": etas, "step_etas": step_etas, "dims": dims, "longest": longest, "tolerance": tolerance,
        "times": [BIAS_TIME, PHASE1_TIME, PHASE2_TIME, *LONG_TIMES], "bias_times": BIAS_TIMES, "smallness": SMALLNESS,
    }  # fmt: skip
    done = run_jobs(folder, setting, list(jobs), lambda key: jobs[key](), console, "boolean")
    steps = [done[f"steps-{eta}"] for eta in step_etas]
    gaps = [done[f"laws-{eta}"]["w2_from_flow"] for eta in etas]
    return {
        "setting": setting,
        "runs": [done[f"run-{eta}"] for eta in etas],
        "laws": [done[f"laws-{eta}"] for eta in etas],
        "steps": steps,
        "step_slopes": {
            name: slope(*_column(steps, name, lambda eta, count: (math.log(1 / eta), math.log(count))))
            for name in ("p0", "w1", "loss", "output", "w22")
        },
        # Where the error falls exponentially, η·t grows with ln(1/η): by 1 (p0) and by 4 (w1) for each e-fold.
        "log_slopes": {
            name: slope(*_column(steps, name, lambda eta, count: (math.log(1 / eta), eta * count)))
            for name in ("p0", "w1")
        },
        "flow_slope": slope(np.log(etas).tolist(), np.log(gaps).tolist()),
        "dims": [done[f"dims-{count}"] for count in dims],
        **{key: done[key] for key in ("saddle", "escape", "bound", "variants")},
    }


def _column(
    rows: Sequence[dict[str, float]], name: str, pair: Callable[[float, float], tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Return the pairs of the rows that have this name, as two lists."""
    pairs = [pair(row["eta"], row[name]) for row in rows if name in row]
    return [x for x, _ in pairs], [y for _, y in pairs]


def draw(result: dict[str, Any]) -> Figure:
    """Draw four panels: the order of learning, phase 2's laws, the saddle, and the steps that the claims need."""
    figure = Figure(figsize=(11, 8), layout="constrained", facecolor="white")
    order, law, saddles, needed = figure.subplots(2, 2).flat
    _draw_order(order, result["runs"][-1])
    _draw_laws(law, result["laws"])
    _draw_saddle(saddles, result["saddle"])
    _draw_steps(needed, result)
    for axes in (order, law, saddles, needed):
        clean(axes)
    return figure


def _draw_order(axes: Axes, run: dict[str, Any]) -> None:
    curves, gap = run["curves"], 1.5
    names = {"1": "constant", "x1": "x₁", "x1x2": "x₁x₂", "x2": "x₂ (target 0)"}
    for phase, (title, components) in enumerate(
        zip(("bias only", "phase 1: one layer", "phase 2: both"), curves["phases"], strict=True)
    ):
        left = phase * (WINDOW + gap)
        for (name, label), colour in zip(names.items(), COLOURS, strict=False):
            times = [left + time for time in curves["time"]]
            axes.plot(times, components[name], color=colour, linewidth=1.8, label=label if phase == 0 else None)
        axes.text(left + WINDOW / 2, 1.58, title, ha="center", fontsize=9, color=GREY)
        if phase:
            axes.axvline(left - gap / 2, color=GREY, linewidth=1, linestyle=":")
    for wanted in (AMPLITUDE, -1.0):
        axes.axhline(wanted, color=GREY, linewidth=0.9, linestyle="--", zorder=1)
    marks = [(phase * (WINDOW + gap) + time, str(time)) for phase in range(3) for time in (0, 5, 10, 15)]
    axes.set_xticks([at for at, _ in marks], [text for _, text in marks])
    axes.set(ylim=(-1.1, 1.75), xlabel="η·t within each phase (its first part)", ylabel="component of what runs")
    axes.set_title(f"Order of learning (η = {run['eta']}; dashed: the target's)", **TITLE)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 0.06), frameon=False, fontsize=9, labelcolor=INK)


def _draw_laws(axes: Axes, rows: list[dict[str, Any]]) -> None:
    labels = {"w2": "error of w₂,₂", "b": "error of b₂", "loss": "loss"}
    for (name, label), colour in zip(labels.items(), COLOURS, strict=False):
        slopes = [row["slopes"][name]["slope"] for row in rows]
        text = f"{label}: slope −{-sum(slopes) / len(slopes):.2f}"
        axes.loglog(rows[-1]["time"], rows[-1][name], color=colour, linewidth=1.6, label=text)
        for row, marker, offset in zip(rows[:-1], MARKERS, (0, 3, 6), strict=False):
            shown = slice(offset, None, 10)
            axes.plot(row["time"][shown], row[name][shown], marker, color=colour, markersize=4.5, fillstyle="none")
    axes.plot([], [], color=GREY, label=f"η = {rows[-1]['eta']}")
    for row, marker in zip(rows[:-1], MARKERS, strict=False):
        axes.plot([], [], marker, color=GREY, markersize=4.5, fillstyle="none", label=f"η = {row['eta']}")
    axes.set(xlabel="η·t of phase 2", ylabel="distance from the optimum, loss")
    axes.set_title("Phase 2: powers of η·t, whatever η is", **TITLE)
    axes.legend(loc="lower left", frameon=False, fontsize=8.5, labelcolor=INK)


def _draw_saddle(axes: Axes, found: dict[str, Any]) -> None:
    near = found["approach"]
    for length, curve, colour in zip(near["bias_times"], near["curves"], COLOURS, strict=False):
        axes.semilogy(near["time"], curve, color=colour, linewidth=1.6, label=f"{length}")
    rate = -found["eigenvalues"][0]
    for times, size, power, text, at in (
        (np.array([14.0, 30.0]), 2.5e-1, -0.25, "exp(−ηt/4)", (14, 1.2e-4)),
        (np.array([41.0, 52.0]), 1e-14, rate, f"exp({rate:.3f} ηt)", (52, 2e-2)),
    ):
        axes.plot(times, size * np.exp(power * times), color=GREY, linewidth=1, linestyle="--")
        axes.text(*at, text, fontsize=9, color=GREY)
    axes.set(xlabel="η·t of the layer's own steps in phase 1", ylabel="largest error against (π/3, 0, 0)")
    axes.set_title("Phase 1's limit is a saddle: descent passes it and leaves", **TITLE)
    axes.legend(title="η·T₀ of the bias phase", loc="lower right", frameon=False, fontsize=9, labelcolor=INK)


def _draw_steps(axes: Axes, result: dict[str, Any]) -> None:
    rows, logs = result["steps"], result["log_slopes"]
    labels = {"w22": "w₂,₂", "output": "second layer's output", "loss": "loss", "w1": "w₁ in phase 1", "p0": "p₀"}
    for (name, label), colour, marker in zip(labels.items(), COLOURS, MARKERS, strict=False):
        power = 1 - result["step_slopes"][name]["slope"]
        law = f"{logs[name]['slope']:.1f} ln(1/η)" if name in logs else f"η$^{{{power:.2f}}}$"
        inverse, times = _column(rows, name, lambda eta, count: (1 / eta, eta * count))
        axes.loglog(inverse, times, color=colour, marker=marker, markersize=5, label=f"{label}: as {law}")
    axes.axhline(10, color=GREY, linestyle="--", linewidth=1, label="Θ(1/η) steps, the claim: level")
    etas = [row["eta"] for row in rows]
    ticks = etas if len(etas) < 5 else (0.1, 0.03, 0.01, 0.003, 0.001)
    axes.set_xticks([1 / eta for eta in ticks], [f"{eta:g}" for eta in ticks])
    axes.minorticks_off()
    axes.set(xlabel="η (smaller to the right)", ylabel="η·t until the error is η")
    axes.set_title("Time to an error of η", **TITLE)
    axes.set_ylim(top=axes.get_ylim()[1] * (1 if len(etas) > 4 else 40))  # with few points the legend needs more room
    axes.legend(loc="upper right", frameon=False, fontsize=9, labelcolor=INK)


BOOLEAN = Study(name="boolean", run=run, plot=draw)
