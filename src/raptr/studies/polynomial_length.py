"""The polynomial study's runs at several lengths: does RaPTr reach full training when training goes on longer?

Full training, RaPTr (square-root scaling) and PLD at RaPTr's FLOPs. Every method runs with every learning rate of its
own short list and every seed; its rate is the best by the mean final loss over these seeds, for each length anew.
Settings are those of `polynomial`, but for the number of steps: the stages and the decay stretch with the run.

    OUT/polynomial-length/N/        the runs of N steps, as `polynomial` keeps them

The lengths run one after the other, the shortest first. A stopped study goes on from the last snapshot of the runs
it was at.
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
    """What is run: the setting but for its steps, the lengths, and each method's learning rates."""

    setting: Setting
    steps: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]


# The best rates of a wider search at 40,000 steps (docs/log.md), and half of them.
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
            setting, place = replace(lengths.setting, steps=length), folder / str(length)
            place.mkdir(exist_ok=True)
            wanted = [
                Job(name, rate, seed) for name, some in lengths.rates.items() for rate in some for seed in range(seeds)
            ]
            label = f"{length:,} steps"
            courses = courses_of(setting, place, wanted, label=label, device=device, console=console, pool=pool)
            measured.append({"steps": length, "methods": _judged(setting, lengths, courses, seeds)})
    return {"setting": asdict(lengths.setting), "lengths": measured}


def _judged(setting: Setting, lengths: Lengths, courses: dict[str, Any], seeds: int) -> dict[str, Any]:
    """Every method at its best rate."""
    methods = {}
    for name, rates in lengths.rates.items():
        by_rate = {rate: [courses[Job(name, rate, seed).key] for seed in range(seeds)] for rate in rates}
        search = {rate: final_loss(some) for rate, some in by_rate.items()}
        methods[name] = judged(name, setting, search, by_rate[best_rate(search)])
    return methods


POLYNOMIAL_LENGTH = Study(
    name="polynomial-length",
    run=run,
    plot=plot_lengths,
    seeds=2,
    run_at=lambda steps: partial(run, steps=steps),
)
