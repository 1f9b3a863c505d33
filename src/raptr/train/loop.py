"""The training loop. It names no method, and no method touches it.

    open the run folder, the data, the model and the optimizer; load the newest checkpoint, if there is one
    for each remaining step:
        if the model's shape is not method.shape(step): grow   <- weights and optimizer state
        subnetwork = method.subnetwork(step)                   <- drawn once for the step
        for each micro-batch: loss of batch(step, micro) under the subnetwork, backward   (execution.py)
        set the learning rate of the step
        clip the gradients
        apply the idle policy
        optimizer step
        at intervals: record, evaluate the full model (also at the end of each stage), save
        if asked to stop: save and leave

Checkpoint `step-N` is the state before step N, and before any growth at N: a run that loads it grows the model if step
N has a larger shape. Everything else that a step needs is a function of the step, so a run that was stopped and resumed
equals one that was not.
"""

from bisect import bisect_right
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from raptr.data import EvalData, TokenStore, TrainData
from raptr.data.batch import Batch
from raptr.data.store import TOKENIZER
from raptr.distributed.processes import ALONE, Agreement, Processes, explained, joined
from raptr.distributed.sharding import reduce_now, reduce_rest
from raptr.growth.apply import grow
from raptr.hashing import bits
from raptr.methods import Method
from raptr.objectives.contract import Objective
from raptr.subnetworks import Shape, Subnetwork
from raptr.train import checkpoint
from raptr.train.adamw import AdamW
from raptr.train.checkpoint import Checkpoint, Progress
from raptr.train.config import Config
from raptr.train.console import say_start
from raptr.train.evaluate import evaluate, evaluate_size
from raptr.train.execution import build_model, fill_whole, make_execution
from raptr.train.finishing import export_run, write_run_report
from raptr.train.flops import Flops, flops, planned_flops
from raptr.train.idle import idle, running_rows
from raptr.train.opening import open_data
from raptr.train.optimizer import clip, load_state, make_optimizer, state_tensors
from raptr.train.progress import TrainingBar, ran
from raptr.train.readout import Reading, Readout
from raptr.train.run import RunFolder, check_data
from raptr.train.safety import FiniteCheck, StopRequest, memory_named, reproducible
from raptr.train.starting import load_start
from raptr.train.trackers.registry import check_installed
from raptr.train.writing import Writer

if TYPE_CHECKING:
    from raptr.report import Report


@dataclass(frozen=True)
class Result:
    """The outcome of `pretrain`: the steps done, and the last held-out loss of the full model (None: none yet)."""

    run: Path
    step: int
    eval_loss: float | None
    stopped: bool = False  # asked to stop, by SIGTERM, Ctrl-C or the caller
    model: Path | None = None  # the export, or the last checkpoint if no stock model can hold it
    report: "Report | None" = None


def pretrain(
    config: Config,
    run: Path,
    *,
    fresh: bool = False,
    until: int | None = None,
    console: Console | None = None,
    stop: StopRequest | None = None,
    verify: bool = False,
    export: bool = False,
    report: bool = False,
    advice: bool = True,
) -> Result:
    """Train a model from random weights or from `model.start`, or continue where the run in this folder stopped.

    `fresh` replaces an existing run, once everything that the new one needs has been checked. `until` saves and stops
    after that many steps in total, to be continued another time; SIGTERM and Ctrl-C do so at any step. `stop` lets the
    caller ask for that too. A finished run is not trained further.

    `verify` reads all of the data and compares checksums, even if that was done before. `export` and `report` write a
    finished run's export for `transformers` and its report into its folder. `advice` first prints where the run is,
    what `auto` chose, or that another method was measured to be better.
    """
    stop = stop or StopRequest()
    with joined(config.train.timeout) as processes, ExitStack() as opened:
        console = (console or Console(stderr=True)) if processes.first else Console(quiet=True)
        folder = RunFolder(run, writes=processes.first)
        opened.enter_context(memory_named(folder.checkpoints))
        opened.enter_context(reproducible(config.train.deterministic))
        processes.agree(lambda: {"the settings": str(config.mapping())}, lambda: False).settle()
        if advice:
            processes.from_first(lambda: say_start(config, run, console, fresh=fresh))
        settled = processes.from_first(lambda: opened.enter_context(folder.opened(config, fresh=fresh)))
        device = torch.device(settled.train.device)
        processes = processes.laid_out(settled.train.parallel, settled.train.shards, device)
        steps = settled.train.steps
        latest = None if fresh else processes.from_first(lambda: checkpoint.load_latest(folder.checkpoints))
        if latest is not None and latest.step >= steps:
            if settled.data.source != folder.read().data.source:  # another path may hold the same text
                check_data(run, latest.progress().data, open_data(settled, run, console).fingerprint)
            console.print(f"the run in {escape(str(run))} is finished: step {steps:,} of {steps:,}", highlight=False)
            result = Result(run, latest.step, latest.progress().eval_loss)
        else:
            check_installed(settled.train.tracker)
            store = processes.first_before_others(lambda: open_data(settled, run, console, verify=verify))
            trainer = Trainer(settled, folder, store, device, processes)
            if latest is None and (start := settled.model.start) is not None:
                fill_whole(trainer.model, partial(load_start, start, settled.model.start_sha256, store=store))
            with processes.together():
                if fresh:
                    folder.clear()
            if latest is not None:
                trainer.resume(latest, console)
            with stop.listening():
                result = trainer.train(steps if until is None else min(until, steps), console, stop)
    if result.step < steps or not processes.first:
        return result
    written = write_run_report(folder) if report else None
    return replace(result, report=written, model=export_run(folder, steps, console) if export else None)


@final
class Trainer:
    """A run in memory: the model, its optimizer, and the totals that grow with the steps."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        store: TokenStore,
        device: torch.device,
        processes: Processes = ALONE,
    ) -> None:
        self.config, self.folder, self.store, self.device, self.processes = config, folder, store, device, processes
        config.check_processes(processes.size, sharded=processes.sharded)
        settings, length = config.train, config.data.length
        self.dimensions = config.model.build(store.vocabulary.size, length)
        self.method: Method = config.make_method()
        self.policy = config.idle(self.method)
        self.objective: Objective = config.objective.make(store.vocabulary)
        window, isolate = self.objective.window(length), config.data.isolate_documents
        self.data = TrainData(store, window, settings.batch, settings.seed, isolate=isolate)
        self.held_out = EvalData(store, window, settings.eval_samples, isolate=isolate)
        self.build(self.method.shape(0))
        self.step, self.spent = 0, Flops(0, 0)
        self.eval_loss: float | None = None
        self.settings_text = str(config.mapping())
        self.writer = Writer(processes, beside=settings.async_checkpoints)
        self.finite = FiniteCheck(device, folder.checkpoints)
        self.readout = Readout(device)

    def build(self, shape: Shape) -> None:
        """Build a model of this shape with its initial weights, its execution, and its optimizer."""
        self.shape = shape
        settings, processes = self.config.train, self.processes
        self.model = build_model(self.dimensions.resized(shape), settings, self.device, processes)
        self.parameters = list(self.model.parameters())
        groups = self.method.settings().get("groups", 1)
        self.execution = make_execution(self.model, settings, self.device, sharded=processes.sharded, groups=groups)
        self.optimizer = make_optimizer(self.config.optimizer, self.model, compiled=settings.compiled(self.device))

    def grow(self, shape: Shape) -> None:
        """Grow the model and the optimizer state to a larger shape."""
        plan, before = self.method.growth(self.shape, shape), self.tensors()
        self.build(shape)
        state = grow(plan, before, self.weights(), self.model)
        load_state(self.optimizer, self.model, state)

    def resume(self, found: Checkpoint, console: Console) -> None:
        progress = found.progress()
        check_data(self.folder.path, progress.data, self.store.fingerprint)
        if self.shape != (shape := found.shape(self.method.target)):
            self.build(shape)
        state = found.blank(without="model.", parameters=dict(self.model.named_parameters()))
        found.read({**self.weights(), **state})
        load_state(self.optimizer, self.model, state)
        self.step, self.readout.seconds = progress.step, progress.seconds
        self.spent = Flops(progress.flops_layers, progress.flops)
        self.eval_loss = progress.eval_loss
        console.print(f"going on from step {self.step:,} of {self.config.train.steps:,}", highlight=False)

    def train(self, last: int, console: Console, stop: StopRequest | None = None) -> Result:
        """Train up to step `last`, or until asked to stop, and save a checkpoint there."""
        stop = stop or StopRequest()
        settings, method = self.config.train, self.method
        if self.step < last:
            start = {"step": self.step, "data": self.store.fingerprint, "device": self.device.type}
            start |= {"precision": settings.arithmetic(self.device), "processes": self.processes.size}
            with self.processes.together():
                self.folder.begin(self.config, self.store.path / TOKENIZER, start)
        phases = method.phases()
        starts, ends = [phase.start for phase in phases], {phase.stop for phase in phases}
        planned = planned_flops(self.dimensions, method, **self.config.step_load)
        bar = TrainingBar(
            console,
            steps=settings.steps,
            stages=len(phases),
            target=method.target,
            planned=planned,
            device=self.device,
            step=self.step,
        )
        with bar, explained(self.processes), self.writer:
            stopping = self.agree(stop).settle()
            if self.step == 0:
                self.judge(bar)
            self.readout.start()
            stopping = stopping or self.processes.any(stop.asked)
            while self.step < last and not stopping:
                if self.shape != method.shape(self.step):
                    self.grow(method.shape(self.step))
                subnetwork, phase = method.subnetwork(self.step), bisect_right(starts, self.step) - 1
                agreement = self.agree(stop, ahead=1)
                loss, norm = self.optimize(subnetwork)
                counts = ran(subnetwork, self.shape, method.target)
                bar.advance(self.step, stage=phase + 1, counts=counts, spent=self.spent.total)
                stopping = agreement.settle()  # once per step; a later signal takes effect after the next step
                ended = self.step in ends
                if ended or self.step % settings.log_every == 0:
                    note = self.moment(
                        kind="train",
                        stage=phase + 1,
                        stages=len(phases),
                        **counts,
                        lr=self.config.optimizer.learning_rate(self.step - 1, settings.steps),
                    )
                    self.log(self.readout.take(note, loss, norm, self.finite.first), bar)
                judged = ended or self.step % settings.eval_interval == 0
                saved = self.step % settings.checkpoint_interval == 0 or self.step == last or stopping
                if not judged and not saved:
                    continue
                self.log(self.readout.stop(), bar)
                self.finite.check()
                if judged:
                    self.judge(bar, ended=ended)
                if saved:
                    self.save()
                self.readout.start()
            self.log(self.readout.stop(), bar)
        return Result(self.folder.path, self.step, self.eval_loss, stopped=stopping and self.step < last)

    def agree(self, stop: StopRequest, *, ahead: int = 0) -> Agreement:
        """Begin to compare with the other processes what is computed next, and whether any of them was asked to stop.

        The comparison is about the step that comes `ahead` steps after the current one.
        """
        step = self.step + ahead

        def digests() -> dict[str, str]:
            more = step < self.config.train.steps
            drawn, read = (self.method.subnetwork(step).digest, self.data.digest(step)) if more else ("", "")
            facts = {"number": str(step), "subnetwork": drawn, "batch": read}
            facts |= {"data": self.store.fingerprint, "settings": self.settings_text}
            return {f"the {name} of step {step}": fact for name, fact in facts.items()}

        return self.processes.agree(digests, lambda: stop.asked)

    def judge(self, bar: TrainingBar, *, ended: bool = False) -> None:
        """Evaluate and show the loss; `ended` says that a stage has ended."""
        self.evaluate()
        assert self.eval_loss is not None
        bar.evaluated(self.eval_loss, ended=ended)

    def log(self, readings: Iterable[Reading], bar: TrainingBar) -> None:
        """Record what was read back from the device; raises Diverged if a number was not finite."""
        for reading in readings:
            loss, norm, bad = reading.numbers
            self.finite.refuse(int(bad))
            note = {**reading.note, "loss": loss, "grad_norm": norm, "seconds": round(reading.seconds, 3)}
            self.folder.record(note)
            rate = note["tokens"] / max(reading.seconds, 1e-9)
            bar.measured(note["step"], loss=loss, rate=rate, spent=note["flops"])

    def optimize(self, subnetwork: Subnetwork) -> tuple[Tensor, Tensor]:
        """Take one optimizer step under a subnetwork; return the loss and the norm of the gradient."""
        loss = self.gradients(subnetwork)
        norm = self.update(loss, subnetwork)
        self.spent += self.cost(subnetwork)
        self.step += 1
        return loss, norm

    def gradients(self, subnetwork: Subnetwork) -> Tensor:
        """Compute the gradients of the step's batch, one micro-batch at a time; return the loss over all processes."""
        settings, processes, losses = self.config.train, self.processes, []
        for micro in range(settings.accumulate):
            share = micro * processes.size + processes.rank
            if self.dimensions.dropout:
                torch.manual_seed(bits(settings.seed, "dropout", self.step, share) >> 1)
            reduce_now(self.model, micro == settings.accumulate - 1)
            losses.append(self.execution.backward(self.batch(self.step, share), subnetwork))
        reduce_rest(self.model, processes, settings.reduced)
        return processes.mean(torch.stack(losses).sum())

    def batch(self, step: int, share: int = 0) -> Batch:
        """Return one share of a step's batch: what one process reads in one micro-batch."""
        settings, shares = self.config.train, self.config.train.accumulate * self.processes.size
        return self.objective.training(self.data.windows(step, share, shares), settings.seed)

    def update(self, loss: Tensor, subnetwork: Subnetwork) -> Tensor:
        """Clip the gradients, apply the idle policy, and step the optimizer; return the norm before clipping."""
        rate = self.config.optimizer.learning_rate(self.step, self.config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = clip(self.parameters, self.config.optimizer.clip)
        self.finite.watch(self.step, loss, norm)
        idle(self.optimizer, self.policy, check=False)
        if self.policy == "skip" and isinstance(self.optimizer, AdamW):
            self.optimizer.ran = running_rows(self.model, subnetwork)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def evaluate(self) -> None:
        """Evaluate the full model and the `train.eval_sizes` that it has on the held-out set, and record the losses."""
        settings, whole = self.config.train, self.method.evaluated(self.step)
        judge = partial(
            evaluate,
            self.model,
            self.objective,
            self.held_out,
            batch=max(1, settings.batch // (settings.accumulate * self.processes.size)),
            stream=settings.stream(self.device),
            processes=self.processes,
        )
        with settings.autocast(self.device):
            judged = judge(whole)
            sizes = {
                str(size): evaluate_size(judge, self.method, size, self.step)
                for size in settings.eval_sizes
                if size <= whole.size
            }
        self.eval_loss = judged.loss
        record = {**judged.record(), **({"sizes": sizes} if sizes else {})}
        self.folder.record({**self.moment(kind="eval", **record), "seconds": round(self.readout.seconds, 3)})

    def save(self) -> None:
        """Write a checkpoint of the current state; raises Diverged instead if a number was not finite."""
        self.finite.check()
        progress = Progress(
            step=self.step,
            seconds=self.readout.seconds,
            flops=self.spent.total,
            flops_layers=self.spent.layers,
            eval_loss=self.eval_loss,
            data=self.store.fingerprint,
        )
        state = {**asdict(progress), "shape": asdict(self.shape), "tokenizer": self.store.manifest.tokenizer_sha256}
        self.writer.save(self.folder.checkpoints, self.step, self.tensors(), state, keep=self.config.train.keep)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of a checkpoint by name: the weights and the optimizer state."""
        return {**self.weights(), **state_tensors(self.optimizer, self.model)}

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by their names in a checkpoint."""
        return {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}

    def moment(self, **fields: Any) -> dict[str, Any]:
        """Return a record of the current step, without its seconds."""
        return {
            "step": self.step,
            **fields,
            "tokens": self.tokens,
            "flops": self.spent.total,
            "flops_layers": self.spent.layers,
        }

    @property
    def tokens(self) -> int:
        return self.step * self.config.train.batch * self.config.data.length

    def cost(self, subnetwork: Subnetwork) -> Flops:
        """Return the FLOPs of an optimizer step under this subnetwork of the model in its current shape."""
        return flops(self.model.config, subnetwork, **self.config.step_load)
