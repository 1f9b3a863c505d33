"""Runs in memory for the tests of reports."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from raptr.report.runs import EvalRecord, Run, TrainRecord

MakeRun = Callable[..., Run]


def build(
    name: str = "a",
    *,
    sizes: Sequence[int] = (12,),
    steps: int = 400,
    upto: int | None = None,
    every: int = 10,
    eval_every: int = 100,
    compiling: float = 0.0,
    overhead: float = 1.0,
    method: str | None = None,
    config: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> Run:
    """A run with equal stages: a step takes 10 ms a layer and `overhead` times 10 ms, and 1 TFLOP a layer and 1."""
    train, evals = [], []
    layers, seconds = 0, 0.0
    for step in range((steps if upto is None else upto) + 1):
        stage = max(0, step - 1) * len(sizes) // steps
        if step:
            layers += sizes[stage]
            seconds += 0.01 * (sizes[stage] + overhead)
            seconds += compiling if (step - 1) % (steps // len(sizes)) == 0 else 0
        loss = 3 + 5 * math.exp(-8 * step / steps)
        cost: dict[str, Any] = {
            "tokens": 1000 * step,
            "flops": 1e12 * (layers + step),
            "flops_layers": 1e12 * layers,
            "seconds": seconds,
        }
        if step and step % every == 0:
            train.append(TrainRecord(step, stage + 1, len(sizes), sizes[stage], loss + 0.1, **cost))
        if step % eval_every == 0:
            evals.append(EvalRecord(step, loss, **cost))
    settings = {"name": method or ("raptr" if len(sizes) > 1 else "full")}
    if len(sizes) > 1:
        settings["schedule"] = "-".join(map(str, sizes))
    return Run(
        path=Path("runs") / name,
        name=name,
        config={"method": settings, "train": {"steps": steps, "batch": 8}, **(config or {})},
        environment={"python": "3.11", "gpu": None, **(environment or {})},
        train=tuple(train),
        evals=tuple(evals),
    )


@pytest.fixture
def make_run() -> MakeRun:
    """The builder of runs, since test files cannot import one another."""
    return build
