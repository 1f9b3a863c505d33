r"""Repeat runs of a record on an independent code path: is a deficit due to the method, or to our code?

    python -m evidence.control --data corpus --record docs/results/evidence/axes-75-6x256.json \
        --entry 'depth, idle layers skipped' --entry 'full (reduced)' --seed 0 --seed 1 --seed 2 --jobs 6

A stock model of `transformers` is trained by a plain loop: no compiler, no CUDA graph, no kernel of ours; torch's AdamW
and clipping, and the model's own loss; layers are left out, or copied, by `stepwise`. The model is
`RobertaPreLayerNormForMaskedLM` for `bert`, `LlamaForCausalLM` for `decoder`. Model size, text, batches, masks, steps,
learning rates and the method's draws are those of the record. Initial weights are drawn by torch, with the record's
standard deviations. The result is written to docs/results/evidence/control.json, beside the record's loss for the same
seed. The two paths differ in their initial weights and in rounding, so they should agree as well as two seeds do. What
both share is not controlled: batches and masks, the plan of layers, scales and growths, and the number of steps of
`full (reduced)`, which follows from our count of FLOPs.

`--jobs 2` makes two runs at once, each in a process of its own; a result is added when its run has ended. `--trial 200`
does 200 steps of each run, prints how long the whole would take, and adds nothing.
"""

import json
import math
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormForMaskedLM,
)

from raptr import idle, stepwise
from raptr.comparison.record import load_record
from raptr.data import EvalData, TrainData, open_store
from raptr.data.batch import Batch
from raptr.data.tokenizer import Vocabulary
from raptr.files import write_text
from raptr.integrations.steps import Steps
from raptr.models.contract import PLAIN
from raptr.objectives.contract import Objective
from raptr.objectives.registry import OBJECTIVES
from raptr.train.config import Config
from raptr.train.run import environment

ROOT = Path(__file__).resolve().parents[1]
OFTEN = 10  # progress messages of a run


@dataclass(frozen=True)
class Run:
    """A run of the record that is to be repeated."""

    entry: str
    config: Mapping[str, Any]
    peak: float
    seed: int
    data: Path
    trial: int | None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="the text of the record, prepared")
    parser.add_argument("--record", type=Path, default=ROOT / "docs/results/long.json")
    parser.add_argument("--entry", action="append", required=True, help="an entry of the record; repeatable")
    parser.add_argument("--seed", type=int, action="append", help="repeatable (0)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (1)")
    parser.add_argument("--trial", type=int, help="make so many steps, say how long a run takes, add nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/evidence/control.json")
    options = parser.parse_args(arguments)
    record, store = load_record(options.record), open_store(options.data)
    if record is None:
        parser.error(f"--record is {options.record}, which does not exist")
    if store.fingerprint != record["data"]["fingerprint"]:
        parser.error(f"--data has fingerprint {store.fingerprint}, the record {record['data']['fingerprint']}")
    configs = {}
    for entry in options.entry:
        if entry not in record["configs"]:
            parser.error(f"--entry is {entry!r}; the record has {', '.join(record['configs'])}")
        configs[entry] = Config.read(record["configs"][entry]).mapping()  # with the defaults of settings that are newer
        if problem := beyond(configs[entry]):
            parser.error(f"--entry is {entry!r}, which has {problem}; the control cannot train that")
    best = {row["label"]: row["peak"] for row in record["best"]}
    runs = [
        Run(entry, configs[entry], best[entry], seed, options.data, options.trial)
        for seed in options.seed or [0]
        for entry in options.entry
    ]
    known = {(run["label"], run["peak"], run["seed"]): run["loss"] for run in record["runs"]}
    for run, loss in _made(runs, options.jobs):
        if run.trial is None:
            _add(options.out, options.record.stem, run, loss, known.get((run.entry, run.peak, run.seed)))


def _made(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, float]]:
    """Yield each run with its held-out loss, as it ends."""
    if jobs == 1:
        for run in runs:
            yield run, train(run)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(train, run): run for run in runs}
        for ended in as_completed(futures):
            yield futures[ended], ended.result()


def _add(path: Path, comparison: str, run: Run, loss: float, recorded: float | None) -> None:
    """Add a result to the file, and print it; `comparison` is the name of the record."""
    known = json.loads(path.read_text("utf-8")) if path.exists() else []
    result = {"comparison": comparison, "entry": run.entry, "seed": run.seed, "peak": run.peak}
    result |= {"steps": run.config["train"]["steps"], "loss": loss, "record": recorded, "environment": environment()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps([*known, result], indent=1) + "\n")
    print(f"{run.entry}, seed {run.seed}: {loss:.4f}, in the record {recorded}", flush=True)


def train(run: Run) -> float:
    """Train the model with the run's own settings, and return its held-out loss; a trial ends after its steps."""
    config, seed, store = run.config, run.seed, open_store(run.data)
    settings, size, length = config["train"], config["model"], config["data"]["length"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model: nn.Module = stock_model(size, store.vocabulary, length)
    model.to(device)
    steps = settings["steps"]
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    plain = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    adamw = config["optimizer"]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": adamw["weight_decay"]}, {"params": plain, "weight_decay": 0.0}],
        betas=(adamw["beta1"], adamw["beta2"]),
        eps=adamw["epsilon"],
    )
    method_settings = {key: value for key, value in config["method"].items() if value is not None}
    method = stepwise(
        model, method_settings.pop("name"), steps=steps, seed=seed, optimizer=optimizer, **method_settings
    )
    draw(model, size["init"], method.method.shape(0).layers)
    objective = OBJECTIVES[config["objective"]["name"]](store.vocabulary)
    data = TrainData(store, objective.window(length), settings["batch"], seed)
    decay = math.ceil(round(adamw["decay"] * steps, 6))
    for step in _told(run, steps):
        rate = run.peak * min(1.0, (step + 1) / max(1, adamw["warmup"]), (steps - step) / max(1, decay))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = objective.training(data.windows(step), seed).to(device)
        method.begin(step)
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        method.end()
        nn.utils.clip_grad_norm_(model.parameters(), adamw["clip"])
        idle(optimizer, adamw["idle"])
        optimizer.step()
        optimizer.zero_grad()
    held_out = EvalData(store, objective.window(length), settings["eval_samples"])
    return evaluate(method, steps, objective, held_out, batch=settings["batch"], device=device)


def _told(run: Run, steps: int) -> Iterator[int]:
    """Yield the steps of a run or of its trial; now and then, print the progress and the time left."""
    last = steps if run.trial is None else min(run.trial, steps)
    begun, every = time.monotonic(), max(1, last // OFTEN)
    for step in range(last):
        yield step
        if (step + 1) % every == 0:
            each = (time.monotonic() - begun) / (step + 1)
            left = f"{each * 1000:.0f} ms a step, {each * (steps - step - 1):,.0f} s left of {each * steps:,.0f}"
            print(f"{run.entry}, seed {run.seed}: step {step + 1:,} of {steps:,}, {left}", flush=True)


def beyond(config: Mapping[str, Any]) -> str | None:
    """Return a setting of the run, with its value, that the plain loop does not know; None if it knows all of them."""
    known: dict[str, dict[str, tuple[Any, ...]]] = {
        "model": {"family": ("bert", "decoder"), "init": ("bert", "fan-in"), "dropout": (0.0,), "z_loss": (0.0,)},
        "objective": {"name": ("mlm", "causal")},
        "optimizer": {"name": ("adamw",), "decay_shape": ("linear",), "floor": (0.0,)},
        "data": {"isolate_documents": (False,)},
    }
    known["model"] |= {key: (value,) for key, value in PLAIN.items()}
    for section, keys in known.items():
        for key, allowed in keys.items():
            if config[section].get(key, allowed[0]) not in allowed:
                return f"{section}.{key} {config[section][key]}"
    return "optimizer.clip 0" if config["optimizer"]["clip"] == 0 else None


def stock_model(size: Mapping[str, Any], vocabulary: Vocabulary, positions: int) -> PreTrainedModel:
    """Return the stock model of these dimensions, without dropout."""
    shared = {
        "vocab_size": vocabulary.size,
        "hidden_size": size["width"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "intermediate_size": size["mlp"],
    }
    if size["family"] == "decoder":
        llama = LlamaConfig(
            **shared,
            num_key_value_heads=size["kv_heads"],
            head_dim=size["head_size"],
            max_position_embeddings=positions + 1,  # the stock model is given the last label too
            rope_parameters={"rope_type": "default", "rope_theta": size["rope_base"]},
            rms_norm_eps=size["norm_epsilon"],
            tie_word_embeddings=size["tied"],
        )
        return LlamaForCausalLM(llama)
    padding = vocabulary["[PAD]"]
    roberta = RobertaPreLayerNormConfig(
        **shared,
        layer_norm_eps=1e-5,
        max_position_embeddings=positions + padding + 1,  # RoBERTa's positions begin after the padding id
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=padding,
        type_vocab_size=1,
    )
    model = RobertaPreLayerNormForMaskedLM(roberta)
    nn.init.zeros_(model.roberta_prelayernorm.embeddings.token_type_embeddings.weight).requires_grad_(False)
    return model


TO_STREAM = ("output.dense", "o_proj", "down_proj")  # of a layer: what its branches end with


def draw(model: nn.Module, init: str, layers: int) -> None:
    """Draw the initial weights of `fan-in` for a model that begins with this many layers.

    Those of `bert` are the stock model's own.
    """
    if init == "fan-in":
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and module.weight.requires_grad:
                writes = 2 * layers if name.endswith(TO_STREAM) else 1
                nn.init.normal_(module.weight, std=(module.weight.shape[1] * writes) ** -0.5)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the stock model's own loss; a decoder is given the last label too and shifts its labels itself."""
    if batch.positions_BM is None:
        given = torch.cat([batch.tokens_BS, batch.labels_BM[:, -1:]], 1)
        labels = given
    else:
        given, labels = batch.tokens_BS, batch.labels_BS()
    with torch.autocast(given.device.type, torch.bfloat16, enabled=given.is_cuda):
        loss: Tensor = model(input_ids=given, labels=labels).loss
    return loss


@torch.no_grad()
def evaluate(
    method: Steps, steps: int, objective: Objective, held_out: EvalData, *, batch: int, device: torch.device
) -> float:
    """Return the mean loss over the held-out windows, of the model as evaluated after `steps` steps."""
    total, count = 0.0, 0
    method.begin_evaluation(steps)
    for domain in held_out.domains:
        for windows in held_out.windows(domain, batch):
            piece = objective.evaluation(windows).to(device)
            total += float(loss_of(method.routed.model, piece)) * len(piece.tokens_BS)
            count += len(piece.tokens_BS)
    method.close()
    return total / count


if __name__ == "__main__":
    main()
