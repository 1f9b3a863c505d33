"""Schedules that meet a target cost: `raptr plan --target-flops 0.67`.

For each set of axes (depth, heads, mlp), every axis starts at the same share of its units and rises to all of them, by
equal steps or by equal factors, in three or four stages of equal or proportional length. Of the schedules that cost no
more than the target, the one nearest to it is taken: it drops the least. Costs are the whole model's FLOPs, relative to
full training with the same number of steps.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from typing import Any

from rich.console import Console
from rich.table import Table

from raptr.methods.axes import AXES
from raptr.methods.raptr import RaPTr
from raptr.subnetworks import Shape
from raptr.subnetworks.schedule import LENGTHS
from raptr.train.config import Config
from raptr.train.plan import plan_run
from raptr.train.progress import duration

STAGES = (3, 4)
UNITS = {"depth": "layers", "heads": "heads", "mlp": "parts"}  # each axis and its field of a Shape
CHOSEN = ("schedule", "heads", "parts", "average")  # settings of the method that a target replaces


@dataclass(frozen=True)
class Candidate:
    """A schedule on some axes, its cost, and how long the run takes on this machine (None: not measured)."""

    sizes: Mapping[str, str]  # by axis
    lengths: str
    layers_flops: float
    model_flops: float
    hours: float | None = None

    @property
    def text(self) -> str:
        """The schedules as the command line accepts them."""
        return " ".join(f"{axis}={sizes}" for axis, sizes in self.sizes.items())


def meeting(config: Config, target: float) -> tuple[list[Candidate], list[Candidate]]:
    """Return each set of axes' schedule nearest to the target from below, and the cheapest for sets that miss it."""
    if config.method["name"] != RaPTr.name:
        raise ValueError(f"--target-flops is {target:g} with method {config.method['name']}. Use raptr.")
    for key in CHOSEN:
        if config.method.get(key) is not None:
            raise ValueError(f"--target-flops is {target:g} with method.{key}, which it chooses. Give one of them.")
    if not 0 < target < 1:
        raise ValueError(f"--target-flops is {target:g}; a number above 0 and below 1, full training's, is allowed")
    shape = config.dimensions.shape
    optimizer = config.optimizer
    refusing = {"muon": "optimizer.name muon"}  # optimizers that refuse idle heads and parts, and by which setting
    if optimizer.idle == "skip":
        refusing["adafactor"] = "optimizer.idle skip"
    allowed = ["depth"] if optimizer.name in refusing else list(AXES)
    met, missed = [], []
    for count in range(1, len(allowed) + 1):
        for axes in combinations(allowed, count):
            tried = (priced(config, sizes, lengths) for sizes, lengths in schedules(config, shape, axes))
            costs = [found for found in tried if found is not None]
            enough = [found for found in costs if found.model_flops <= target]
            if enough:
                met.append(max(enough, key=lambda found: found.model_flops))
            elif costs:
                missed.append(min(costs, key=lambda found: found.model_flops))
    if not met and not missed:
        limits = [f"method.{key}" for key in ("fixed", "groups") if config.method.get(key) is not None]
        limits += [refusing[optimizer.name]] if optimizer.name in refusing else []
        others = f", or leave out {' and '.join(limits)}, with which fewer schedules are allowed" if limits else ""
        raise ValueError(
            f"--target-flops is {target:g}, but this model has no smaller schedule. Use more layers{others}."
        )
    return sorted(met, key=lambda found: -found.model_flops), missed


def schedules(config: Config, shape: Shape, axes: tuple[str, ...]) -> Iterator[tuple[dict[str, str], str]]:
    """Yield all sizes and lengths to try for a set of axes; on each axis the first stage is smaller than the last."""
    units = {axis: getattr(shape, UNITS[axis]) for axis in axes}
    least = {"depth": min(2, shape.layers), "heads": 1, "mlp": 1}  # the first and the last layer always run
    lengths = config.method.get("lengths")
    shares = sorted({first / count for axis, count in units.items() for first in range(least[axis], count)})
    tried = set()
    for share, stages, rising in product(shares, STAGES, (_evenly, _by_factors)):
        starts = {axis: max(share * count, least[axis]) for axis, count in units.items()}
        sizes = {axis: rising(starts[axis], count, stages) for axis, count in units.items()}
        if all(row[0] < row[-1] for row in sizes.values()) and (key := tuple(sizes.values())) not in tried:
            tried.add(key)
            for kind in [lengths] if lengths else LENGTHS:
                yield {axis: "-".join(map(str, row)) for axis, row in sizes.items()}, kind


def priced(config: Config, sizes: Mapping[str, str], lengths: str) -> Candidate | None:
    """Return what a run with these schedules costs; None if another setting (fixed, groups) does not allow them."""
    try:
        chosen = scheduled(config, sizes, lengths)
    except ValueError:
        return None
    planned = plan_run(chosen)
    return Candidate(sizes, lengths, planned.relative_layers, planned.relative_model)


def scheduled(config: Config, sizes: Mapping[str, str], lengths: str) -> Config:
    """Return the configuration with these schedules."""
    settings = {AXES[axis]: text for axis, text in sizes.items()}
    return replace(config, method={**config.method, **settings, "lengths": lengths})


def show_targets(config: Config, target: float, *, timed: bool, as_json: bool) -> None:
    """Print the schedules that meet the target: the fastest first if `timed`, else the nearest to the target first."""
    met, missed = meeting(config, target)
    if not met:
        best = min(missed, key=lambda found: found.model_flops)
        raise ValueError(
            f"--target-flops is {target:g}, but no schedule of three or four stages costs so little. The cheapest is "
            f"{best.text} with {best.lengths} stages, at {best.model_flops:.3f} of full training's FLOPs."
        )
    if timed:
        from raptr.train.measure import measure  # imports the training loop, which a plan does not need

        shown = Console(stderr=True)
        times = [measure(scheduled(config, found.sizes, found.lengths), shown).hours for found in met]
        met = [replace(found, hours=hours) for hours, found in sorted(zip(times, met, strict=True), key=lambda t: t[0])]
    if as_json:
        record: dict[str, Any] = {"target": target, "schedules": [asdict(found) for found in met]}
        print(json.dumps({**record, "missed": [asdict(found) for found in missed]}, indent=2), flush=True)
    else:
        Console().print(targets_table(met, missed, target))


def targets_table(met: list[Candidate], missed: list[Candidate], target: float) -> Table:
    """Return the schedules as a table for the terminal."""
    timed = any(found.hours is not None for found in met)
    table = Table(title=f"schedules with at most {target:g} of full training's FLOPs")
    for column in ("schedule", "lengths", "layers'\nFLOPs", "model's\nFLOPs", *(["time"] if timed else [])):
        table.add_column(column, justify="left" if column in ("schedule", "lengths") else "right")
    for found in met:
        time = [duration(found.hours * 3600)] if found.hours is not None else []
        table.add_row(found.text, found.lengths, f"{found.layers_flops:.3f}", f"{found.model_flops:.3f}", *time)
    rule = "The fastest first" if timed else "The nearest to the target first"
    table.caption = f"{rule}. Use one with raptr pretrain --schedule AXIS=SIZES, once for each axis, and --lengths."
    if missed:
        names = ", ".join(f"{' and '.join(found.sizes)} ({found.model_flops:.3f})" for found in missed)
        table.caption += f" Not below the target: {names}."
    return table


def _evenly(first: float, last: int, stages: int) -> tuple[int, ...]:
    """Return sizes that rise by equal steps, with halves rounded up."""
    return tuple(int(first + (last - first) * stage / (stages - 1) + 0.5) for stage in range(stages))


def _by_factors(first: float, last: int, stages: int) -> tuple[int, ...]:
    """Return sizes that rise by equal factors, like 1-2-4, with halves rounded up."""
    return tuple(int(first * (last / first) ** (stage / (stages - 1)) + 0.5) for stage in range(stages))
