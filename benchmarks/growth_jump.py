"""How far the held-out loss jumps when a stage begins, and how soon training makes up for it, for each way to grow.

    python benchmarks/growth_jump.py

For each seed, a three-layer version of the demo's model is trained for half of a run and then grown to six layers. Each
way to grow starts from the same weights and moments. Its loss is measured right before the growth, right after, and
some steps later, and compared with that of the model which goes on without growing. New layers of the gated ways are
evaluated with the gate that they have at that step.

RaPTr does not grow: it has six layers from the start, of which three run until then. Its loss right before is the mean
over random subnetworks of three layers, scaled as in training.
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
    """Return the demo's settings for a run of STEPS steps."""
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
    """Return the held-out loss of a subnetwork, by default of the one that the next step runs."""
    part = part or trainer.method.subnetwork(trainer.step)
    return evaluate(trainer.model, trainer.objective, trainer.held_out, part, batch=64).loss


def advance(trainer: Trainer, last: int) -> None:
    """Train up to step `last` without writing anything."""
    while trainer.step < last:
        trainer.optimize(trainer.method.subnetwork(trainer.step))


def trainer_of(method: dict[str, Any], seed: int, store: TokenStore, folder: RunFolder, layers: int = LARGE) -> Trainer:
    """Return a trainer at step 0."""
    return Trainer(config(method, seed, layers), folder, store, torch.device("cpu"))


def taken_up(chosen: Config, small: Trainer, store: TokenStore, folder: RunFolder) -> Trainer:
    """Return a trainer of another method with the small model's weights, moments and step."""
    trainer = Trainer(chosen, folder, store, torch.device("cpu"))
    trainer.build(small.shape)
    weights = small.weights()
    for name, tensor in trainer.weights().items():
        tensor.copy_(weights[name])
    state = state_tensors(small.optimizer, small.model)
    load_state(trainer.optimizer, trainer.model, {name: tensor.clone() for name, tensor in state.items()})
    trainer.step = small.step
    return trainer


def later(trainer: Trainer) -> list[float]:
    """Return the losses after each number of further steps in LATER."""
    start, losses = trainer.step, []
    for steps in LATER:
        advance(trainer, start + steps)
        losses.append(loss(trainer))
    return losses


def measure(seed: int, store: TokenStore, folder: RunFolder) -> dict[str, Any]:
    """Measure one seed: for each way, the loss before the growth and the losses after it."""
    small, middle = trainer_of({"name": "full"}, seed, store, folder, SMALL), STEPS // 2
    advance(small, middle)
    before, losses = loss(small), {}
    for way, method in WAYS.items():
        trainer = taken_up(config({**method, "schedule": f"{SMALL}-{LARGE}"}, seed), small, store, folder)
        trainer.grow(trainer.method.shape(trainer.step))
        losses[way] = {"before": before, "after": later(trainer)}
    losses["not grown"] = {"before": before, "after": later(small)}
    for way, method in PARTS.items():
        trainer = trainer_of({**method, "schedule": f"{SMALL}-{LARGE}"}, seed, store, folder)
        advance(trainer, middle)
        drawn = [loss(trainer, trainer.method.drawn(SMALL, draw, middle)) for draw in range(DRAWS)]
        losses[way] = {"before": statistics.mean(drawn), "after": later(trainer)}
    for way, row in losses.items():
        print(seed, way, row, flush=True)
    return {"seed": seed, "losses": losses}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "growth_jump.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = RunFolder(Path(temporary) / "run")
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
