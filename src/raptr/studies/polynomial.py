"""Polynomials learnt in random parts (the paper's section 3, figure 2 and "Details for polynomial training").

Inputs are uniform on {±1}^100 and labels F*(x) = Σ_l Σ_j c_{l,j} Π_{i in S_{l,j}} x_i with 20 terms of each degree
l = 1 … 10 over the first 20 variables, c ~ N(0, 1). A 20-layer residual network of 4d-wide ReLU MLPs learns them
under square loss, from new inputs in every step. For each degree the study reports Σ_j (c - ĉ)² / Σ_j c², ĉ the
component of the evaluated model, and beside it `floor`, what sampling adds to it.

The paper names no optimizer, learning rate, batch, length, scaling or read-out. Here: Adam (0.9, 0.999), a short
warm-up, linear decay over the last quarter; for each method the peak is searched on seeds that the result does not
use. RaPTr's scaling is square root, that of its main experiments; `none` is run beside it. PLD runs twice: with the
paper's θ̄ = 0.6 (0.812 of the FLOPs, not 0.8) and with θ̄ set for 0.8. A block has a single branch, so PLD's and
layer dropout's branch scale is the layer's scale. The 20 subsets of a degree are distinct (degree 1 has all 20).

`polynomial_target` holds F*, the inputs and the errors; `residual_mlp` the networks and their joint training. The
small setting has 20 inputs, 10 variables, degrees to 5 and 10 layers.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from rich.console import Console
from rich.errors import LiveError
from rich.progress import Progress
from torch import Tensor

from raptr.methods import Method, make_method
from raptr.studies.contract import Study, mean_and_deviation, parts_together
from raptr.studies.polynomial_target import Evaluation, Points, Target
from raptr.studies.residual_mlp import Networks, Size, Training
from raptr.subnetworks import Shape
from raptr.train.optimizer import OptimizerSettings

AT_ONCE = 30  # the most runs trained together; what a stopped study loses is one such batch
SEARCH = 1000  # the first seed of the learning rate's search; results use seeds from 0 on

# Okabe and Ito's palette, and lines that tell the variants of a method apart.
COLOURS = {
    "full": "#222222",
    "raptr": "#0072B2",
    "raptr-none": "#56B4E9",
    "pld": "#D55E00",
    "pld-matched": "#E69F00",
    "layer-dropout": "#009E73",
}
LINES = {"raptr-none": "--", "pld-matched": "--"}
METHODS = tuple(COLOURS)
KINDS = ("low", "middle", "high")


@dataclass(frozen=True)
class Setting:
    """Everything that the numbers depend on."""

    inputs: int = 100
    variables: int = 20
    degrees: int = 10
    terms: int = 20
    layers: int = 20
    schedule: str = "8-12-16-20"
    steps: int = 40_000
    batch: int = 512
    warmup: int = 400
    rates: tuple[float, ...] = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3)
    search_seeds: int = 2
    samples: int = 1 << 16
    evaluations: int = 25

    @property
    def size(self) -> Size:
        """The network: hidden width 4d."""
        return Size(self.inputs, 4 * self.inputs, self.layers)


SMALL = Setting(
    inputs=20,
    variables=10,
    degrees=5,
    terms=10,
    layers=10,
    schedule="4-6-8-10",
    steps=2000,
    batch=128,
    warmup=50,
    rates=(3e-3, 6e-3),
    search_seeds=1,
    samples=1 << 12,
    evaluations=20,
)


def method_of(name: str, setting: Setting, seed: int) -> Method:
    """One of the compared methods."""
    parts: dict[str, Any] = {"schedule": setting.schedule, "lengths": "proportional", "fixed": ()}
    kind, settings = {
        "full": ("full", {}),
        "raptr": ("raptr", {**parts, "selection": "bernoulli", "scaling": "sqrt"}),
        "raptr-none": ("raptr", {**parts, "selection": "bernoulli", "scaling": "none"}),
        "pld": ("pld", {"theta": 0.6}),
        "pld-matched": ("pld", {"average": 0.8}),
        "layer-dropout": ("layer-dropout", {"average": 0.8}),
    }[name]
    return make_method(kind, shape=Shape(setting.layers), steps=setting.steps, seed=seed, **settings)


@dataclass(frozen=True)
class Part:
    """One training run."""

    method: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        """Its name among the files."""
        return f"{self.method}-{self.rate:g}-{self.seed}"


def train(
    setting: Setting,
    runs: Sequence[Part],
    *,
    device: str,
    console: Console,
    pool: Executor | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Train all runs together; returns the course of each, by its key."""
    seeds = sorted({run.seed for run in runs})
    owner = torch.tensor([seeds.index(run.seed) for run in runs], device=device)
    targets = [Target(setting.variables, setting.degrees, setting.terms, seed) for seed in seeds]
    tables = torch.from_numpy(np.stack([target.table() for target in targets])).to(device, dtype)
    size = {"inputs": setting.inputs, "variables": setting.variables}
    points = Points(seeds, "data", samples=setting.batch, **size, device=device)
    evaluate = Evaluation(targets, tables, owner, samples=setting.samples, inputs=setting.inputs)
    networks = Networks(setting.size, [run.seed for run in runs], device=device, dtype=dtype)
    methods = [method_of(run.method, setting, run.seed) for run in runs]

    def batch(step: Tensor) -> tuple[Tensor, Tensor]:
        signs, numbers = points.at(step)
        return signs.to(dtype)[owner], tables.gather(1, numbers)[owner]

    def judged(step: int) -> tuple[Tensor, Tensor]:
        scales_RL = torch.tensor([method.evaluated(step).scales for method in methods], dtype=dtype, device=device)
        return evaluate(lambda x_RBD: networks.forward(x_RBD, scales_RL))

    steps, losses, errors = evaluated_steps(setting), [], []
    with _bar(console) as bar:
        drawn = partial(scales, pool, setting, runs)
        training = Training(networks, batch, drawn, rates(setting, runs))
        task = bar.add_task(f"training {len(runs)} runs", total=setting.steps)
        for step in steps:
            while training.done < step:
                training.advance(min(step, training.done + max(1, setting.steps // 200)))
                bar.update(task, completed=training.done)
            loss, error = judged(step)
            losses.append(loss)
            errors.append(error)
    loss_RE, error_RED = torch.stack(losses, 1), torch.stack(errors, 1)
    floor_RED = loss_RE.unsqueeze(2) * evaluate.noise.unsqueeze(1)
    return {
        run.key: {"steps": steps, "loss": _listed(loss), "error": _listed(error), "floor": _listed(floor)}
        for run, loss, error, floor in zip(runs, loss_RE, error_RED, floor_RED, strict=True)
    }


def evaluated_steps(setting: Setting) -> list[int]:
    """After how many steps the models are evaluated: 0, the end, and evenly between."""
    return sorted({round(part * setting.steps / setting.evaluations) for part in range(setting.evaluations + 1)})


def rates(setting: Setting, runs: Sequence[Part]) -> Tensor:
    """The learning rates, (steps, runs)."""
    unit = OptimizerSettings(peak=1.0, warmup=setting.warmup)
    shape = torch.tensor(
        [unit.learning_rate(step, setting.steps) for step in range(setting.steps)], dtype=torch.float64
    )
    return shape[:, None] * torch.tensor([run.rate for run in runs], dtype=torch.float64)


def scales(pool: Executor | None, setting: Setting, runs: Sequence[Part], start: int, stop: int) -> Tensor:
    """The layers' scales in steps `start` to `stop`, (steps, runs, layers); each method and seed is drawn once."""
    drawn = sorted({(run.method, run.seed) for run in runs})
    names, seeds = [name for name, _ in drawn], [seed for _, seed in drawn]
    arguments = (repeat(setting), names, seeds, repeat(start), repeat(stop))
    made = list(pool.map(_drawn, *arguments) if pool else map(_drawn, *arguments))
    return torch.from_numpy(np.stack([made[drawn.index((run.method, run.seed))] for run in runs], axis=1))


def _drawn(setting: Setting, name: str, seed: int, start: int, stop: int) -> NDArray[np.float64]:
    method = method_of(name, setting, seed)
    return np.array([method.subnetwork(step).scales for step in range(start, stop)])


@contextmanager
def _workers(device: str) -> Iterator[Executor | None]:
    """Processes that draw subnetworks while a GPU trains; on the CPU, which has no time to spare, none."""
    if not device.startswith("cuda"):
        yield None
        return
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        yield pool


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    """A progress bar below the one that is there."""
    bar = Progress(console=console, transient=True)
    with suppress(LiveError):  # rich before 14.1 shows one bar at a time: the outer one
        bar.start()
    try:
        yield bar
    finally:
        bar.stop()


def _listed(values: Tensor) -> list[Any]:
    """As nested lists; null where a run diverged, since JSON has no infinity."""
    if values.ndim > 1:
        return [_listed(row) for row in values]
    return [value if math.isfinite(value) else None for value in values.tolist()]


def run(folder: Path, *, seeds: int, small: bool, device: str, console: Console) -> dict[str, Any]:
    """Search the learning rate of each method, then train it with fresh seeds."""
    with _workers(device) as pool:
        setting = SMALL if small else Setting()
        return study(setting, folder, seeds=seeds, device=device, console=console, pool=pool)


def study(
    setting: Setting, folder: Path, *, seeds: int, device: str, console: Console, pool: Executor | None = None
) -> dict[str, Any]:
    """The study under any setting; the processes of `pool` draw the subnetworks, if there is one."""
    # What is searched belongs to no single run: with another grid, the runs that are there stay.
    described = {name: value for name, value in asdict(setting).items() if name not in ("rates", "search_seeds")}

    def computed(wanted: Sequence[Part], label: str) -> dict[str, Any]:
        by_key = {part.key: part for part in wanted}

        def together(keys: Sequence[str]) -> dict[str, Any]:
            return train(setting, [by_key[key] for key in keys], device=device, console=console, pool=pool)

        batches = math.ceil(len(wanted) / AT_ONCE)
        at_once = math.ceil(len(wanted) / batches)  # in equal shares, so that no batch is small and slow
        return parts_together(folder, described, list(by_key), together, console, label, at_once=at_once)

    tried = [SEARCH + number for number in range(setting.search_seeds)]
    grid = [Part(name, rate, seed) for name in METHODS for rate in setting.rates for seed in tried]
    found = computed(grid, "learning rates")
    search = {
        name: {
            f"{rate:g}": _spread([found[Part(name, rate, seed).key]["loss"][-1] for seed in tried])[0]
            for rate in setting.rates
        }
        for name in METHODS
    }
    best = {
        name: min(setting.rates, key=lambda rate: math.inf if (loss := losses[f"{rate:g}"]) is None else loss)
        for name, losses in search.items()
    }
    chosen = {name: [Part(name, best[name], seed) for seed in range(seeds)] for name in METHODS}
    courses = computed([part for some in chosen.values() for part in some], "seeds")
    return {
        "setting": asdict(setting),
        "methods": {
            name: {
                "rate": best[name],
                "search": search[name],
                **_described(method_of(name, setting, 0)),
                **_gathered([courses[part.key] for part in chosen[name]]),
            }
            for name in METHODS
        },
    }


def _described(method: Method) -> dict[str, Any]:
    phases = method.phases()
    layers = sum(phase.size * (phase.stop - phase.start) for phase in phases) / method.steps
    return {"relative_flops": layers / method.target.layers, "transitions": [phase.start for phase in phases[1:]]}


def _gathered(courses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every seed's course, and mean and deviation over the seeds at the end (null where a run diverged)."""
    degrees = range(len(courses[0]["error"][-1]))
    return {
        "runs": list(courses),
        "loss": _spread([course["loss"][-1] for course in courses]),
        "error": [_spread([course["error"][-1][degree] for course in courses]) for degree in degrees],
        "floor": [_spread([course["floor"][-1][degree] for course in courses])[0] for degree in degrees],
    }


def _spread(values: Sequence[float | None]) -> tuple[float, float] | tuple[None, None]:
    present = [value for value in values if value is not None]
    return mean_and_deviation(present) if len(present) == len(values) else (None, None)


def plot(result: dict[str, Any]) -> Figure:
    """The evaluation loss, and the error of low, middle and high degrees, over the steps."""
    degrees = result["setting"]["degrees"]
    edges = [round(third * degrees / 3) for third in range(4)]
    groups = [list(range(start, stop)) for start, stop in pairwise(edges)]
    figure = Figure(figsize=(13, 4.3), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 4)
    for axes in panels[2:]:
        axes.sharey(panels[1])
    titles = ["evaluation loss", *(_title(kind, group) for kind, group in zip(KINDS, groups, strict=True))]
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("steps")
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        for step in result["methods"]["raptr"]["transitions"]:
            axes.axvline(step, color=COLOURS["raptr"], alpha=0.5, linewidth=1.0, linestyle=":", zorder=1)
    for name, numbers in result["methods"].items():
        runs, look = numbers["runs"], {"color": COLOURS[name], "zorder": 2 + len(COLOURS) - list(COLOURS).index(name)}
        mean, deviation = numbers["loss"]
        reached = "diverged" if mean is None else f"{mean:.3g} ± {deviation:.2g}"
        label = f"{name}, {numbers['relative_flops']:.3f} of the FLOPs: final loss {reached}"
        curves = [np.array([run["loss"] for run in runs], dtype=float)]
        curves += [np.array([run["error"] for run in runs], dtype=float)[:, :, group].mean(2) for group in groups]
        for axes, values in zip(panels, curves, strict=True):
            middle, spread = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
            axes.plot(runs[0]["steps"], middle, label=label, linewidth=1.6, linestyle=LINES.get(name, "-"), **look)
            low = np.maximum(middle - spread, middle / 10)  # a band through 0 has no place on this axis
            axes.fill_between(runs[0]["steps"], low, middle + spread, alpha=0.15, linewidth=0, **look)
    full = result["methods"]["full"]["runs"]
    noise = np.array([run["floor"] for run in full], dtype=float).mean(0)
    for axes, group in zip(panels[1:], groups, strict=True):
        look = {"color": "#999999", "linewidth": 1.0, "linestyle": "-.", "zorder": 1}
        axes.plot(full[0]["steps"], noise[:, group].mean(1), label="what sampling adds to the errors of full", **look)
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(
        f"Polynomials of degree 1 to {degrees}, {result['setting']['layers']} layers: mean and deviation over "
        f"{result['seeds']} seeds; dotted: RaPTr's next stage",
        x=0.01,
        horizontalalignment="left",
        fontsize=11,
        fontweight="bold",
    )
    return figure


def _title(kind: str, group: Sequence[int]) -> str:
    first, last = group[0] + 1, group[-1] + 1
    return f"error of {kind} degrees ({first}{f' to {last}' if last > first else ''})"


POLYNOMIAL = Study(
    name="polynomial",
    summary="RaPTr learns every degree of a polynomial, PLD loses the high ones (the paper's figure 2)",
    run=run,
    plot=plot,
)
