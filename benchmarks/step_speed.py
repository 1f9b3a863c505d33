"""The cost of a training step on one GPU: the full model, k of L layers, static k-layer models, Hugging Face's models.

    python -m benchmarks.step_speed --data FOLDER [--case bert/base:256x128 ...]     (a folder made by `raptr prepare`)
    python -m benchmarks.step_speed --data FOLDER --case bert/base:256x128 --peers-only --out peers.json
    python -m benchmarks.step_speed --data FOLDER --case decoder/1.6b:32x512 --shared --no-peers --out one.json
    python -m benchmarks.step_speed --data FOLDER --case decoder/1.6b:32x512 --peers-only --apart --out peers.json
    python -m benchmarks.step_speed --data FOLDER --case decoder/1.6b:32x512 --shared --objective ul2 --no-peers
    python -m benchmarks.step_speed --data FOLDER --case bert/base:256x128 --axes --out axes_speed.json

FOLDER is prepared for the family's objective (`--objective causal` for a decoder) or for that of `--objective` here.

A step is a complete one: batch(step) from real text, upload, forward, backward, clipping, the check for non-finite
numbers, AdamW, and a record every ten steps. All ways are timed in blocks of one run, in a new random order each time,
by the device's clock. A number is the median of its blocks; the spread is half the distance from the smallest to the
largest. Also measured: an 8192x8192 matrix product in bfloat16 (the ceiling to which shares refer), peak memory,
recompiled graphs, synchronising calls, and where the full step's time goes.

The peers are Hugging Face's `BertForMaskedLM` or `LlamaForCausalLM` of the same dimensions on the same batches, with
bfloat16 autocast, SDPA, fused AdamW and clipping, but without the check for non-finite numbers and without records. The
stock model runs its head on all positions; `masked positions` gathers the masked ones first, as ours does (a decoder
has targets everywhere, so there only `all positions` is timed). Each way's share of the products' rate counts its own
FLOPs.
`--axes` times k of the heads, of the MLP parts, and of all axes at once, each beside a static model of that shape. The
optimizer also updates the weights of what did not run (with zero gradients), which the static model does not have. So
the update alone is timed for both, and the ratio is given with and without the difference. With `--idle skip` the
optimizer leaves these weights alone.
`--peers-only` times only the full model and the peers; `--peer NAME` (repeatable) picks some of them. Without a GPU,
`--peers-only` and `--shared` run on the CPU, as a trial.

Large models, of which only one or two fit on the GPU, need two more options. With `--shared` the static models use the
weights, the moments and the graph memory of the model of which k layers run (only `gather` is timed; peak memory is
measured before they are created). With `--apart` the peers are timed one after the other. `--objective ul2` times k of
L layers with that objective, and beside them a full step of causal training and one with Adafactor.
"""

import argparse
import gc
import json
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from benchmarks.stock import HEADS, PEERS, Stock, peer_loss
from raptr.data import open_store
from raptr.data.batch import Batch
from raptr.data.source import TrainData
from raptr.methods import make_method
from raptr.models import model as family
from raptr.models.contract import ModelConfig
from raptr.models.registry import FAMILIES
from raptr.objectives.registry import OBJECTIVES
from raptr.subnetworks import Schedule, Shape, Subnetwork
from raptr.subnetworks.schedule import LENGTHS, Lengths
from raptr.train.config import Config
from raptr.train.execution import Gather
from raptr.train.flops import flops
from raptr.train.loop import Trainer
from raptr.train.model import FROM_DATA
from raptr.train.run import RunFolder, environment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEMORY = "peak memory, bytes"
FORMS = ("gather", "skip", "zero")
FOREVER = 10**6  # planned length of the runs, of which only a few steps are done
CASES = ("bert/base:256x128", "bert/large:128x128", "bert/large:32x512", "bert/mini:256x128")
KINDS = {  # patterns of kernel names; the first that matches counts
    "matrix products": r"nvjet|gemm|cutlass|splitK",
    "attention": r"attention|sdpa|flash|cudnn",
    "activation": r"gelu|silu|swiglu",
    "optimizer and clipping": r"multi_tensor_apply|FusedOptimizer|lpnorm|lerp|_copy__div_mean|fused(_add)?_mean_pow",
    "rotation of queries and keys": r"_cat_|permute|select_backward|transpose",
    "normalisation and residuals": r"_norm|add_view|_fused_add|fused_mul|pow_rsqrt|pow_sum|unsafe_view_add",
    "cross entropy": r"cross_entropy|log_softmax|nll_loss",
    "copies and casts": r"Memcpy|memcpy|copy|Memset",
}


@dataclass(frozen=True)
class Case:
    """A model's family and size, and the sequences and tokens of a step."""

    family: str
    size: str
    batch: int
    length: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Read `bert/base:256x128`."""
        match = re.fullmatch(r"(\w+)/([\w.]+):(\d+)x(\d+)", text)
        if match is None:
            raise ValueError(f"case is {text!r}; FAMILY/SIZE:BATCHxLENGTH is allowed, such as bert/base:256x128")
        family, size, batch, length = match.groups()
        return cls(family, size, int(batch), int(length))

    @property
    def config(self) -> ModelConfig:
        """The dimensions of this size."""
        return FAMILIES[self.family].sizes[self.size]

    @property
    def tokens(self) -> int:
        """The number of tokens in a step."""
        return self.batch * self.length


class Bench:
    """The ways to time in one case: for each a step function and the FLOPs of a step."""

    def __init__(self, case: Case, data: Path, objective: str | None = None) -> None:
        self.case, self.store, self.device = case, open_store(data), torch.device(DEVICE)
        self.objective = objective or FAMILIES[case.family].objectives[0]
        self.folder = RunFolder(Path(tempfile.mkdtemp()))
        self.folder.path.mkdir(exist_ok=True)
        self.ways: dict[str, Callable[[], None]] = {}
        self.flops: dict[str, float] = {}

    def trainer(
        self,
        method: str,
        execution: str,
        *,
        layers: int | None = None,
        shape: Shape | None = None,
        objective: str | None = None,
        optimizer: dict[str, Any] | None = None,
    ) -> Trainer:
        """Return a trainer for the case; its model has this shape or number of layers, if given.

        RaPTr uses square-root scales, which cost more than none.
        """
        scaling = {"scaling": "sqrt"} if method == "raptr" else {}
        dimensions = asdict(self.case.config.resized(shape)) if shape else {"layers": layers}
        config = Config.read(
            {
                "model": {
                    "family": self.case.family,
                    "size": self.case.size,
                    **{key: value for key, value in dimensions.items() if key not in FROM_DATA},
                },
                "method": {"name": method, **scaling},
                "data": {"length": self.case.length},
                "objective": {"name": objective or self.objective},
                "optimizer": {"warmup": 1000, "peak": 1e-4, **(optimizer or {})},
                "train": {"steps": FOREVER, "batch": self.case.batch, "execution": execution},
            }
        )
        with self.device:
            trainer = Trainer(config, self.folder, self.store, self.device)
        trainer.readout.start()
        return trainer

    def way(self, name: str, trainer: Trainer, phase: int) -> None:
        """Add the steps of a trainer's phase under a name."""
        steps = count(trainer.method.phases()[phase].start)

        def step() -> None:
            subnetwork = trainer.method.subnetwork(next(steps))
            loss, norm = trainer.optimize(subnetwork)
            if trainer.step % 10 == 0:
                note = trainer.moment(kind="train", size=subnetwork.size)
                with (self.folder.path / "records.jsonl").open("a") as file:
                    for reading in trainer.readout.take(note, loss, norm, trainer.finite.first):
                        record = {**reading.note, "loss": reading.numbers[0], "seconds": reading.seconds}
                        file.write(json.dumps(record) + "\n")

        self.ways[name] = step
        self.flops[name] = trainer.cost(trainer.method.subnetwork(trainer.method.phases()[phase].start)).total

    def update(self, name: str, trainer: Trainer) -> None:
        """Add only the update of a trainer's step, with zero gradients; layers that do not run have none."""
        model, subnetwork = trainer.model, trainer.method.subnetwork(0)
        idle = {id(p) for layer, b in enumerate(model.blocks) if layer not in subnetwork.kept for p in b.parameters()}
        zeros = [(p, torch.zeros_like(p)) for p in trainer.parameters if id(p) not in idle]
        loss = torch.zeros((), device=DEVICE)

        def step() -> None:
            for parameter, zero in zeros:
                parameter.grad = zero
            trainer.update(loss, subnetwork)

        self.ways[name], self.flops[name] = step, 0.0

    def peer(self, name: str, model: torch.nn.Module, loss: Callable[[Batch], Tensor], *, masked: bool) -> None:
        """Add a plain training loop around a loss, whose head runs on the targets (`masked`) or on all positions."""
        objective, steps = OBJECTIVES[self.objective](self.store.vocabulary), count()
        data = TrainData(self.store, objective.window(self.case.length), self.case.batch, 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            batch = objective.training(data.windows(next(steps)), 0).to(self.device)
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                value = loss(batch)
            value.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        self.ways[name] = step
        config, positions = self.dimensions(), objective.targets(self.case.length) if masked else self.case.length
        cost: dict[str, Any] = {"sequences": self.case.batch, "length": self.case.length, "targets": positions}
        self.flops[name] = flops(config, _first(config.layers, config.layers), **cost).total

    def dimensions(self) -> ModelConfig:
        """Return the model's dimensions, with the vocabulary of the data and the length of the case."""
        return replace(self.case.config, vocabulary=self.store.vocabulary.size, positions=self.case.length)


def quick_weights(model: torch.nn.Module, seed: int, **_settings: object) -> None:
    """Set random weights on the GPU: their values do not matter here, and there are many models."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)


def milliseconds(step: Callable[[], object], steps: int) -> float:
    """Return the time per step by the device's clock."""
    if DEVICE == "cpu":
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - began) / steps * 1000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / steps


def matrix_rate() -> float:
    """Return the FLOP/s of a large bfloat16 matrix product of random numbers, or of a small one on a CPU.

    It is the largest of many short measurements: a card that was idle is slow at first, and one under load slows down.
    """
    side, times = (8192, 40) if DEVICE == "cuda" else (256, 3)
    x = torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16)
    return 2 * side**3 / min(milliseconds(lambda: x @ x, 20) for _ in range(times)) * 1000


def peak_memory(bench: Bench, sizes: list[int], execution: str) -> dict[str, Any]:
    """Return the peak memory at each size, in bytes: that of tensors, and that taken from the device.

    Static models are measured one by one; k of L layers in one model that goes through all stages, as in training.
    """
    result: dict[str, Any] = {"static": {}, "k of L": {}, "static, device": {}, "k of L, device": {}}

    def measure(trainer: Trainer, phase: int, kind: str, size: int) -> None:
        bench.way("memory", trainer, phase)
        _peak(bench.ways.pop("memory"), result, kind, size)

    for size in sizes:
        _collect()
        measure(bench.trainer("full", execution, layers=size), 0, "static", size)
    _collect()
    trainer = bench.trainer("raptr", execution)
    result["weights and moments of a layer"] = 12 * sum(p.numel() for p in trainer.model.blocks[0].parameters())
    for phase, size in enumerate(sizes):
        measure(trainer, phase, "k of L", size)
    del trainer
    _collect()
    return result


def _peak(step: Callable[[], None], result: dict[str, Any], kind: str, name: object) -> None:
    """Write the peak memory of three steps into `result`."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    _wait()
    result[kind][str(name)] = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    result[f"{kind}, device"][str(name)] = torch.cuda.max_memory_reserved() if DEVICE == "cuda" else 0


def _collect() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def add_peers(bench: Bench, names: tuple[str, ...]) -> None:
    """Add Hugging Face's model in each of the named ways."""
    # If layers are compiled one by one, the default limit of 8 could leave the rest of them eager.
    torch._dynamo.config.recompile_limit = 64
    for name in names:
        _, head, how = name.split(", ")
        if head == "masked positions" and bench.case.family == "decoder":
            continue  # every position is a target
        with bench.device:
            stock = Stock(bench.dimensions())
        bench.peer(name, stock.model, peer_loss(stock, HEADS[head], how), masked=head == "masked positions")


def where_time_goes(step: Callable[[], None], steps: int = 5) -> dict[str, float]:
    """Return the device's milliseconds of a step by kind of kernel."""
    if DEVICE == "cpu":
        return {}
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(steps):
            step()
        _wait()
    times: dict[str, float] = defaultdict(float)
    for event in trace.events():
        if event.device_type == torch._C._autograd.DeviceType.CUDA and not event.is_user_annotation:
            kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, event.name)), "the rest")
            times[kind] += event.device_time_total / 1000 / steps
            times["all"] += event.device_time_total / 1000 / steps
    return {kind: round(value, 3) for kind, value in sorted(times.items(), key=lambda item: -item[1])}


def measure(bench: Bench, *, blocks: int, steps: int, peers: tuple[str, ...], memory: bool) -> dict[str, Any]:
    """Time all ways of one case."""
    layers = bench.case.config.layers
    sizes = [stage.size for stage in Schedule.recommended(layers, FOREVER).stages]
    stored = {form: peak_memory(bench, sizes, form) for form in ("skip", "gather")} if memory else {}
    raptr = bench.trainer("raptr", "gather")
    skip, zero = bench.trainer("raptr", "skip"), copy(raptr)
    zero.policy = "zero"
    for phase, size in enumerate(sizes):
        for name, trainer in (("gather", raptr), ("skip", skip), ("zero", zero)):
            bench.way(f"{name} {size}", trainer, phase)
        bench.way(f"static {size}", bench.trainer("full", "gather", layers=size), 0)
    add_peers(bench, peers)
    return {**_timed_sizes(bench, sizes, blocks, steps), "peak memory": stored}


def measure_shared(bench: Bench, *, blocks: int, steps: int, peers: tuple[str, ...]) -> dict[str, Any]:
    """Time `gather` and static models that all use the weights, moments and graph memory of one model."""
    layers = bench.case.config.layers
    sizes = [stage.size for stage in Schedule.recommended(layers, FOREVER).stages]
    raptr = bench.trainer("raptr", "gather")
    stored: dict[str, dict[str, int]] = {"k of L": {}, "k of L, device": {}}
    for phase, size in enumerate(sizes):
        bench.way(f"gather {size}", raptr, phase)
        _peak(bench.ways[f"gather {size}"], stored, "k of L", size)
    for size in sizes:
        bench.way(f"static {size}", _sharing(bench.trainer("full", "gather", layers=size), raptr), 0)
    if bench.objective != FAMILIES[bench.case.family].objectives[0]:
        first = FAMILIES[bench.case.family].objectives[0]
        bench.way(f"{first} {layers}", _sharing(bench.trainer("full", "gather", objective=first), raptr), 0)
        settings = {"name": "adafactor", "peak": 1e-3, "clip": 0.0}
        adafactor = bench.trainer("full", "gather", optimizer=settings)
        bench.way(f"adafactor {layers}", _sharing(adafactor, raptr, moments=False), 0)
    add_peers(bench, peers)
    return {**_timed_sizes(bench, sizes, blocks, steps), "peak memory": {"gather": stored}}


def _sharing(trainer: Trainer, whole: Trainer, *, moments: bool = True) -> Trainer:
    """Give the trainer the weights, moments and graph memory of another that has run: only one runs at a time."""
    theirs = dict(whole.model.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        parameter.data = theirs[name].data
        if moments:
            trainer.optimizer.state[parameter] = whole.optimizer.state[theirs[name]]
    assert isinstance(trainer.execution, Gather)
    assert isinstance(whole.execution, Gather)
    trainer.execution._memory = whole.execution._memory
    return trainer


def _timed_sizes(bench: Bench, sizes: list[int], blocks: int, steps: int) -> dict[str, Any]:
    """Time every way; for k of L layers, also count synchronising calls and see where the time goes."""
    timed, forms = interleaved(bench, blocks, steps), [form for form in FORMS if f"{form} {sizes[0]}" in bench.ways]
    return {
        **timed,
        "sizes": sizes,
        "synchronising calls": {
            name: _synchronising(bench.ways[name])
            for name in (f"{form} {sizes[0]}" for form in forms)
            if not name.startswith("zero")
        },
        "where the time goes": {
            name: where_time_goes(bench.ways[name])
            for name in (f"{form} {sizes[-1]}" for form in forms)
            if not name.startswith("zero")
        },
    }


def measure_peers(bench: Bench, *, blocks: int, steps: int, peers: tuple[str, ...], apart: bool) -> dict[str, Any]:
    """Time our full model and the peers, in turns or (`apart`) one after the other."""
    ours = f"static {bench.case.config.layers}"
    bench.way(ours, bench.trainer("full", "auto"), 0)
    if not apart:
        add_peers(bench, peers)
        return interleaved(bench, blocks, steps)
    results = [_alone(bench, ours, blocks, steps)]
    for name in peers:
        add_peers(bench, (name,))
        if name in bench.ways:
            results.append(_alone(bench, name, blocks, steps))
    rates = [result.pop("rate") for result in results]
    return {
        **results[0],
        "milliseconds": {name: times for result in results for name, times in result["milliseconds"].items()},
        "recompiled graphs": sum(result["recompiled graphs"] for result in results),
        **{
            kind: {name: size for result in results for name, size in result[kind].items()}
            for kind in (MEMORY, f"{MEMORY}, device")
        },
        "matrix product each time, FLOP/s": rates,
    }


def _alone(bench: Bench, name: str, blocks: int, steps: int) -> dict[str, Any]:
    """Time one way and measure its peak memory, then drop its models."""
    stored: dict[str, dict[str, int]] = {MEMORY: {}, f"{MEMORY}, device": {}}
    result = interleaved(bench, blocks, steps)
    _peak(bench.ways[name], stored, MEMORY, name)
    bench.ways.clear()
    _collect()
    return {**result, **stored, "rate": matrix_rate()}


def measure_axes(bench: Bench, *, blocks: int, steps: int, idle: str) -> dict[str, Any]:
    """Time subnetworks that are smaller on one axis, and on all at once, beside static models of these shapes."""
    whole, narrow = bench.case.config.shape, bench.trainer("raptr", "gather", optimizer={"idle": idle})
    bench.way("full", bench.trainer("full", "gather"), 0)
    rows = narrow_shapes(whole)
    for name, shape in rows.items():
        sizes = {"schedule": "layers", "heads": "heads", "parts": "parts"}
        settings: dict[str, Any] = {
            setting: f"{getattr(shape, axis)}-{getattr(whole, axis)}" for setting, axis in sizes.items()
        }
        trainer = copy(narrow)  # the copies share a model, its optimizer and the memory of the graphs
        trainer.method = make_method("raptr", shape=whole, steps=FOREVER, scaling="sqrt", **settings)
        bench.way(name, trainer, 0)
        bench.update(f"update, {name}", trainer)
        static = bench.trainer("full", "gather", shape=shape)
        bench.way(f"static, {name}", static, 0)
        bench.update(f"update, static, {name}", static)
    return {**interleaved(bench, blocks, steps), "axes": list(rows), "idle": idle}


def narrow_shapes(whole: Shape) -> dict[str, Shape]:
    """Return the shapes to time: half and 3/4 of the heads, 1/4 and half of the MLP parts, and half of every axis."""
    heads, parts = (
        [max(1, whole.heads * share // 4) for share in (2, 3)],
        [max(1, whole.parts * s // 4) for s in (1, 2)],
    )
    half = Shape(max(1, whole.layers // 2), heads[0], parts[-1])
    return {
        **{f"{k} of {whole.heads} heads": replace(whole, heads=k) for k in heads},
        **{f"{k} of {whole.parts} MLP parts": replace(whole, parts=k) for k in parts},
        f"{half.layers} layers, {half.heads} heads, {half.parts} MLP parts": half,
    }


def interleaved(bench: Bench, blocks: int, steps: int) -> dict[str, Any]:
    """Time every way in blocks, each time in a new random order."""
    for name, step in bench.ways.items():
        began = time.perf_counter()
        for _ in range(4):
            step()
        _wait()
        print(f"  ready: {name}, {time.perf_counter() - began:.0f} s", flush=True)
    compiled = counters["stats"]["unique_graphs"]
    times: dict[str, list[float]] = defaultdict(list)
    order = Random()
    for _ in range(blocks):
        for name in order.sample(list(bench.ways), len(bench.ways)):
            milliseconds(bench.ways[name], steps)  # not counted: the card's clock settles at this way's power
            times[name].append(milliseconds(bench.ways[name], steps))
    case = bench.case
    return {
        "case": f"{case.family}/{case.size}:{case.batch}x{case.length}",
        "tokens": case.tokens,
        "flops": bench.flops,
        "milliseconds": {name: times[name] for name in bench.ways},
        "recompiled graphs": counters["stats"]["unique_graphs"] - compiled,
    }


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _synchronising(step: Callable[[], None]) -> int:
    """Return how many calls in 9 steps made the program wait for the device."""
    import warnings

    if DEVICE == "cpu":
        return 0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(9):
            step()
        torch.cuda.set_sync_debug_mode("default")
    # torch also warns once that the mode may miss calls, which does not count.
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def _first(size: int, layers: int) -> Subnetwork:
    return Subnetwork(tuple(float(layer < size) for layer in range(layers)))


def tables(result: dict[str, Any], rate: float) -> str:
    """Format a case's results as Markdown."""
    times, counted = result["milliseconds"], result["flops"]
    lines = ["", f"**{result['case']}**", "", "| way | ms a step | spread | tokens/s | share of the products' rate |"]
    lines.append("|---|---|---|---|---|")
    for name, blocks in times.items():
        middle, spread = statistics.median(blocks), (max(blocks) - min(blocks)) / 2
        share = counted[name] / middle / rate * 1000
        lines.append(
            f"| {name} | {middle:.2f} | {spread:.2f} | {result['tokens'] / middle * 1000:,.0f} | {share:.3f} |"
        )
    lines += ["", f"Recompiled: {result['recompiled graphs']}."]
    if "axes" in result:
        lines += _axes_table(result)
    return "\n".join([*lines, *_subnetwork_tables(result)] if "sizes" in result else lines)


def _axes_table(result: dict[str, Any]) -> list[str]:
    """Compare each subnetwork with the static model of its shape, and with the full model."""
    times, counted = result["milliseconds"], result["flops"]
    lines = [
        "",
        "| part | ms | static model | ratio | update of idle weights, ms | ratio without it | of the full step |",
    ]
    lines[-1] += " FLOPs of the full step |"
    lines.append("|---" * 8 + "|")
    for name in result["axes"]:
        narrow, static = times[name], times[f"static, {name}"]
        updates = zip(times[f"update, {name}"], times[f"update, static, {name}"], strict=True)
        idle = [one - other for one, other in updates]
        without = paired([one - spent for one, spent in zip(narrow, idle, strict=True)], static)
        cells = [
            f"{statistics.median(narrow):.2f}",
            f"{statistics.median(static):.2f}",
            f"{paired(narrow, static):.4f}",
            f"{statistics.median(idle):.2f}",
            f"{without:.4f}",
            f"{paired(narrow, times['full']):.4f}",
            f"{counted[name] / counted['full']:.4f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _subnetwork_tables(result: dict[str, Any]) -> list[str]:
    """Format what is measured of k of L layers only: ratios, speed-up, kernels, memory."""
    times, sizes = result["milliseconds"], result["sizes"]
    lines = ["", f"| form | {' | '.join(f'{k} / static' for k in sizes)} | stages | speed-up | counted | ratio |"]
    lines.append("|---" * (len(sizes) + 5) + "|")
    for form in FORMS:
        if f"{form} {sizes[0]}" not in times:
            continue
        ratios = [paired(times[f"{form} {k}"], times[f"static {k}"]) for k in sizes]
        for lengths in LENGTHS:
            seen, possible = speed_up(result, form, lengths)
            cells = [*(f"{ratio:.4f}" for ratio in ratios), lengths, f"{seen:.4f}", f"{possible:.4f}"]
            lines.append(f"| {form} | {' | '.join(cells)} | {seen / possible:.4f} |")
    lines += ["", f"Synchronising: {result['synchronising calls']}.", ""]
    lines += [f"{name}, ms by kind of kernel: {where}" for name, where in result["where the time goes"].items()]
    for form, memory in result["peak memory"].items():
        for k in sizes:
            line = f"peak memory, {form} {k}: {memory['k of L'][str(k)] / 2**30:.3f} GiB"
            if "static" in memory:
                allowed = memory["static"][str(k)] + (sizes[-1] - k) * memory["weights and moments of a layer"]
                line += f", {allowed / 2**30:.3f} allowed"
            lines.append(line)
    return lines


def speed_up(result: dict[str, Any], form: str, lengths: Lengths = "equal") -> tuple[float, float]:
    """Return the speed-up of the stages over all layers in every step: by the clock, and counted in FLOPs."""
    times, names = result["milliseconds"], [f"{form} {k}" for k in result["sizes"]]
    shares = [1.0 if lengths == "equal" else place for place in range(1, len(names) + 1)]
    means = [fmean(block, shares) for block in zip(*(times[name] for name in names), strict=True)]
    counted = [result["flops"][name] for name in names]
    return paired(times[names[-1]], means), counted[-1] / fmean(counted, shares)


def paired(ones: list[float], others: list[float]) -> float:
    """Return the median over blocks of the ratio of two ways' times."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--case", action="append", help="FAMILY/SIZE:BATCHxLENGTH; repeatable")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peers-only", action="store_true", help="only the full model and the peers")
    parser.add_argument("--axes", action="store_true", help="only heads, MLP parts and all axes, beside static models")
    parser.add_argument("--idle", default="zero", choices=("zero", "skip"), help="with --axes: optimizer.idle (zero)")
    parser.add_argument("--peer", action="append", choices=PEERS, help="only this peer; repeatable")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--shared", action="store_true", help="all models with the weights and the memory of one")
    parser.add_argument("--apart", action="store_true", help="peers one after the other")
    parser.add_argument("--objective", choices=OBJECTIVES, help="the family's first unless given")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_speed.json")
    parser.add_argument("--show", action="store_true", help="print the tables of the result that is there")
    options = parser.parse_args(arguments)
    options.command = shlex.join(["python", "-m", "benchmarks.step_speed", *(arguments or sys.argv[1:])])
    if options.show:
        record = json.loads(options.out.read_text())
        print("\n".join(tables(case, record["matrix product, FLOP/s"]) for case in record["cases"]))
        return
    with patch.object(family, "initialise", quick_weights):
        _measure(options)


def _measure(given: argparse.Namespace) -> None:
    """Measure the chosen cases, and write each result at once."""
    rate, cases, peers = matrix_rate(), [], tuple(given.peer or PEERS)
    print(f"matrix product: {rate / 1e12:.0f} TFLOP/s", flush=True)
    for number, text in enumerate(given.case or CASES):
        case, timing = Case.parse(text), {"blocks": given.blocks, "steps": given.steps}
        bench, timed = Bench(case, given.data, given.objective), peers if number == 0 and not given.no_peers else ()
        if given.axes:
            result = measure_axes(bench, **timing, idle=given.idle)
        elif given.peers_only:
            result = measure_peers(bench, peers=peers, apart=given.apart, **timing)
        elif given.shared:
            result = measure_shared(bench, peers=timed, **timing)
        else:
            result = measure(bench, peers=timed, memory=number == 0 and not given.no_memory, **timing)
        del bench
        cases.append(result)
        _collect()
        rate = max(rate, matrix_rate())
        print(tables(result, rate), flush=True)
        written = {"matrix product, FLOP/s": rate, "blocks": given.blocks, "steps": given.steps, "cases": cases}
        described = {"command": given.command, "environment": environment()}
        given.out.write_text(json.dumps({**written, **described}, indent=2) + "\n")


if __name__ == "__main__":
    main()
