"""What methods save under Hugging Face's `Trainer` on one GPU: step times of every stage, compared with their FLOPs.

    python benchmarks/trainer_speed.py [--case bert ...] [--compile] [--out FILE.json]
    python benchmarks/trainer_speed.py --tiny --out FILE.json     (a trial, on the CPU too)

Stock models with random weights and random tokens: BERT-Base (`BertForMaskedLM`, 128 sequences of 128 tokens) and a
Llama of 110M parameters (`LlamaForCausalLM`, 32 sequences of 512). Bfloat16 autocast, SDPA, fused AdamW and clipping
are the `Trainer`'s own. Four ways take turns: without the callback, with `SubnetworkCallback("full")`, with RaPTr
6-8-10-12 and with progressive stacking 3-6-12. `--compile` adds the last three with compile=True. A step lasts from one
`on_step_begin` to the next, by the device's clock. A number is the median over a stage's steps of all rounds, without
the first steps of each stage.

FLOPs are those of matrix products, counted by `torch.utils.flop_counter` on one sequence with the plain attention
kernel. The realised speed-up is the time of a full step without the callback over the mean of the stages' times, each
weighted by the stage's share of the method's steps; the counted speed-up is the same ratio of FLOPs. The stock heads
run on all positions.
"""

import argparse
import gc
import json
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from raptr.integrations.transformers import SubnetworkCallback
from raptr.models.attach import attach, running
from raptr.subnetworks import Subnetwork
from raptr.train.run import environment

GPU = torch.cuda.is_available()
LAYERS = 12
# The sizes of the stages of each method, and their shares of its steps.
METHODS = {
    "raptr": {6: 0.25, 8: 0.25, 10: 0.25, LAYERS: 0.25},
    "progressive-stacking": {3: 0.2, 6: 0.2, LAYERS: 0.6},
}
SETTINGS: dict[str, dict[str, Any]] = {"raptr": {"scaling": "sqrt"}}  # the paper's, which costs more than none
BASE: dict[str, Any] = {"num_hidden_layers": LAYERS, "hidden_size": 768, "num_attention_heads": 12}
TINY: dict[str, Any] = {**BASE, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}


@dataclass(frozen=True)
class Case:
    """A stock model and the batch of a step."""

    make: Callable[[], nn.Module]
    sequences: int
    length: int
    vocabulary: int
    masked: bool


def bert(**sizes: Any) -> nn.Module:
    """Return BERT for masked language modelling, without dropout, as in the project's own runs."""
    settings: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForMaskedLM(hf.BertConfig(**{"intermediate_size": 3072, **settings, **sizes}))


def llama(**sizes: Any) -> nn.Module:
    """Return a Llama that uses one matrix for embedding and head."""
    settings: dict[str, Any] = {"intermediate_size": 2048, "tie_word_embeddings": True, "use_cache": False, **sizes}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**settings))


CASES = {
    "bert": Case(lambda: bert(vocab_size=30522, **BASE), 128, 128, 30522, True),
    "llama": Case(lambda: llama(vocab_size=32000, **BASE), 32, 512, 32000, False),
}
TINY_CASES = {
    "bert": Case(lambda: bert(vocab_size=100, **TINY), 2, 16, 100, True),
    "llama": Case(lambda: llama(vocab_size=100, **TINY), 2, 16, 100, False),
}


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of random tokens; with `masked`, 15% of them are targets."""

    def __init__(self, case: Case, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(case.vocabulary, (rows, case.length), generator=generator)
        hidden = torch.rand(self.tokens.shape, generator=generator) > (0.15 if case.masked else 1.0)
        self.labels = self.tokens.masked_fill(hidden, -100)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[row], "labels": self.labels[row]}


class Clock(hf.TrainerCallback):
    """Records when each step begins."""

    def __init__(self) -> None:
        self.ticks: list[Any] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Record the time, by the GPU's clock if there is one."""
        if GPU:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.ticks.append(event)
        else:
            self.ticks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Return the time from the beginning of each step to the next."""
        pairs = zip(self.ticks, self.ticks[1:], strict=False)
        if GPU:
            torch.cuda.synchronize()
            return [float(before.elapsed_time(after)) for before, after in pairs]
        return [(after - before) * 1000 for before, after in pairs]


def train(model: nn.Module, case: Case, steps: int, callbacks: list[Any]) -> list[float]:
    """Train once with the `Trainer`, and return the milliseconds of each step."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "method .* overwrites")  # one model is trained in all ways; only times count
        arguments = hf.TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=case.sequences,
            bf16=True,
            optim="adamw_torch_fused",
            learning_rate=1e-4,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=GPU,
            use_cpu=not GPU,
        )
        rows = Rows(case, case.sequences * steps)  # one epoch
        hf.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[*callbacks, clock]).train()
    return clock.milliseconds()


def counted(model: nn.Module, case: Case) -> dict[int, float]:
    """Return the FLOPs of a step, forward and backward, at each size k: the first k - 1 layers and the last."""
    routed, costs = attach(model), {}
    batch = {name: value[None] for name, value in Rows(case, 1)[0].items()}
    model.set_attn_implementation("eager")  # type: ignore[operator]
    for size in sorted({size for stages in METHODS.values() for size in stages}):
        kept = (*range(size - 1), routed.layers - 1)
        subnetwork = Subnetwork(tuple(float(layer in kept) for layer in range(routed.layers)))
        with FlopCounterMode(display=False) as counter, running(routed, subnetwork):
            model(**batch).loss.backward()
        costs[size] = float(counter.get_total_flops() * case.sequences)
        model.zero_grad()
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    return costs


def callback(way: str) -> list[Any]:
    """Return the callbacks of a way of training; the stages of a method are equally long here."""
    method, _, compiled = way.partition(", ")
    if method == "no callback":
        return []
    settings = dict(SETTINGS.get(method, {}))
    if method in METHODS:
        settings["schedule"] = "-".join(map(str, METHODS[method]))
    return [SubnetworkCallback(method, compile=bool(compiled), **settings)]


def measure(
    name: str,
    case: Case,
    *,
    steps: int,
    warm: int,
    rounds: int,
    compiled: bool,
    until: float,
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Time full steps and the steps of each stage in every way; save the result after each training."""
    model = case.make()
    flops = counted(model, case)
    times: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    plain = ["no callback", "full", *METHODS]
    later = [f"{way}, compiled" for way in plain[1:]] if compiled else []  # last, since blocks stay compiled
    for way in plain * rounds + later * rounds:
        if time.perf_counter() > until:
            print(f"{name}: no time left for {way}", flush=True)
            continue
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        stages = METHODS.get(way.partition(", ")[0], {LAYERS: 1.0})
        each = train(model, case, steps * len(stages), callback(way))
        for stage, size in enumerate(stages):
            label = f"{way}, {size} layers"
            times.setdefault(label, []).extend(each[stage * steps + warm : (stage + 1) * steps])
        memory[way] = torch.cuda.max_memory_allocated() if GPU else 0
        save(
            {
                "case": name,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "sequences": case.sequences,
                "length": case.length,
                "flops": flops,
                "milliseconds": {label: summary(values) for label, values in times.items()},
                "peak memory, bytes": memory,
                "speed-up": speedups(flops, {label: statistics.median(values) for label, values in times.items()}),
            }
        )


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "lower quartile": low, "upper quartile": high, "steps": len(values)}


def speedups(flops: dict[int, float], medians: dict[str, float]) -> dict[str, float]:
    """Return each method's speed-up over full training: counted, and realised in each way."""
    ratios = {}
    for method, shares in METHODS.items():
        ratios[f"counted, {method}"] = flops[LAYERS] / sum(flops[size] * share for size, share in shares.items())
        for way, baseline in ((method, "no callback"), (f"{method}, compiled", "full, compiled")):
            full, stages = f"{baseline}, {LAYERS} layers", {f"{way}, {size} layers": shares[size] for size in shares}
            if full in medians and stages.keys() <= medians.keys():
                mean = sum(medians[label] * share for label, share in stages.items())
                ratios[f"realised, {way} against {baseline}"] = medians[full] / mean
    return ratios


def table(result: dict[str, Any]) -> str:
    """Format one case as Markdown, for the terminal and for a page."""
    flops = {int(size): value for size, value in result["flops"].items()}
    medians = {label: values["median"] for label, values in result["milliseconds"].items()}
    lines = [f"{result['case']}: {result['sequences']} sequences of {result['length']} tokens", ""]
    lines += ["| way | ms | time | FLOPs |", "|---|---|---|---|"]
    for label, median in medians.items():
        baseline = "full, compiled" if "compiled" in label else "no callback"
        share = median / medians[f"{baseline}, {LAYERS} layers"]
        size = int(label.split(", ")[-1].split()[0])
        lines.append(f"| {label} | {median:.2f} | {share:.3f} | {flops[size] / flops[LAYERS]:.3f} |")
    lines += ["", *(f"speed-up, {name}: {value:.3f}" for name, value in result["speed-up"].items()), ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="only this model; repeatable")
    parser.add_argument("--steps", type=int, default=25, help="steps of each stage in each round")
    parser.add_argument("--warm", type=int, default=5, help="first steps of each stage that do not count")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="also with compile=True")
    parser.add_argument("--seconds", type=float, default=140, help="no way begins after so many")
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a trial")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "trainer_speed.json")
    options = parser.parse_args(arguments)
    command = shlex.join(["python", "benchmarks/trainer_speed.py", *(arguments or sys.argv[1:])])
    until, results = time.perf_counter() + options.seconds, dict[str, Any]()
    cases = TINY_CASES if options.tiny else CASES
    timing = {"steps": options.steps, "warm": options.warm, "rounds": options.rounds}
    versions = {package: version(package) for package in ("transformers", "accelerate")}
    described = {"command": command, "environment": {**environment(), **versions}}

    def save(result: dict[str, Any]) -> None:
        results[result["case"]] = result
        written = {**timing, "methods": METHODS, "cases": list(results.values()), **described}
        options.out.write_text(json.dumps(written, indent=2) + "\n")

    for name in options.case or CASES:
        measure(name, cases[name], **timing, compiled=options.compile, until=until, save=save)
        if name in results:
            print(table(results[name]), flush=True)
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
