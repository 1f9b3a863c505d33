"""Many residual MLPs trained together: steps per second, summed over the runs, compared with one plain run at a time.

    python benchmarks/polynomial_speed.py                    (the study's full setting, on one GPU)
    python benchmarks/polynomial_speed.py --small --device cpu

Interleaved blocks in one run: RaPTr (8-12-16-20, Bernoulli) in its third stage, which keeps 16 of 20 layers on average.
Together: the study's trainer with 12 runs of two seeds; all layers are computed, the bypassed ones times 0, as a CUDA
graph on a GPU. Plain: an `nn.Module` for one run, with autograd and fused Adam, which really skips layers. Both use
the study's inputs, scales drawn beforehand, and TF32 for matrix products on a GPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from raptr.studies.polynomial import SMALL, Job, Setting, rates, scales
from raptr.studies.polynomial_target import Points, Target
from raptr.studies.residual_mlp import Networks
from raptr.studies.residual_mlp_training import AHEAD, Training
from raptr.train.idle import idle
from raptr.train.run import environment

BLOCKS = 3
RUNS, SEEDS = 12, 2


class Plain(nn.Module):
    """One network, which skips the layers whose scale is 0."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        inputs, hidden = setting.size.inputs, setting.size.hidden
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, inputs))
            for _ in range(setting.layers)
        )
        self.readout = nn.Linear(inputs, 1)

    def forward(self, x: Tensor, factors: list[float]) -> Tensor:
        """Return F, (batch,)."""
        for layer, factor in zip(self.layers, factors, strict=True):
            if factor:
                x = torch.add(x, layer(x), alpha=factor)
        output: Tensor = self.readout(x).squeeze(1)
        return output


class Data:
    """The study's inputs and labels for some seeds."""

    def __init__(self, setting: Setting, seeds: int, runs: int, device: str) -> None:
        size = {"inputs": setting.inputs, "variables": setting.variables}
        self._points = Points(range(seeds), "data", samples=setting.batch, **size, device=device)
        tables = [Target(setting.variables, setting.degrees, setting.terms, seed).table() for seed in range(seeds)]
        self._tables = torch.from_numpy(np.stack(tables)).to(device, torch.float32)
        self._owner = torch.arange(runs, device=device) % seeds

    def batch(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return a step's inputs (runs, batch, inputs) and labels (runs, batch)."""
        signs, numbers = self._points.at(step)
        return signs.float()[self._owner], self._tables.gather(1, numbers)[self._owner]


def together(setting: Setting, device: str, first: int) -> Callable[[int], None]:
    """Return a function that trains all runs for some steps."""
    jobs = [Job("raptr", 1e-4, run % SEEDS) for run in range(RUNS)]
    drawn = scales(None, setting, [jobs[0]], first, first + AHEAD)
    networks = Networks(setting.size, [job.seed for job in jobs], device=device, dtype=torch.float32)
    data = Data(setting, SEEDS, RUNS, device)
    # One run's draws, shifted by one step for each further run: cheap to make, and different layers in each run.
    stacked = torch.cat([drawn.roll(run, 0) for run in range(RUNS)], 1)
    training = Training(networks, data.batch, lambda start, stop: stacked[: stop - start], rates(setting, jobs))
    return lambda steps: training.advance(training.done + steps)


def plain(setting: Setting, device: str, first: int) -> Callable[[int], None]:
    """Return a function that trains one run for some steps."""
    drawn = scales(None, setting, [Job("raptr", 1e-3, 0)], first, first + AHEAD)[:, 0].tolist()
    model, data = Plain(setting).to(device), Data(setting, 1, 1, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    number, done = torch.zeros(1, dtype=torch.int64, device=device), 0

    def advance(steps: int) -> None:
        nonlocal done
        for _ in range(steps):
            x, target = data.batch(number)
            loss = (model(x[0], drawn[done % AHEAD]) - target[0]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            idle(optimizer, "zero")
            optimizer.step()
            number.add_(1)
            done += 1

    return advance


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=60, help="steps in a block")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "polynomial_speed.json")
    arguments = parser.parse_args()
    setting, device = SMALL if arguments.small else Setting(), arguments.device
    torch.set_float32_matmul_precision("high" if device.startswith("cuda") else "highest")
    third = setting.steps * 3 // 10
    ways = {"plain": (1, plain(setting, device, third))}
    ways[f"together, {RUNS} runs"] = RUNS, together(setting, device, third)
    rate: dict[str, list[float]] = {way: [] for way in ways}
    for block in range(BLOCKS + 1):
        for way, (runs, advance) in ways.items():
            _wait(device)
            started = time.perf_counter()
            advance(arguments.steps)
            _wait(device)
            if block:  # the first block warms up and captures
                rate[way].append(runs * arguments.steps / (time.perf_counter() - started))
    medians = {way: statistics.median(values) for way, values in rate.items()}
    result = {
        "command": "python benchmarks/polynomial_speed.py" + " --small" * arguments.small,
        "environment": environment(),
        "setting": f"{setting}, {BLOCKS} interleaved blocks of {arguments.steps} steps on {device}",
        "training steps per second, summed over runs": {
            way: {"median": medians[way], "blocks": rate[way]} for way in ways
        },
        "together / plain": {way: medians[way] / medians["plain"] for way in ways if way != "plain"},
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print({way: round(value, 1) for way, value in medians.items()})
    print({way: round(value, 2) for way, value in result["together / plain"].items()})


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
