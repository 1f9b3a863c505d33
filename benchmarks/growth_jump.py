"""How far the held-out loss jumps when a stage begins, and how soon the jump is made up, for each way to grow.

    python benchmarks/growth_jump.py

Three layers of the demo's model are trained for half of a run, once for each seed, and then become six. Each way to
grow gets the same weights and moments: its loss right before the growth, right after, and some steps later, beside
that of the model which goes on without growing. New layers of the gated ways are judged under the gate they have.

RaPTr does not grow: it has six layers from the start, of which three run until then. Its loss right before is the mean
over random parts of three layers, scaled as in training.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from raptr.data import TokenStore
from raptr.subnetworks import Subnetwork
from raptr.train.config import Config
from raptr.train.evaluate import evaluate
from raptr.train.loop import Trainer
from raptr.train.opening import open_data
from raptr.train.optimizer import load_state, state_tensors
from raptr.train.run import RunFolder, environment

SEEDS, STEPS, LATER, MASK = (0, 1, 2), 400, (0, 10, 40), 20
SMALL, LARGE, DRAWS = 3, 6, 16
WAYS: dict[str, dict[str, Any]] = {
    "on top, moments copied (stacking, progressive-stacking)": {"name": "stacking"},
    "on top, moments zero": {"name": "stacking", "moments": "zero"},
    "on top, all moments reset": {"name": "stacking", "moments": "reset"},
    "beside, moments copied (lemon)": {"name": "lemon"},
    "beside, identity, moments copied (lemon, init=zero)": {"name": "lemon", "init": "zero"},
    "on top, gated, moments zero (msg)": {"name": "msg", "mask_steps": MASK},
    "beside, gated, moments zero (msg-interpolation)": {"name": "msg-interpolation", "mask_steps": MASK},
}
PARTS: dict[str, dict[str, Any]] = {
    "random parts (raptr)": {"name": "raptr"},
    "random parts, square root (raptr, scaling=sqrt)": {"name": "raptr", "scaling": "sqrt"},
}


def config(method: dict[str, Any], seed: int, layers: int = LARGE) -> Config:
    """The demo's settings, of another length."""
    return Config.read(
        {
            "model": {"size": "tiny", "layers": layers},
            "method": method,
            "data": {"source": "builtin", "vocabulary": 2048, "length": 64},
            "optimizer": {"peak": 1e-3, "warmup": 40},
            "train": {"steps": STEPS, "batch": 16, "eval_samples": 256, "seed": seed, "device": "cpu"},
        }
    )


def loss(trainer: Trainer, part: Subnetwork | None = None) -> float:
    """The held-out loss of a part of the model, or of what the next step runs."""
    part = part or trainer.method.subnetwork(trainer.step)
    return evaluate(trainer.model, trainer.objective, trainer.held_out, part, batch=64).loss


def advance(trainer: Trainer, last: int) -> None:
    """Train up to step `last`, writing nothing."""
    while trainer.step < last:
        trainer.optimize(trainer.method.subnetwork(trainer.step))


def trainer_of(method: dict[str, Any], seed: int, store: TokenStore, folder: RunFolder, layers: int = LARGE) -> Trainer:
    """A trainer at step 0."""
    return Trainer(config(method, seed, layers), folder, store, torch.device("cpu"))


def taken_up(chosen: Config, small: Trainer, store: TokenStore, folder: RunFolder) -> Trainer:
    """A trainer of another method, with the weights, moments and step of the small model's."""
    trainer = Trainer(chosen, folder, store, torch.device("cpu"))
    trainer.build(small.shape)
    there = small.weights()
    for name, tensor in trainer.weights().items():
        tensor.copy_(there[name])
    state = state_tensors(small.optimizer, small.model)
    load_state(trainer.optimizer, trainer.model, {name: tensor.clone() for name, tensor in state.items()})
    trainer.step = small.step
    return trainer


def later(trainer: Trainer) -> list[float]:
    """The losses 0 steps after now, and some steps later."""
    start, losses = trainer.step, []
    for steps in LATER:
        advance(trainer, start + steps)
        losses.append(loss(trainer))
    return losses


def measure(seed: int, store: TokenStore, folder: RunFolder) -> dict[str, Any]:
    """One seed: in each way, the loss before the growth and the losses after it."""
    small, middle = trainer_of({"name": "full"}, seed, store, folder, SMALL), STEPS // 2
    advance(small, middle)
    before, found = loss(small), {}
    for way, method in WAYS.items():
        trainer = taken_up(config({**method, "schedule": f"{SMALL}-{LARGE}"}, seed), small, store, folder)
        trainer.grow(trainer.method.shape(trainer.step))
        found[way] = {"before": before, "after": later(trainer)}
    found["not grown"] = {"before": before, "after": later(small)}
    for way, method in PARTS.items():
        trainer = trainer_of({**method, "schedule": f"{SMALL}-{LARGE}"}, seed, store, folder)
        advance(trainer, middle)
        drawn = [loss(trainer, trainer.method.drawn(SMALL, draw, middle)) for draw in range(DRAWS)]
        found[way] = {"before": statistics.mean(drawn), "after": later(trainer)}
    for way, row in found.items():
        print(seed, way, row, flush=True)
    return {"seed": seed, "losses": found}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "growth_jump.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run")
        store = open_data(config({"name": "full"}, 0), folder.path, Console(stderr=True))
        runs = [measure(seed, store, folder) for seed in SEEDS]
    change: dict[str, list[dict[str, float]]] = {}
    for way in runs[0]["losses"]:
        rows = [run["losses"][way] for run in runs]
        columns = zip(*([value - row["before"] for value in row["after"]] for row in rows), strict=True)
        change[way] = [{"mean": statistics.mean(at), "deviation": statistics.stdev(at)} for at in columns]
    result = {
        "command": "python benchmarks/growth_jump.py",
        "environment": environment(),
        "setting": f"tiny BERT, {SMALL} to {LARGE} layers, built-in text, vocabulary 2048, 16 x 64 tokens a step, "
        f"peak 1e-3 after a warm-up of 40 steps, growth at step {STEPS // 2}, seeds {SEEDS}, mask_steps {MASK}, "
        f"{DRAWS} random parts",
        "what": f"held-out loss (nats a masked token, 256 windows) minus that right before the growth, {LATER} "
        "steps after it; mean and standard deviation over seeds",
        "change": change,
        "runs": runs,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for way, row in change.items():
        print(f"{way:60}", "  ".join(f"{at['mean']:+.4f} ± {at['deviation']:.4f}" for at in row))


if __name__ == "__main__":
    main()
