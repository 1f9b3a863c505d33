"""Measuring how long a run will take on this machine: a few real training steps of each stage, on random tokens.

The steps are the run's own (`Trainer`), with its model, optimizer, precision and form of execution. The first steps of
a stage are not timed, since they compile and allocate. The time of the gradients is scaled by FLOPs: to the mean size
of the stage's steps and, on a CPU where a whole batch would take too long, from a smaller batch to the whole one.
"""

import time
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console

from raptr.data.store import DTYPES, OFFSETS, DomainShards, Manifest, Shard, TokenStore, dtype_for
from raptr.data.tokenizer import Specials, Vocabulary
from raptr.methods import Phase
from raptr.subnetworks import Subnetwork
from raptr.train.config import Config
from raptr.train.flops import expected_flops, flops
from raptr.train.loop import Trainer
from raptr.train.progress import peak_memory
from raptr.train.run import RunFolder
from raptr.train.safety import reproducible

DRAWS = 8  # steps of a stage, spread over it, that are timed again and again
ENOUGH = 2.0  # seconds of timed steps for each stage
SMALLEST = 4  # sequences per step: with fewer, the fixed cost of a step weighs too much
LONGEST = 2.0  # seconds for a step's gradients on a CPU, estimated from matrix products alone
WINDOWS = 1024  # sequences of random text


@dataclass(frozen=True)
class StageTime:
    """The time of one step of a stage, and of the whole stage."""

    stage: int
    steps: int
    step_seconds: float
    hours: float


@dataclass(frozen=True)
class Measurement:
    """The estimated time of all steps of a run, without evaluations and checkpoints."""

    device: str
    gpu_found: bool
    batch: int  # sequences per step of the run
    timed_batch: int  # sequences per step in the timed steps
    length: int
    stages: tuple[StageTime, ...]
    hours: float
    peak_memory: int  # bytes: of tensors on the GPU, or of this process


def measure(config: Config, console: Console | None = None) -> Measurement:
    """Time some steps of each stage of a run on this machine, and estimate the time of the whole run."""
    console, device = console or Console(quiet=True), config.train.resolve_device()
    cuda = device.type == "cuda"
    dimensions = config.model.build(config.vocabulary_size(), config.data.length)
    full = flops(dimensions, Subnetwork.full(dimensions.layers), **config.step_load)
    batch = config.train.batch if cuda else _affordable(config, full.total)
    timed = config
    if batch != config.train.batch:
        timed = replace(config, train=replace(config.train, batch=batch, accumulate=1))
    if cuda:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats(device)
    with TemporaryDirectory() as folder, console.status("building the model …") as status:
        try:
            with reproducible(config.train.deterministic):
                specials = config.objective.kind.specials
                store = _random_store(Path(folder), dimensions.vocabulary, config.data.length, specials)
                trainer = Trainer(timed, RunFolder(Path(folder)), store, device)
                phases = trainer.method.phases()
                stages = []
                for number, phase in enumerate(phases, start=1):
                    status.update(f"timing stage {number} of {len(phases)} …")
                    pace, update = _time(trainer, phase)
                    seconds = pace * expected_flops(dimensions, phase, **config.step_load).total + update
                    steps = phase.stop - phase.start
                    stages.append(StageTime(number, steps, seconds, seconds * steps / 3600))
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"train.batch is {config.train.batch} in {config.train.accumulate} micro-batches (train.accumulate), "
                f"for which the memory of {_name(device)} is too small; use a smaller batch or more micro-batches"
            ) from error
    return Measurement(
        device=_name(device),
        gpu_found=torch.cuda.is_available(),
        batch=config.train.batch,
        timed_batch=batch,
        length=config.data.length,
        stages=tuple(stages),
        hours=sum(stage.hours for stage in stages),
        peak_memory=peak_memory(device),
    )


def _time(trainer: Trainer, phase: Phase) -> tuple[float, float]:
    """Return a stage's seconds per FLOP of gradients, and per update; on a GPU the update counts as gradients."""
    length, cuda = phase.stop - phase.start, trainer.device.type == "cuda"
    steps = sorted({phase.start + draw * length // DRAWS for draw in range(DRAWS)})
    for step in steps if cuda else steps[:1]:  # on a GPU each kind of subnetwork is compiled when it first occurs
        _train(trainer, step)
    gradients = updates = spent = 0.0
    count, rounds = 0, cycle([steps] if cuda else [[step] for step in steps])
    while gradients + updates < ENOUGH:
        start = _now(trainer.device)
        timed = [_train(trainer, step) for step in next(rounds)]
        end = _now(trainer.device)
        updated = 0.0 if cuda else sum(step.update for step in timed)  # a GPU is not synchronised between the two
        gradients, updates = gradients + end - start - updated, updates + updated
        spent, count = spent + sum(step.flops for step in timed), count + len(timed)
    return gradients / spent, updates / count


class _Step(NamedTuple):
    """The FLOPs of a step, and the seconds that Python spent in its update."""

    flops: float
    update: float


def _train(trainer: Trainer, step: int) -> _Step:
    """Train step `step` of the run, and grow the model before it if need be."""
    if trainer.shape != (shape := trainer.method.shape(step)):
        trainer.grow(shape)
    trainer.step = step
    subnetwork = trainer.method.subnetwork(step)
    loss = trainer.gradients(subnetwork)
    start = time.perf_counter()
    trainer.update(loss, subnetwork)
    return _Step(trainer.cost(subnetwork).total, time.perf_counter() - start)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _affordable(config: Config, cost: float) -> int:
    """Return how many sequences per step a CPU can time, in whole cycles of the objective; a batch has `cost` FLOPs."""
    matrix = torch.ones(1024, 1024)
    matrix @ matrix  # not timed: the first product starts threads
    start = time.perf_counter()
    for _ in range(4):
        matrix @ matrix
    seconds = cost * (time.perf_counter() - start) / (4 * 2 * 1024**3)
    settings, samples = config.train, config.objective.cycle
    if seconds <= LONGEST:
        return settings.batch
    wanted = max(SMALLEST, int(settings.batch * LONGEST / seconds)) // samples * samples
    return min(settings.batch // settings.accumulate, max(samples, wanted))


def _random_store(folder: Path, vocabulary: int, length: int, specials: Specials) -> TokenStore:
    """Return prepared data of one domain, whose text is a single document of random tokens."""
    dtype, count, first = dtype_for(vocabulary), WINDOWS * length, len(specials.tokens)
    tokens = np.random.default_rng(0).integers(first, vocabulary, count)
    tokens.astype(DTYPES[dtype]).tofile(folder / "random.tokens")
    np.array([count], OFFSETS).tofile(folder / "random.documents")
    shards = (Shard("random.tokens", count, 1, "", ""),)
    manifest = Manifest(vocabulary, dtype, "", (DomainShards("random", 1.0, shards, shards),))
    names = (*specials.tokens, *(f"random{number}" for number in range(first, vocabulary)))
    return TokenStore(folder, manifest, Vocabulary({name: number for number, name in enumerate(names)}))


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"the CPU, {threads} thread{'s' if threads > 1 else ''}"
