"""The time of a step by the number of running layers, under each engine and in a single process without an engine.

    torchrun --standalone --nproc-per-node 1 benchmarks/parallel_speed.py [--family bert] [--size base] [--batch 256]
        [--length 128] [--layers 6 8 10 12] [--rounds 5] [--steps 10] [--device cuda] [--way NAME] [--out FILE]

With one process every message is sent to itself, so what remains is the cost of an engine besides the network. The
saving that k of L layers realise, (time(L) - time(k)) / time(L), is given relative to the counted one, that of the
FLOPs of the whole model. The sizes are timed in turn, in several rounds of several steps each, so that changes of the
GPU's clock affect all alike. The steps are those of a run (`Trainer`), on random tokens.
"""

import argparse
import gc
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from raptr.distributed.processes import ALONE, Processes, joined
from raptr.train.config import Config
from raptr.train.flops import flops
from raptr.train.loop import Trainer
from raptr.train.measure import _random_store
from raptr.train.run import RunFolder, environment

WAYS: dict[str, dict[str, str]] = {  # the settings of each way; without `parallel`, each process trains alone
    "one process, skip": {"execution": "skip"},
    "one process, gather": {"execution": "gather"},
    "one process, shared": {"execution": "shared"},  # the paper's form
    "ddp, skip": {"execution": "skip", "parallel": "ddp"},
    "ddp, gather": {"execution": "gather", "parallel": "ddp"},
    "fsdp": {"execution": "skip", "parallel": "fsdp"},
    "hsdp": {"execution": "skip", "parallel": "hsdp"},
}


def main() -> None:
    """Time every way and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="bert")
    parser.add_argument("--size", default="base")
    parser.add_argument("--batch", type=int, default=256, help="sequences per step of all processes together")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 8, 10, 12])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this way; repeatable")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "parallel_speed.json")
    options = parser.parse_args()
    with joined() as processes, TemporaryDirectory() as folder:
        if processes.control is None:
            raise SystemExit("Start it with torchrun.")
        result: dict[str, Any] = {
            "settings": {key: value for key, value in vars(options).items() if key != "out"},
            "processes": processes.size,
            "counted": counted(options, Path(folder)),
            "ways": {},
            "environment": environment(),
        }
        for name in options.way or WAYS:
            result["ways"][name] = timed(name, options, Path(folder), processes)
            if processes.first:  # after each way, so that a stop keeps what is measured
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    if processes.first:
        print(table(result))


def config(given: argparse.Namespace, **train: Any) -> Config:
    """Return the configuration of a run of the model; its schedule does not matter."""
    settings = {"steps": 1000, "batch": given.batch, "device": given.device, **train}
    return Config.read(
        {
            "model": {"family": given.family, "size": given.size},
            "data": {"length": given.length, "vocabulary": 30_000},
            "train": settings,
        }
    )


def trainer_for(name: str, given: argparse.Namespace, folder: Path, processes: Processes) -> Trainer:
    """Return the trainer of a run in one of the ways."""
    chosen = config(given, **WAYS[name])
    settled = chosen.resolved()
    device = torch.device(settled.train.device)
    layout = ALONE if settled.train.parallel is None else processes.laid_out(settled.train.parallel, None, device)
    if layout is ALONE and processes.size > 1:  # the same work for each process as with an engine
        settled = replace(settled, train=replace(settled.train, batch=given.batch // processes.size))
    store = _random_store(folder, 30_000, given.length, chosen.objective.kind.specials)
    return Trainer(settled, RunFolder(folder, writes=False), store, device, layout)


def timed(name: str, given: argparse.Namespace, folder: Path, processes: Processes) -> dict[str, Any]:
    """Return each size's milliseconds per step (the median of the rounds, and every round) and the peak memory."""
    trainer = trainer_for(name, given, folder, processes)
    rounds: dict[int, list[float]] = {size: [] for size in given.layers}
    for number in range(given.rounds + 1):
        for size in given.layers:
            start = _now(trainer.device)
            for step in range(given.steps):
                subnetwork = trainer.method.drawn(size, step % 4, trainer.config.train.steps - 1)
                trainer.update(trainer.gradients(subnetwork), subnetwork)
            if number:  # the first round compiles, captures and allocates
                rounds[size].append((_now(trainer.device) - start) * 1000 / given.steps)
    memory = torch.cuda.max_memory_allocated() if trainer.device.type == "cuda" else None
    middle = {str(size): statistics.median(times) for size, times in rounds.items()}
    del trainer
    gc.collect()  # an engine's hooks and its model refer to each other
    if given.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {"milliseconds": middle, "rounds": {str(size): times for size, times in rounds.items()}, "memory": memory}


def counted(given: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the FLOPs of a step at each size, relative to the largest."""
    chosen = config(given)
    dimensions = chosen.model.build(30_000, given.length)
    method = chosen.make_method()
    costs = {size: flops(dimensions, method.drawn(size, 0, 999), **chosen.step_load).total for size in given.layers}
    return {str(size): cost / costs[max(given.layers)] for size, cost in costs.items()}


def table(result: dict[str, Any]) -> str:
    """Format the times, and the realised savings relative to the counted ones."""
    sizes = list(result["counted"])
    whole = max(sizes, key=int)
    head = ["way", *(f"{size} layers" for size in sizes), *(f"saving {size}" for size in sizes if size != whole)]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for name, way in result["ways"].items():
        times = way["milliseconds"]
        saved = {size: 1 - times[size] / times[whole] for size in sizes if size != whole}
        parts = [f"{saving / (1 - result['counted'][size]):.2f}" for size, saving in saved.items()]
        lines.append(" | ".join([name, *(f"{times[size]:.1f} ms" for size in sizes), *parts]))
    return "\n".join(f"| {line} |" for line in lines)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
