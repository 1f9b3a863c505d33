"""Polynomials learnt by random subnetworks (the paper's section 3, figure 2 and "Details for polynomial training").

Inputs are uniform on {±1}^100 and labels F*(x) = Σ_l Σ_j c_{l,j} Π_{i in S_{l,j}} x_i with 20 terms of each degree
l = 1 … 10 over the first 20 variables, c ~ N(0, 1). A residual network of 20 layers, which are 4d-wide ReLU MLPs,
learns them with the squared loss, from new inputs in every step. For each degree the study reports the error
Σ_j (c - ĉ)² / Σ_j c², where ĉ is the coefficient of the evaluated model, and `floor`, the share of the error that
sampling adds.

The paper names no optimizer, learning rate, batch size, number of steps, scaling or read-out. Here: Adam with betas
(0.9, 0.999), a short warm-up, and linear decay over the last quarter; each method's peak learning rate is searched on
seeds that the result does not use. RaPTr's scaling is the square root, as in the paper's main experiments; `none` is
run as well. PLD runs twice: with the paper's θ̄ = 0.6 (0.812 of the FLOPs, not 0.8) and with θ̄ set for 0.8. A block
has a single branch, so the branch scale of PLD and layer dropout is the layer's scale. The 20 subsets of a degree are
distinct (degree 1 has all 20).

`polynomial_target` holds F*, the inputs and the errors, `residual_mlp` the networks, and `residual_mlp_training` their
joint training. The small setting has 20 inputs, 10 variables, degrees up to 5 and 10 layers.
"""

import json
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.errors import LiveError
from rich.progress import Progress
from torch import Tensor

from raptr.methods import Method, make_method
from raptr.report.units import plain
from raptr.studies.contract import Study, mean_and_deviation, run_together
from raptr.studies.polynomial_plot import plot
from raptr.studies.polynomial_target import Evaluation, Points, Target
from raptr.studies.residual_mlp import Networks, Size
from raptr.studies.residual_mlp_training import Training
from raptr.studies.snapshot import read_snapshot, write_snapshot
from raptr.subnetworks import Shape
from raptr.train.optimizer import OptimizerSettings

AT_ONCE = 30  # most runs that are trained together
SNAPSHOT = "unfinished.safetensors"
SNAPSHOT_SECONDS = 30.0  # least time between two snapshots; that of 12 full-size runs has 230 MB
SEARCH = 1000  # first seed of the search for learning rates; results use seeds from 0 on

METHODS = ("full", "raptr", "raptr-none", "pld", "pld-matched", "layer-dropout")


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
        """The dimensions of the network; the hidden width is 4d."""
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
    """Return a compared method by its name."""
    common: dict[str, Any] = {"schedule": setting.schedule, "lengths": "proportional", "fixed": ()}
    kind, settings = {
        "full": ("full", {}),
        "raptr": ("raptr", {**common, "selection": "bernoulli", "scaling": "sqrt"}),
        "raptr-none": ("raptr", {**common, "selection": "bernoulli", "scaling": "none"}),
        "pld": ("pld", {"theta": 0.6}),
        "pld-matched": ("pld", {"average": 0.8}),
        "layer-dropout": ("layer-dropout", {"average": 0.8}),
    }[name]
    return make_method(kind, shape=Shape(setting.layers), steps=setting.steps, seed=seed, **settings)


@dataclass(frozen=True)
class Job:
    """One training run: its method, peak learning rate and seed."""

    method: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.method}-{self.rate:g}-{self.seed}"


def train(
    setting: Setting,
    runs: Sequence[Job],
    *,
    device: str,
    console: Console,
    pool: Executor | None = None,
    dtype: torch.dtype = torch.float32,
    snapshot: Path | None = None,
) -> dict[str, Any]:
    """Train all runs together and return the course of each by its key: losses and errors at each evaluation.

    After an evaluation the state is written to the file `snapshot`, at most every SNAPSHOT_SECONDS; a stopped training
    resumes from it.
    """
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
    identity = [json.loads(json.dumps(asdict(setting))), [run.key for run in runs], device, str(dtype)]
    state = None if snapshot is None else read_snapshot(snapshot, identity)
    if state is not None:
        losses, errors = [*state["losses"].to(device)], [*state["errors"].to(device)]
    done = steps[len(losses) - 1] if losses else 0
    kept = time.monotonic()
    with _bar(console) as bar:
        drawn = partial(scales, pool, setting, runs)
        training = Training(networks, batch, drawn, rates(setting, runs), done=done, state=state)
        task = bar.add_task(f"training {len(runs)} runs", total=setting.steps, completed=done)
        for step in steps[len(losses) :]:
            while training.done < step:
                training.advance(min(step, training.done + max(1, setting.steps // 200)))
                bar.update(task, completed=training.done)
            loss, error = judged(step)
            losses.append(loss)
            errors.append(error)
            if snapshot is not None and step and time.monotonic() - kept >= SNAPSHOT_SECONDS:
                so_far = {"losses": torch.stack(losses), "errors": torch.stack(errors)}
                write_snapshot(snapshot, identity, {**training.state(), **so_far})
                kept = time.monotonic()
    loss_RE, error_RED = torch.stack(losses, 1), torch.stack(errors, 1)
    floor_RED = loss_RE.unsqueeze(2) * evaluate.noise.unsqueeze(1)
    return {
        run.key: plain({"steps": steps, "loss": loss.tolist(), "error": error.tolist(), "floor": floor.tolist()})
        for run, loss, error, floor in zip(runs, loss_RE, error_RED, floor_RED, strict=True)
    }


def evaluated_steps(setting: Setting) -> list[int]:
    """Return after how many steps the models are evaluated: 0, the last, and evenly spaced ones between."""
    return sorted({round(number * setting.steps / setting.evaluations) for number in range(setting.evaluations + 1)})


def rates(setting: Setting, runs: Sequence[Job]) -> Tensor:
    """Return the learning rate of every step and run, (steps, runs)."""
    unit = OptimizerSettings(peak=1.0, warmup=setting.warmup)
    relative = torch.tensor(
        [unit.learning_rate(step, setting.steps) for step in range(setting.steps)], dtype=torch.float64
    )
    return relative[:, None] * torch.tensor([run.rate for run in runs], dtype=torch.float64)


def scales(pool: Executor | None, setting: Setting, runs: Sequence[Job], start: int, stop: int) -> Tensor:
    """Return the layers' scales in steps `start` to `stop`, (steps, runs, layers).

    Runs of the same method and seed share one draw. The processes of `pool`, if given, do the drawing.
    """
    distinct = sorted({(run.method, run.seed) for run in runs})
    names, seeds = [name for name, _ in distinct], [seed for _, seed in distinct]
    arguments = (repeat(setting), names, seeds, repeat(start), repeat(stop))
    tables = list(pool.map(_drawn, *arguments) if pool else map(_drawn, *arguments))
    return torch.from_numpy(np.stack([tables[distinct.index((run.method, run.seed))] for run in runs], axis=1))


def _drawn(setting: Setting, name: str, seed: int, start: int, stop: int) -> NDArray[np.float64]:
    method = method_of(name, setting, seed)
    return np.array([method.subnetwork(step).scales for step in range(start, stop)])


@contextmanager
def workers(device: str) -> Iterator[Executor | None]:
    """Yield processes that draw subnetworks while a GPU trains; None on the CPU, which has no core to spare."""
    if not device.startswith("cuda"):
        yield None
        return
    # Ctrl-C reaches every process of the terminal. The workers ignore it, so that only the main process reacts.
    ignore: dict[str, Any] = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    with ProcessPoolExecutor(mp_context=get_context("spawn"), **ignore) as pool:
        yield pool


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    """Yield a progress bar, shown below one that the console may already have."""
    bar = Progress(console=console, transient=True)
    with suppress(LiveError):  # rich before 14.1 shows only one bar at a time: the outer one
        bar.start()
    try:
        yield bar
    finally:
        bar.stop()


def run(folder: Path, *, seeds: int, small: bool, device: str, console: Console) -> dict[str, Any]:
    """Search each method's learning rate, then train it with fresh seeds."""
    with workers(device) as pool:
        setting = SMALL if small else Setting()
        return study(setting, folder, seeds=seeds, device=device, console=console, pool=pool)


def study(
    setting: Setting, folder: Path, *, seeds: int, device: str, console: Console, pool: Executor | None = None
) -> dict[str, Any]:
    """Run the study with any setting. The processes of `pool`, if given, draw the subnetworks."""
    computed = partial(courses_of, setting, folder, device=device, console=console, pool=pool)
    trial_seeds = [SEARCH + number for number in range(setting.search_seeds)]
    grid = [Job(name, rate, seed) for name in METHODS for rate in setting.rates for seed in trial_seeds]
    grid_courses = computed(grid, label="learning rates")
    search = {
        name: {
            rate: final_loss([grid_courses[Job(name, rate, seed).key] for seed in trial_seeds])
            for rate in setting.rates
        }
        for name in METHODS
    }
    chosen = {name: [Job(name, best_rate(search[name]), seed) for seed in range(seeds)] for name in METHODS}
    courses = computed([job for jobs in chosen.values() for job in jobs], label="seeds")
    methods = {
        name: judged(name, setting, search[name], [courses[job.key] for job in jobs]) for name, jobs in chosen.items()
    }
    return {"setting": asdict(setting), "methods": methods}


def courses_of(
    setting: Setting,
    folder: Path,
    wanted: Sequence[Job],
    *,
    label: str,
    device: str,
    console: Console,
    pool: Executor | None,
) -> dict[str, Any]:
    """Return the course of every run by its key. Runs that the folder lacks are trained."""
    # A run does not depend on the grid of the search, so finished runs stay valid when the grid changes.
    common = {name: value for name, value in asdict(setting).items() if name not in ("rates", "search_seeds")}
    by_key, snapshot = {job.key: job for job in wanted}, folder / SNAPSHOT

    def together(keys: Sequence[str]) -> dict[str, Any]:
        runs = [by_key[key] for key in keys]
        return train(setting, runs, device=device, console=console, pool=pool, snapshot=snapshot)

    batches = math.ceil(len(wanted) / AT_ONCE)
    at_once = math.ceil(len(wanted) / batches)  # in equal shares, since a small last batch would waste time
    courses = run_together(folder, common, list(by_key), together, console, label, at_once=at_once)
    snapshot.unlink(missing_ok=True)
    return courses


def final_loss(courses: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean final loss, or None if a run diverged."""
    return spread([course["loss"][-1] for course in courses])[0]


def best_rate(losses: Mapping[float, float | None]) -> float:
    """Return the learning rate with the lowest loss; rates at which a run diverged come last."""
    return min(losses, key=lambda rate: math.inf if (loss := losses[rate]) is None else loss)


def described(method: Method) -> dict[str, Any]:
    """Return a method's FLOPs relative to full training, and the steps at which its stages change."""
    phases = method.phases()
    layers = sum(phase.size * (phase.stop - phase.start) for phase in phases) / method.steps
    return {"relative_flops": layers / method.target.layers, "transitions": [phase.start for phase in phases[1:]]}


def judged(
    name: str, setting: Setting, search: Mapping[float, float | None], courses: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return a method's numbers at its best rate.

    These are each seed's course, and mean and deviation of the final losses and errors (None if a run diverged).
    """
    degrees = range(len(courses[0]["error"][-1]))
    return {
        "rate": best_rate(search),
        "search": {f"{rate:g}": loss for rate, loss in search.items()},
        **described(method_of(name, setting, 0)),
        "runs": list(courses),
        "loss": spread([course["loss"][-1] for course in courses]),
        "error": [spread([course["error"][-1][degree] for course in courses]) for degree in degrees],
        "floor": [spread([course["floor"][-1][degree] for course in courses])[0] for degree in degrees],
    }


def spread(values: Sequence[float | None]) -> tuple[float, float] | tuple[None, None]:
    """Return mean and deviation, or (None, None) if a run diverged."""
    present = [value for value in values if value is not None]
    return mean_and_deviation(present) if len(present) == len(values) else (None, None)


POLYNOMIAL = Study(name="polynomial", run=run, plot=plot)
