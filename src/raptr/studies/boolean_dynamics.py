"""The two-neuron residual network on Boolean data, with exact gradients (Panigrahi et al., "Efficient Stagewise
Pretraining via Progressive Subnetworks", section 3 and the appendix on Boolean data: network, phases, lemmas).

    target    √3/2 + √3/2·x₁ − x₁x₂
    network   y₁ = p₀ + sin(⟨w₁, x⟩ + b₁),   y₂ = y₁ + sin(⟨w₂, x⟩ + y₁ + b₂)
    one layer p₀ + sin(⟨wₗ, x⟩ + bₗ), for either layer l

Expectations are sums over all 2^d inputs, in float64. Gradients follow the paper's proofs, which drop the factor
2 of the squared error: a step is θ ← θ − η·E[residual · ∂output/∂θ].

Deviation: none by default. The paper's one-layer formula leaves y₁ = p₀ out of the second neuron's sine, although
its definition of the network has it there; `reads_bias=True` puts it back.

Shapes: R independent runs, N = 2^d inputs, P = d + 1 features (the inputs, then a constant 1).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raptr.hashing import bits, unit
from raptr.methods import make_method
from raptr.studies.contract import mean_and_deviation
from raptr.subnetworks import Schedule, Shape
from raptr.subnetworks.schedule import Stage

Array = NDArray[np.float64]
Scales = tuple[Array, Array]  # of both layers, (R, 1) each: which layers run in each run

AMPLITUDE = math.sqrt(3) / 2
FIRST_ALONE, SECOND_ALONE, BOTH = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)
BIAS_TIME, PHASE1_TIME, PHASE2_TIME = 40, 60, 100  # η·t of each phase; both layers share phase 1
THIRD, HALF = math.pi / 3, math.pi / 2
LIMIT1 = (THIRD, 0.0, 0.0)  # the theorem's (w₁, w₂, b) of both layers after phase 1
LIMIT2 = (HALF - AMPLITUDE, HALF, HALF - AMPLITUDE)  # the theorem's (w₁, w₂, b) of the second layer after phase 2
ESCAPED = (THIRD + HALF) / 2  # halfway from the saddle to the minimum; a larger w₁ has left the saddle
WINDOW = 20  # the curves show each phase up to this η·t


@dataclass(frozen=True)
class Network:
    """The parameters of R runs: the position bias p₀ and, for each layer, the weights followed by the bias."""

    bias_R1: Array
    first_RP: Array
    second_RP: Array

    @classmethod
    def start(
        cls, runs: int, dims: int, *, bias: float = 0.0, first: Sequence[float] = (), second: Sequence[float] = ()
    ) -> "Network":
        """Return R equal runs. A layer starts at (w₁, w₂, b) if given, otherwise at zeros, as in the paper."""

        def layer(values: Sequence[float]) -> Array:
            row = np.zeros(dims + 1)
            if values:
                row[0], row[1], row[-1] = values
            return np.tile(row, (runs, 1))

        return cls(np.full((runs, 1), bias), layer(first), layer(second))


@dataclass(frozen=True)
class Trained:
    """Which parameters a phase moves."""

    bias: bool = False
    first: bool = False
    second: bool = False


def features(dims: int) -> Array:
    """Return all inputs of {±1}^d, followed by a constant 1: (2^d, d + 1)."""
    index_N1 = np.arange(2**dims)[:, None]
    x_ND = 1.0 - 2.0 * ((index_N1 >> np.arange(dims)) & 1)
    return np.concatenate([x_ND, np.ones((len(x_ND), 1))], axis=1)


def target(phi_NP: Array) -> Array:
    """Return the labels √3/2 + √3/2·x₁ − x₁x₂ of all inputs."""
    return AMPLITUDE + AMPLITUDE * phi_NP[:, 0] - phi_NP[:, 0] * phi_NP[:, 1]


def same(scales: tuple[float, float]) -> Scales:
    """Return scales with the same choice of layers for all runs."""
    return np.array([[scales[0]]]), np.array([[scales[1]]])


def output(net: Network, phi_NP: Array, scales: Scales, *, reads_bias: bool = False) -> Array:
    """Return the output of every run on every input: (R, N)."""
    return _forward(net, phi_NP, scales, reads_bias)[0]


def _forward(net: Network, phi_NP: Array, scales: Scales, reads_bias: bool) -> tuple[Array, Array, Array, Array]:
    """Return the output, both cosines (0 where a layer is bypassed), and how much of y₁ the second sine reads."""
    scale_1, scale_2 = scales
    z1_RN = net.first_RP @ phi_NP.T
    y1_RN = net.bias_R1 + scale_1 * np.sin(z1_RN)
    read = np.ones_like(scale_1) if reads_bias else scale_1
    z2_RN = net.second_RP @ phi_NP.T + read * y1_RN
    return y1_RN + scale_2 * np.sin(z2_RN), scale_1 * np.cos(z1_RN), scale_2 * np.cos(z2_RN), read


def losses(net: Network, phi_NP: Array, scales: Scales, *, reads_bias: bool = False) -> Array:
    """Return the mean squared error of every run: (R,)."""
    residual_RN = output(net, phi_NP, scales, reads_bias=reads_bias) - target(phi_NP)
    return np.asarray((residual_RN**2).mean(axis=1))


def gradients(net: Network, phi_NP: Array, label_N: Array, scales: Scales, *, reads_bias: bool = False) -> Network:
    """Return the exact gradients of half the mean squared error."""
    y_RN, cos1_RN, cos2_RN, read = _forward(net, phi_NP, scales, reads_bias)
    residual_RN = (y_RN - label_N) / len(label_N)
    below_RN = residual_RN * (1.0 + read * cos2_RN)
    return Network(below_RN.sum(axis=1, keepdims=True), (below_RN * cos1_RN) @ phi_NP, (residual_RN * cos2_RN) @ phi_NP)


def descend(
    net: Network,
    eta: float,
    steps: int,
    scales: Scales | Callable[[int], Scales],
    trained: Trained,
    *,
    at: Sequence[int] = (),
    until: Callable[[Network], bool] | None = None,
    reads_bias: bool = False,
) -> tuple[Network, dict[int, Network], int]:
    """Do gradient descent for `steps` steps, or until `until` is true.

    Return the last networks, the networks after the numbers of steps in `at`, and the number of steps taken.
    """
    phi_NP = features(net.first_RP.shape[1] - 1)
    label_N, wanted = target(phi_NP), set(at)
    seen = {0: net} if 0 in wanted else {}
    done = 0
    while done < steps and not (until is not None and until(net)):
        step = gradients(net, phi_NP, label_N, scales(done) if callable(scales) else scales, reads_bias=reads_bias)
        net = Network(
            net.bias_R1 - eta * step.bias_R1 if trained.bias else net.bias_R1,
            net.first_RP - eta * step.first_RP if trained.first else net.first_RP,
            net.second_RP - eta * step.second_RP if trained.second else net.second_RP,
        )
        done += 1
        if done in wanted:
            seen[done] = net
    return net, seen, done


def bias_after(eta: float, steps: int) -> float:
    """Return the position bias after `steps` steps that train it alone, with the rounding of these updates."""
    bias = 0.0
    for _ in range(steps):
        bias -= eta * (bias - AMPLITUDE)
    return bias


def two_stages(phase1: int, phase2: int, seed: int) -> Callable[[int], tuple[float, float]]:
    """Return a function from the step to the scales of RaPTr 1-2 on two layers, drawn by this project's method."""
    # The theorem has no scaling. The two stages have independent lengths, so the schedule is written out.
    stages = (Stage(0, phase1, 1, ()), Stage(phase1, phase1 + phase2, 2, ()))
    method = make_method("raptr", shape=Shape(2), schedule=Schedule(2, stages), scaling="none", seed=seed)

    def scales(step: int) -> tuple[float, float]:
        first, second = method.subnetwork(step).scales
        return first, second

    return scales


def stacked(draws: Sequence[Callable[[int], tuple[float, float]]]) -> Callable[[int], Scales]:
    """Combine one draw per run into a function that returns the columns `descend` takes."""

    def scales(step: int) -> Scales:
        table_R2 = np.array([draw(step) for draw in draws])
        return table_R2[:, :1], table_R2[:, 1:]

    return scales


def components(y_RN: Array, phi_NP: Array) -> dict[str, Array]:
    """Return a function's coefficients of 1, x₁, x₂ and x₁x₂, and the norm of all others: (R,) each."""
    x1_N, x2_N = phi_NP[:, 0], phi_NP[:, 1]
    coefficients = {
        "1": y_RN.mean(axis=1),
        "x1": (y_RN * x1_N).mean(axis=1),
        "x2": (y_RN * x2_N).mean(axis=1),
        "x1x2": (y_RN * x1_N * x2_N).mean(axis=1),
    }
    # Parseval: what is left of the mean square belongs to the other monomials.
    rest = (y_RN**2).mean(axis=1) - sum(part**2 for part in coefficients.values())
    return {**coefficients, "others": np.sqrt(np.maximum(rest, 0.0))}


def curvature(z_N: Array, residual_N: Array, phi_NP: Array) -> Array:
    """Return the Hessian of half the loss in one neuron's (w, b), where sin(z) is added to the rest: (P, P)."""
    return np.asarray((phi_NP.T * (np.cos(z_N) ** 2 - residual_N * np.sin(z_N))) @ phi_NP / len(phi_NP))


def limit() -> Network:
    """Return the network with both layers exactly at phase 1's limit."""
    return Network.start(1, 2, bias=AMPLITUDE, first=LIMIT1, second=LIMIT1)


def flow(time: float, pieces: int = 2000) -> float:
    """Return w₂,₂ of phase 2's gradient flow at a time, by the fourth-order Runge–Kutta method."""
    phi, net, h = features(2), limit(), time / pieces
    label = target(phi)

    def down(theta: Array) -> Array:
        return -gradients(Network(net.bias_R1, net.first_RP, theta), phi, label, same(BOTH)).second_RP

    theta = net.second_RP
    for _ in range(pieces):
        k1 = down(theta)
        k2 = down(theta + h / 2 * k1)
        k3 = down(theta + h / 2 * k2)
        theta = theta + h / 6 * (k1 + 2 * k2 + 2 * k3 + down(theta + h * k3))
    return float(theta[0, 1])


def theorem_run(eta: float, seeds: int, dims: int = 2, phase1_time: float = PHASE1_TIME) -> dict[str, Any]:
    """Run all phases one after the other, from zeros; the layers of phase 1 are drawn once per seed."""
    steps0, steps1, steps2 = (round(time / eta) for time in (BIAS_TIME, phase1_time, PHASE2_TIME))
    phi = features(dims)
    net = Network.start(seeds, dims, bias=bias_after(eta, steps0))
    bias_error = abs(float(net.bias_R1[0, 0]) - AMPLITUDE)
    draws = [two_stages(steps1, steps2, seed) for seed in range(seeds)]
    shown = [round(quarter / 4 / eta) for quarter in range(4 * WINDOW + 1)]
    net, seen1, _ = descend(net, eta, steps1, stacked(draws), Trained(first=True, second=True), at=shown)
    after1 = {
        "w1": _worst(np.abs(net.first_RP[:, 0] - THIRD), np.abs(net.second_RP[:, 0] - THIRD)),
        "w2": _worst(np.abs(net.first_RP[:, 1]), np.abs(net.second_RP[:, 1])),
        "b": _worst(np.abs(net.first_RP[:, -1]), np.abs(net.second_RP[:, -1])),
        "output": _worst(*(_from_line(net, phi, kept) for kept in (FIRST_ALONE, SECOND_ALONE))),
    }
    assert all(draw(steps1) == draw(steps1 + steps2 - 1) == BOTH for draw in draws)
    full = same(BOTH)
    net, seen2, _ = descend(net, eta, steps2, full, Trained(second=True), at=[*shown, round(10 / eta)])
    wanted = np.array([*LIMIT2[:2], *[0.0] * (dims - 2), LIMIT2[2]])
    errors = np.abs(net.second_RP - wanted)
    return {
        "eta": eta,
        "bias_error": bias_error,
        "after_phase1": after1,
        "after_phase2": {
            "w1": mean_and_deviation(errors[:, 0].tolist()),
            "w2": mean_and_deviation(errors[:, 1].tolist()),
            "b": mean_and_deviation(errors[:, -1].tolist()),
            "irrelevant": float(errors[:, 2:-1].max(initial=0.0)),
            "loss_at_10": mean_and_deviation(losses(seen2[round(10 / eta)], phi, full).tolist()),
            "loss": mean_and_deviation(losses(net, phi, full).tolist()),
        },
        "curves": _curves(eta, [seen1[step] for step in shown], [seen2[step] for step in shown], phi),
    }


def _worst(*per_layer: Array) -> tuple[float, float]:
    """Return mean and deviation over seeds of the larger of the two layers' errors."""
    return mean_and_deviation(np.max(per_layer, axis=0).tolist())


def _from_line(net: Network, phi: Array, kept: tuple[float, float]) -> Array:
    """Return the largest error of one layer over all inputs, against √3/2 + √3/2·x₁: (R,)."""
    line = AMPLITUDE + AMPLITUDE * phi[:, 0]
    return np.asarray(np.abs(output(net, phi, same(kept)) - line).max(axis=1))


def _curves(eta: float, first: list[Network], second: list[Network], phi: Array) -> dict[str, Any]:
    """Return seed 0's components of the output over the beginning of each phase; in phase 1, of the layers' mean."""
    times = [quarter / 4 for quarter in range(4 * WINDOW + 1)]
    bias = [np.full((1, len(phi)), bias_after(eta, round(time / eta))) for time in times]
    alone = [(output(net, phi, same(FIRST_ALONE))[:1] + output(net, phi, same(SECOND_ALONE))[:1]) / 2 for net in first]
    both = [output(net, phi, same(BOTH))[:1] for net in second]
    parted = [[components(y, phi) for y in outputs] for outputs in (bias, alone, both)]
    names = ("1", "x1", "x2", "x1x2")
    return {"time": times, "phases": [{n: [float(state[n][0]) for state in phase] for n in names} for phase in parted]}


def steps_to_eta(eta: float) -> dict[str, float]:
    """Return how many steps bring each error down to η; phase 1 counts the layer's own steps, from an exact p₀.

    At small η, errors of phase 2 that would take too long (about η^-3 and η^-2/2 steps) are left out.
    """
    phi, first, second = features(2), Trained(first=True), Trained(second=True)
    product = -phi[:, 0] * phi[:, 1]

    def second_output(net: Network) -> float:
        both, alone = output(net, phi, same(BOTH)), output(net, phi, same(FIRST_ALONE))
        return float(np.abs(both - alone - product).max())

    runs: dict[str, tuple[Network, tuple[float, float], Trained, Callable[[Network], float]]] = {
        "p0": (Network.start(1, 2), (0.0, 0.0), Trained(bias=True), lambda net: abs(net.bias_R1[0, 0] - AMPLITUDE)),
        "w1": (Network.start(1, 2, bias=AMPLITUDE), FIRST_ALONE, first, lambda net: abs(net.first_RP[0, 0] - THIRD)),
        "loss": (limit(), BOTH, second, lambda net: float(losses(net, phi, same(BOTH))[0])),
    }
    if eta >= 0.005:
        runs["output"] = (limit(), BOTH, second, second_output)
    if eta >= 0.015:
        runs["w22"] = (limit(), BOTH, second, lambda net: abs(net.second_RP[0, 1] - HALF))
    counts: dict[str, float] = {"eta": eta}
    for name, (net, kept, moved, error) in runs.items():
        reached = partial(_below, error, eta)
        counts[name] = descend(net, eta, 10**9, same(kept), moved, until=reached)[2]
    return counts


def _below(error: Callable[[Network], float], eta: float, net: Network) -> bool:
    return error(net) <= eta


def direction(seed: int) -> Array:
    """Return the seed's unit vector in (w₁, w₂, b)."""
    raw = np.array([2 * unit(bits(seed, "evaluation", axis)) - 1 for axis in range(3)])
    return np.asarray(raw / np.linalg.norm(raw))


def leaving(
    bias_R1: Array, start_RP: Array, eta: float, longest: float, every: float
) -> tuple[list[Any], list[float], list[list[float]]]:
    """Follow runs of the first layer alone that start at the saddle or near it.

    Return when each run's w₁ leaves the saddle (η·t; None: not yet), the times of measurement, and each run's distances
    from the saddle at these times.
    """
    apart = max(1, round(every / eta))
    points = list(range(0, round(longest / eta) + 1, apart))
    net = Network(bias_R1, start_RP, np.zeros_like(start_RP))
    _, seen, _ = descend(net, eta, points[-1], same(FIRST_ALONE), Trained(first=True), at=points)
    path = np.array([seen[step].first_RP for step in points])
    gone = path[:, :, 0] > ESCAPED
    times = [points[int(column.argmax())] * eta if column.any() else None for column in gone.T]
    distances: list[list[float]] = np.abs(path - np.array(LIMIT1)).max(axis=2).T.tolist()
    return times, [step * eta for step in points], distances


@dataclass(frozen=True)
class Least:
    """The least loss of one neuron: a bound that no parameters beat, and parameters that reach `loss`."""

    bound: float
    loss: float
    at: tuple[float, ...]
    evaluations: int


def least_loss(added_N: Array, inside_N: Array, *, free_bias: bool, tolerance: float) -> Least:
    """Find the least E[(added + sin(w₁x₁ + w₂x₂ + b + inside) − target)²] over all (w₁, w₂, b), by branch and bound.

    √loss is the L2 norm of the residual and sine is 1-Lipschitz, while the features are orthonormal: √loss
    changes by no more than the Euclidean distance in (w₁, w₂, b). A cube of half side h around a point of √loss r
    thus holds nothing below r − h√3, and cubes that cannot beat the best by `tolerance` are dropped. Only rounding in
    float64 is not covered. With `free_bias` the best constant is subtracted, a projection, so the argument holds.

    Two inputs are enough for every d: with the other inputs held, the loss is that of two inputs at another b,
    and an average over those is no less than the least of them.
    """
    phi_NP = features(2)
    wanted_N = target(phi_NP) - added_N

    def roots(theta_CP: Array) -> Array:
        residual_CN = np.sin(theta_CP @ phi_NP.T + inside_N) - wanted_N
        if free_bias:
            residual_CN -= residual_CN.mean(axis=1, keepdims=True)
        return np.asarray(np.sqrt((residual_CN**2).mean(axis=1)))

    side = 16
    half = math.pi / side
    line = half * (2 * np.arange(side) + 1)
    # sin(z) is unchanged by (w₁, b) + π and by (w₂, b) + π: w₁ and w₂ need only half a turn each.
    grid = np.meshgrid(line[: side // 2], line[: side // 2], line, indexing="ij")
    cells_CP = np.stack([axis.ravel() for axis in grid], axis=1)
    corners = features(3)[:, :3]
    best, best_at, evaluations = math.inf, cells_CP[0], 0
    while len(cells_CP):
        roots_C = roots(cells_CP)
        evaluations += len(cells_CP)
        if roots_C.min() < best:
            best, best_at = float(roots_C.min()), cells_CP[roots_C.argmin()]
        cells_CP = cells_CP[roots_C - half * math.sqrt(3) < best - tolerance]
        half /= 2
        cells_CP = (cells_CP[:, None, :] + half * corners).reshape(-1, 3)
    # Every cube was dropped because it holds nothing below best − tolerance, for a best that has only fallen since.
    bound = max(best - tolerance, 0.0) ** 2
    for _ in range(2000):  # polish the point that is shown; the bound does not depend on it
        residual_N = np.sin(phi_NP @ best_at + inside_N) - wanted_N
        residual_N -= residual_N.mean() if free_bias else 0.0
        best_at = best_at - (residual_N * np.cos(phi_NP @ best_at + inside_N)) @ phi_NP / 4
    return Least(bound, float(roots(best_at[None])[0]) ** 2, tuple(best_at.tolist()), evaluations)
