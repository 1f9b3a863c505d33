"""The polynomial study at several lengths of training: does RaPTr catch up with full training in longer runs?

The methods are full training, RaPTr (square-root scaling) and PLD with RaPTr's FLOPs. Each runs with every learning
rate of a short list of its own and with every seed. At each length, a method's rate is the one with the lowest mean
final loss over these seeds. Settings are those of `polynomial` except for the number of steps; stages and decay stretch
with the run.

    OUT/polynomial-length/N/        the runs of N steps, in the format of `polynomial`

The lengths run one after the other, the shortest first. A stopped study resumes from the last snapshot of the runs
that were in progress.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from raptr.studies.contract import Study
from raptr.studies.polynomial import SMALL, Job, Setting, best_rate, courses_of, final_loss, judged, workers
from raptr.studies.polynomial_plot import plot_lengths
from raptr.train.config import MOST


@dataclass(frozen=True)
class Lengths:
    """What is run: the setting (its steps are replaced), the lengths in steps, and each method's learning rates."""

    setting: Setting
    steps: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]


# Each method's best rate in a wider search at 40,000 steps (docs/log.md), and half of it.
FULL_SIZE = Lengths(
    Setting(),
    steps=(40_000, 80_000),
    rates={"full": (1e-4, 2e-4), "raptr": (1e-4, 2e-4), "pld-matched": (2e-4, 4e-4)},
)
SMALL_SIZE = Lengths(
    SMALL,
    steps=(2000, 6000, 16_000),
    rates=dict.fromkeys(("full", "raptr", "pld-matched"), (1.5e-3, 3e-3, 6e-3)),
)


def run(
    folder: Path, *, seeds: int, small: bool, device: str, console: Console, steps: Sequence[int] = ()
) -> dict[str, Any]:
    """Train every method at every length."""
    if bad := [length for length in steps if not 1 <= length <= MOST]:
        raise ValueError(f"steps is {bad[0]}; a whole number from 1 to {MOST} is allowed")
    lengths = SMALL_SIZE if small else FULL_SIZE
    chosen = tuple(sorted(set(steps))) or lengths.steps
    with workers(device) as pool:
        measured = []
        for length in chosen:
            setting, subfolder = replace(lengths.setting, steps=length), folder / str(length)
            subfolder.mkdir(exist_ok=True)
            wanted = [
                Job(name, rate, seed)
                for name, rates in lengths.rates.items()
                for rate in rates
                for seed in range(seeds)
            ]
            label = f"{length:,} steps"
            courses = courses_of(setting, subfolder, wanted, label=label, device=device, console=console, pool=pool)
            measured.append({"steps": length, "methods": _judged(setting, lengths, courses, seeds)})
    return {"setting": asdict(lengths.setting), "lengths": measured}


def _judged(setting: Setting, lengths: Lengths, courses: dict[str, Any], seeds: int) -> dict[str, Any]:
    """Return the numbers of every method at its best rate."""
    methods = {}
    for name, rates in lengths.rates.items():
        by_rate = {rate: [courses[Job(name, rate, seed).key] for seed in range(seeds)] for rate in rates}
        search = {rate: final_loss(runs) for rate, runs in by_rate.items()}
        methods[name] = judged(name, setting, search, by_rate[best_rate(search)])
    return methods


POLYNOMIAL_LENGTH = Study(
    name="polynomial-length",
    run=run,
    plot=plot_lengths,
    seeds=2,
    run_at=lambda steps: partial(run, steps=steps),
)
