"""The cost of reading and masking a batch, relative to a BERT-Base step on one GPU, and at step 10,000,000.

    python benchmarks/batch_cost.py --data FOLDER     (a folder made by `raptr prepare`)

Interleaved blocks in one run time: the step alone, on a batch that stays on the GPU; the step with batch(step) computed
as in training, in the same thread; the same with a second thread that computes the next batch ahead; and batch(step)
alone, at step 0 and at step 10,000,000. The result has ratios to the step.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from raptr.data import TrainData, open_store
from raptr.data.batch import Batch
from raptr.models.bert.config import SIZES
from raptr.models.bert.model import Bert
from raptr.objectives.mlm import MaskedLM
from raptr.subnetworks import Subnetwork
from raptr.train.run import environment

BLOCKS, STEPS, BATCH, LENGTH = 7, 10, 256, 128


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "batch_cost.json")
    arguments = parser.parse_args()
    store = open_store(arguments.data)
    objective = MaskedLM(store.vocabulary)
    data = TrainData(store, objective.window(LENGTH), BATCH, seed=0)

    def read(step: int) -> Batch:
        return objective.training(data.windows(step), 0)

    model = Bert(replace(SIZES["base"], vocabulary=store.vocabulary.size, positions=LENGTH)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fixed, part = read(0).to("cuda"), Subnetwork.full(12)

    pool = ThreadPoolExecutor(1)
    pending = [pool.submit(read, 0)]

    def ahead(step: int) -> Batch:
        pending.append(pool.submit(read, step + 1))
        return pending.pop(0).result()

    def train(batch: Batch) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch, model.inputs(part))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    ways: dict[str, Callable[[int], object]] = {
        "step": lambda step: train(fixed),
        "step with reading ahead": lambda step: train(ahead(step).to("cuda")),
        "step with reading": lambda step: train(read(step).to("cuda")),
        "batch at 0": lambda step: read(step),
        "batch at 10,000,000": lambda step: read(10**7 + step),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for block in range(BLOCKS + 1):
        for way, run in ways.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for step in range(STEPS):
                run(block * STEPS + step)
            torch.cuda.synchronize()
            if block:  # the first block warms up
                times[way].append((time.perf_counter() - started) / STEPS * 1e3)
    medians = {way: statistics.median(values) for way, values in times.items()}
    result = {
        "command": "python benchmarks/batch_cost.py --data FOLDER",
        "environment": environment(),
        "setting": f"BERT-Base, {BATCH} x {LENGTH}, bfloat16, eager, {BLOCKS} interleaved blocks of {STEPS} steps",
        "milliseconds": {way: {"median": medians[way], "blocks": values} for way, values in times.items()},
        "added to the step": medians["step with reading"] / medians["step"] - 1,
        "added to the step, read ahead": medians["step with reading ahead"] / medians["step"] - 1,
        "batch alone / step": medians["batch at 0"] / medians["step"],
        "step 10,000,000 / step 0": medians["batch at 10,000,000"] / medians["batch at 0"],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if isinstance(value, float)}, indent=1))
    print({way: round(value, 3) for way, value in medians.items()})


if __name__ == "__main__":
    main()
