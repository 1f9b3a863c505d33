"""Several fine-tunings joined in one model: steps per second, summed over the models, by their number.

    python -m benchmarks.finetune_speed --out benchmarks/results/finetune_speed.json         (on one GPU)
    python -m benchmarks.finetune_speed --tiny --steps 2 --models 1 3                        (to try it)

The model is what `raptr pretrain bert-mini` exports, 12 layers of width 256, with a new head. Batches have 32 examples
of 64 tokens; dropout 0.1, bfloat16, steps replayed as CUDA graphs. The ways take turns in blocks of steps. The floor of
a step is the time of its matrix products at the card's rate (`--rate`, in FLOP/s) plus that of the optimizer's memory
traffic at the card's bandwidth (`--bandwidth`, in bytes/s). The optimizer moves 30 bytes per weight: it reads and
writes the float32 weight and AdamW's two moments, reads the bfloat16 gradient twice, for its norm and for the step, and
writes the bfloat16 weight.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import RobertaPreLayerNormConfig, RobertaPreLayerNormForSequenceClassification

from raptr.evaluation.coding import Coded, coded
from raptr.evaluation.joined import join
from raptr.evaluation.stepping import WARM_UP, Steps, on_stream
from raptr.train.config import find_device
from raptr.train.run import environment

BATCH, LENGTH, EXAMPLES = 32, 64, 4096
BYTES = 30  # bytes that the optimizer moves per weight and step


def model(*, tiny: bool) -> nn.Module:
    """Return a classifier with random weights."""
    layers, width, heads = (2, 32, 2) if tiny else (12, 256, 4)
    config: Any = RobertaPreLayerNormConfig(  # type: ignore[call-arg]
        vocab_size=8192,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=LENGTH + 4,
        num_labels=3,
    )
    classifier: nn.Module = RobertaPreLayerNormForSequenceClassification(config)
    return classifier.train()


def examples(device: torch.device) -> Coded:
    """Return rows of random ids, half of them shorter than the others."""
    ids = torch.randint(5, 8192, (EXAMPLES, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": row[: LENGTH - number % 2 * 16], "attention_mask": [1] * (LENGTH - number % 2 * 16)}
            for number, row in enumerate(ids)]  # fmt: skip
    return coded(rows, torch.arange(EXAMPLES) % 3, 1).to(device)


class Way:
    """A number of joined models, and how long their steps took."""

    def __init__(self, models: int, table: Coded, capture: Any, *, tiny: bool) -> None:
        self.models, self.seconds = models, list[float]()
        self._device = table.targets_N.device
        classifiers = [model(tiny=tiny).to(self._device) for _ in range(models)]
        self.weights = sum(parameter.numel() for parameter in classifiers[0].parameters())
        self.products = sum(layer.weight.numel() for layer in classifiers[0].modules() if isinstance(layer, nn.Linear))
        trial = torch.arange(2 * models, device=self._device)
        alone = [table.batch(places_B, LENGTH) for places_B in torch.split(trial, 2)]
        joined_model = classifiers[0] if models == 1 else join(classifiers, alone, table.batch(trial, LENGTH))
        assert joined_model is not None
        loss = partial(functional.cross_entropy, reduction="none")
        half = self._device.type == "cuda"
        self._steps = Steps(
            joined_model, table, loss, weight_decay=0.01, clip=1.0, half=half, capture=capture, joined=models
        )
        self._rates_K = torch.full((models,), 1e-4, device=self._device)
        self._draw = torch.Generator().manual_seed(models)

    def go(self, steps: int) -> None:
        """Do some steps."""
        places = torch.randint(EXAMPLES, (steps, self.models * BATCH), generator=self._draw).to(self._device)
        for places_KB in places:
            self._steps(places_KB, LENGTH, self._rates_K)

    def time(self, steps: int) -> None:
        """Time some steps."""
        _wait(self._device)
        started = time.perf_counter()
        self.go(steps)
        _wait(self._device)
        self.seconds.append((time.perf_counter() - started) / steps)

    def result(self, rate: float, bandwidth: float) -> dict[str, Any]:
        """Return the measurements as an entry of the record."""
        seconds = statistics.median(self.seconds)
        flops = 6 * self.products * BATCH * LENGTH * self.models
        floor = flops / rate + BYTES * self.weights * self.models / bandwidth
        return {
            "models": self.models,
            "milliseconds": 1e3 * seconds,
            "steps_per_second": self.models / seconds,
            "floor_milliseconds": 1e3 * floor,
            "to_floor": seconds / floor,
            "graphs": self._steps.captured,
            "blocks": [1e3 * block for block in self.seconds],
        }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=int, nargs="+", default=[1, 3, 6, 12, 24], help="how many are joined")
    parser.add_argument("--steps", type=int, default=100, help="in a block")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--rate", type=float, default=790e12, help="FLOP/s of matrix products (H200)")
    parser.add_argument("--bandwidth", type=float, default=4.0e12, help="bytes/s of the memory (H200)")
    parser.add_argument("--tiny", action="store_true", help="2 layers of width 32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    device = find_device(options.device)
    with on_stream(device) as capture:
        table = examples(device)
        ways = [Way(models, table, capture, tiny=options.tiny) for models in options.models]
        for way in ways:
            way.go(WARM_UP + 2)
        for _ in range(options.blocks):
            for way in ways:
                way.time(options.steps)
    results = [way.result(options.rate, options.bandwidth) for way in ways]
    print("models  ms/step  steps/s  to floor  graphs")
    for one in results:
        row = f"{one['models']:6d}  {one['milliseconds']:7.2f}  {one['steps_per_second']:7.0f}  {one['to_floor']:8.1f}"
        print(f"{row}  {one['graphs']:6d}")
    if options.out is not None:
        named = {key: getattr(options, key) for key in ("steps", "blocks", "rate", "bandwidth", "tiny")}
        record = {
            "settings": {**named, "batch": BATCH, "length": LENGTH},
            "ways": results,
            "environment": environment(),
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
