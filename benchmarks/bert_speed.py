"""What a training step costs on one GPU: the full model, k of L layers, static k-layer models, and other people's.

    python benchmarks/bert_speed.py --data FOLDER [--case base:256x128 ...]     (a folder made by `raptr prepare`)

A step is the whole of it: batch(step) from real text, upload, forward, backward, clipping, the check for bad
numbers, AdamW, and a record every ten steps. All ways are timed in blocks of one run, each in an order of its own, by
the device's clock; a number is the median of its blocks, the spread half the distance from the smallest to the largest.
Beside them: a 8192x8192 matrix product in bfloat16 (the ceiling that shares are given of), peak memory, recompiled
graphs and synchronising calls while it runs, and where the full step's time goes.
"""

import argparse
import gc
import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from raptr.data import open_store
from raptr.models import bert
from raptr.subnetworks import Schedule, Subnetwork
from raptr.train.config import Config
from raptr.train.flops import flops
from raptr.train.loop import Trainer
from raptr.train.run import RunFolder, environment

FOREVER = 10**6  # steps that the runs are planned for; a few are made
KINDS = {
    "matrix products": r"nvjet|gemm|cutlass|splitK",
    "attention": r"attention|sdpa|flash",
    "activation": r"gelu",
    "normalisation and residuals": r"_norm|add_view|_fused_add|fused_mul",
    "optimizer and clipping": r"multi_tensor_apply|FusedOptimizer|lpnorm",
    "cross entropy": r"cross_entropy|log_softmax|nll_loss",
    "copies and casts": r"Memcpy|memcpy|copy|Memset",
}


@dataclass(frozen=True)
class Case:
    """A model's size and the sequences and tokens of a step."""

    size: str
    batch: int
    length: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Read `base:256x128`."""
        size, batch, length = re.fullmatch(r"(\w+):(\d+)x(\d+)", text).groups()  # type: ignore[union-attr]
        return cls(size, int(batch), int(length))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


class Bench:
    """The trainers of one case, and a step function for each way."""

    def __init__(self, case: Case, data: Path) -> None:
        self.case, self.store, self.device = case, open_store(data), torch.device("cuda")
        self.folder = RunFolder(Path(tempfile.mkdtemp()))
        self.folder.path.mkdir(exist_ok=True)
        self.ways: dict[str, Callable[[], None]] = {}

    def trainer(self, method: str, execution: str, *, layers: int | None = None, idle: str = "skip") -> Trainer:
        """A run in memory; RaPTr's with scales, which cost more than none."""
        scaling = {"scaling": "sqrt"} if method == "raptr" else {}
        config = Config.read(
            {
                "model": {"size": self.case.size, "layers": layers},
                "method": {"name": method, **scaling},
                "data": {"length": self.case.length, "vocabulary": self.store.vocabulary.size},
                "optimizer": {"warmup": 1000, "peak": 1e-4, "idle": idle},
                "train": {"steps": FOREVER, "batch": self.case.batch, "execution": execution},
            }
        )
        with torch.device("cuda"):
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
                for reading in trainer.readout.take(note, loss, norm, trainer.finite.first):
                    self.folder.record({**reading.note, "loss": reading.numbers[0], "seconds": reading.seconds})

        self.ways[name] = step


def quick_weights(model: torch.nn.Module, seed: int) -> None:
    """Random weights made on the GPU: their values do not matter here, and there are many models."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)


def milliseconds(step: Callable[[], object], steps: int) -> float:
    """Time per step by the device's clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / steps


def matrix_rate() -> float:
    """FLOP/s of a large bfloat16 matrix product on random numbers."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    milliseconds(lambda: x @ x, 20)
    return 2 * 8192**3 / statistics.median(milliseconds(lambda: x @ x, 20) for _ in range(3)) * 1000


def peak_memory(bench: Bench, sizes: list[int], execution: str) -> dict[str, Any]:
    """The most memory that tensors took, and that was taken from the device, at each size, in bytes.

    Static models one by one; k of L layers in one model that goes through all stages, as training does.
    """
    result: dict[str, Any] = {"static": {}, "k of L": {}, "static, device": {}, "k of L, device": {}}

    def measure(trainer: Trainer, phase: int, kind: str, size: int) -> None:
        bench.way("memory", trainer, phase)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            bench.ways["memory"]()
        torch.cuda.synchronize()
        result[kind][str(size)] = torch.cuda.max_memory_allocated()
        result[f"{kind}, device"][str(size)] = torch.cuda.max_memory_reserved()
        del bench.ways["memory"]

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


def _collect() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def peers(case: Case, vocabulary: int) -> dict[str, Callable[[], None]]:
    """Hugging Face's BertForMaskedLM in the same kind of loop, eager and compiled."""
    from transformers import BertConfig, BertForMaskedLM

    size = bert.SIZES[case.size]
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.mlp,
        max_position_embeddings=case.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokens = torch.randint(5, vocabulary, (case.batch, case.length), device="cuda")
    labels = torch.where(torch.rand(tokens.shape, device="cuda") < 0.15, tokens, -100)
    ways = {}
    for name in ("Hugging Face, eager", "Hugging Face, compiled"):
        model = BertForMaskedLM(config).cuda().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        run = torch.compile(model) if name.endswith("compiled") else model

        def step(run: Any = run, model: Any = model, optimizer: Any = optimizer) -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = run(input_ids=tokens, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        ways[name] = step
    return ways


def where_time_goes(step: Callable[[], None], steps: int = 5) -> dict[str, float]:
    """Device milliseconds of a step by kind of kernel."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, event.name)), "the rest")
            times[kind] += event.device_time_total / 1000 / steps
            times["all"] += event.device_time_total / 1000 / steps
    return {kind: round(value, 3) for kind, value in sorted(times.items(), key=lambda item: -item[1])}


def measure(case: Case, data: Path, *, blocks: int, steps: int, with_peers: bool, memory: bool) -> dict[str, Any]:
    """All ways of one case."""
    bench = Bench(case, data)
    sizes = [stage.size for stage in Schedule.recommended(bert.SIZES[case.size].layers, FOREVER).stages]
    stored = {form: peak_memory(bench, sizes, form) for form in ("skip", "gather")} if memory else {}
    raptr = bench.trainer("raptr", "gather")
    skip, zero = bench.trainer("raptr", "skip"), copy(raptr)
    zero.config = replace(raptr.config, optimizer=replace(raptr.config.optimizer, idle="zero"))
    for phase, size in enumerate(sizes):
        for name, trainer in (("gather", raptr), ("skip", skip), ("zero", zero)):
            bench.way(f"{name} {size}", trainer, phase)
        bench.way(f"static {size}", bench.trainer("full", "gather", layers=size), 0)
    if with_peers:
        bench.ways |= peers(case, bench.store.vocabulary.size)
    for name, step in bench.ways.items():
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        print(f"  ready: {name}", flush=True)
    compiled = counters["stats"]["unique_graphs"]
    times: dict[str, list[float]] = defaultdict(list)
    order = Random()
    for _ in range(blocks):
        for name in order.sample(list(bench.ways), len(bench.ways)):
            milliseconds(bench.ways[name], steps)  # the card's clock settles at the power that this way draws
            times[name].append(milliseconds(bench.ways[name], steps))
    recompiled = counters["stats"]["unique_graphs"] - compiled
    syncs = {name: _synchronising(bench.ways[name]) for name in (f"gather {sizes[0]}", f"skip {sizes[0]}")}
    cost = {"sequences": case.batch, "length": case.length, "masked": raptr.config.data.masked}
    return {
        "case": f"{case.size}:{case.batch}x{case.length}",
        "sizes": sizes,
        "tokens": case.tokens,
        "flops": {str(k): flops(raptr.dimensions, _first(k, sizes[-1]), **cost).total for k in sizes},
        "milliseconds": {name: times[name] for name in bench.ways},
        "recompiled graphs": recompiled,
        "synchronising calls": syncs,
        "peak memory": stored,
        "where the time goes": {
            name: where_time_goes(bench.ways[name]) for name in (f"gather {sizes[-1]}", f"skip {sizes[-1]}")
        },
    }


def _synchronising(step: Callable[[], None]) -> int:
    """How many calls of 9 steps made the program wait for the device."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(9):
            step()
        torch.cuda.set_sync_debug_mode("default")
    # torch says once that its mode may miss some: that is no call.
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def _first(size: int, layers: int) -> Subnetwork:
    return Subnetwork(tuple(float(layer < size) for layer in range(layers)))


def tables(result: dict[str, Any], rate: float) -> str:
    """A case's results in Markdown."""
    times, sizes, counted = result["milliseconds"], result["sizes"], result["flops"]
    full = str(sizes[-1])
    lines = ["", f"**{result['case']}**", "", "| way | ms a step | spread | tokens/s | share of the products' rate |"]
    lines.append("|---|---|---|---|---|")
    for name, blocks in times.items():
        middle, spread = statistics.median(blocks), (max(blocks) - min(blocks)) / 2
        share = counted.get(name.split()[-1], counted[full]) / middle / rate * 1000
        lines.append(
            f"| {name} | {middle:.2f} | {spread:.2f} | {result['tokens'] / middle * 1000:,.0f} | {share:.3f} |"
        )
    lines += ["", f"| form | {' | '.join(f'{k} / static' for k in sizes)} | speed-up, equal stages | counted | ratio |"]
    lines.append("|---" * (len(sizes) + 4) + "|")
    for form in ("gather", "skip", "zero"):
        ratios = [_paired(times[f"{form} {k}"], times[f"static {k}"]) for k in sizes]
        means = [statistics.mean(block) for block in zip(*(times[f"{form} {k}"] for k in sizes), strict=True)]
        seen, possible = _paired(times[f"{form} {full}"], means), counted[full] / statistics.mean(counted.values())
        cells = [*(f"{ratio:.4f}" for ratio in ratios), f"{seen:.4f}", f"{possible:.4f}", f"{seen / possible:.4f}"]
        lines.append(f"| {form} | {' | '.join(cells)} |")
    lines += ["", f"Recompiled: {result['recompiled graphs']}. Synchronising: {result['synchronising calls']}.", ""]
    lines += [f"{name}, ms by kind of kernel: {where}" for name, where in result["where the time goes"].items()]
    for form, found in result["peak memory"].items():
        layer = found["weights and moments of a layer"]
        for k in sizes:
            allowed = found["static"][str(k)] + (sizes[-1] - k) * layer
            lines.append(
                f"peak memory, {form} {k}: {found['k of L'][str(k)] / 2**30:.3f} GiB, {allowed / 2**30:.3f} allowed"
            )
    return "\n".join(lines)


def _paired(ones: list[float], others: list[float]) -> float:
    """The median ratio of two ways in the same block."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--case", action="append", help="SIZE:BATCHxLENGTH; repeatable")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "bert_speed.json")
    parser.add_argument("--show", action="store_true", help="print the tables of the result that is there")
    given = parser.parse_args()
    if given.show:
        there = json.loads(given.out.read_text())
        print("\n".join(tables(case, there["matrix product, FLOP/s"]) for case in there["cases"]))
        return
    bert.initialise = quick_weights
    rate, cases = matrix_rate(), []
    print(f"matrix product: {rate / 1e12:.0f} TFLOP/s", flush=True)
    for number, text in enumerate(given.case or ["base:256x128", "large:128x128", "large:32x512", "mini:256x128"]):
        result = measure(
            Case.parse(text),
            given.data,
            blocks=given.blocks,
            steps=given.steps,
            with_peers=number == 0 and not given.no_peers,
            memory=number == 0 and not given.no_memory,
        )
        cases.append(result)
        print(tables(result, rate), flush=True)
        _collect()
        written = {"matrix product, FLOP/s": rate, "blocks": given.blocks, "steps": given.steps, "cases": cases}
        given.out.write_text(json.dumps({**written, "environment": environment()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
