"""Score decoders on few-shot tasks. Each model, attention, task and number of exemplars is a job with a small file.

OUT/jobs/MODEL/ATTENTION-TASK-SHOTS.json    the result of a job, with the score of every example
OUT/fewshot.json, .png                      the record of the requested jobs, and its chart
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel

from raptr.evaluation.fewshot.decoder import ATTENTIONS, Attention, Decoder, Scorer, Stopped, load_decoder
from raptr.evaluation.fewshot.judging import SEED, judge, load_task
from raptr.evaluation.fewshot.suite import FOLDER, check, find_tasks, sources
from raptr.evaluation.fewshot.summary import columns, draw, summed_up
from raptr.evaluation.folder import quiet
from raptr.evaluation.jobs import RENAMED, Judged, read_json
from raptr.evaluation.noting import note_scores
from raptr.files import locked, refuse_strange, sha256_of, write_json
from raptr.report.plots import save
from raptr.settings import refuse_changed
from raptr.train.config import find_device
from raptr.train.run import environment
from raptr.train.safety import LOCK, StopRequest

NAME = "fewshot"
SHOTS = (1, 5)
BATCH = 16


@final
@dataclass(frozen=True)
class _Job:
    """A model with one kind of attention, on one task, with one number of exemplars."""

    model: str  # its label
    attention: Attention
    task: str
    shots: int
    settings: dict[str, Any]

    def path(self, folder: Path) -> Path:
        return folder / "jobs" / self.model / f"{self.attention}-{self.task}-{self.shots}.json"

    def __str__(self) -> str:
        return f"{self.model}, {self.attention}, {self.task}, {self.shots}-shot"


def fewshot(
    models: Sequence[Path],
    tasks: Sequence[str],
    data: Path,
    out: Path | None = None,
    *,
    shots: Sequence[int] = SHOTS,
    examples: int | None = None,
    attention: Sequence[str] = (),
    batch: int = BATCH,
    device: str = "auto",
    console: Console | None = None,
    stop: StopRequest | None = None,
) -> Judged:
    """Score the models on every task and number of exemplars that is not done yet, and write the record.

    `examples` is how many examples of each task are scored, the same ones for every model. `attention` is causal,
    prefix or both; without it, models that were trained with UL2 are scored with both, all others causally.
    """
    console, stop = console or Console(stderr=True), stop or StopRequest()
    check(shots, examples, batch)
    for name in attention:
        if name not in ATTENTIONS:
            raise ValueError(f"--attention is {name!r}; {' and '.join(ATTENTIONS)} are allowed")
    where = find_device(device)
    names, absent = find_tasks(tasks, data)
    decoders = _labelled([load_decoder(model, attention) for model in models])
    folder = out or Path("runs") / NAME / "-".join(decoders)
    jobs = list(_planned(decoders, names, data, shots, examples, attention))
    refuse_strange(folder, "few-shot evaluation", f"{NAME}.json", _begun)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK, f"{folder} is used by another process; wait for it, or name another --out"):
        missing = [job for job in jobs if not _done(job, folder)]
        if missing:
            with stop.listening(), quiet():
                _work(missing, decoders, data, folder, examples, batch, where, stop, console)
        results = [read_json(job.path(folder)) for job in jobs if job.path(folder).is_file()]
        record = _record(folder, results, decoders, absent, examples) if results else None
        if record is not None:
            for name, decoder in decoders.items():
                note_scores(decoder.folder, NAME, columns(record, name))
    return Judged(folder, record, len(results), len(jobs))


def _begun(path: Path) -> bool:
    """Return whether a command that was stopped before it wrote its record may have left this path."""
    return path.name in (LOCK, "jobs", f".{NAME}.json.partial")


def _labelled(decoders: Sequence[Decoder]) -> dict[str, Decoder]:
    """Return the models by name, with the parent folder's name before it if two models share a name."""
    count = Counter(decoder.folder.name for decoder in decoders)
    labelled: dict[str, Decoder] = {}
    for decoder in decoders:
        path = decoder.folder.path.resolve()
        above = (path.parent if path.name == "export" else path).parent.name
        name = decoder.folder.name if count[decoder.folder.name] == 1 else f"{above}-{decoder.folder.name}"
        if name in labelled:
            raise ValueError(f"the models have two folders called {name!r}; give each a name of its own, once")
        labelled[name] = decoder
    return labelled


def _planned(
    decoders: dict[str, Decoder],
    names: Sequence[str],
    data: Path,
    shots: Sequence[int],
    examples: int | None,
    attention: Sequence[str],
) -> Iterator[_Job]:
    """Yield every job, task by task, so that a command that is stopped has compared all models on some tasks."""
    shared = {"examples": examples, "seed": SEED, "lm_eval": version("lm-eval")}
    for name in names:
        paths = [path for path in sources(name, data) if path is not None]
        files = {path.name: sha256_of(path) for path in paths}
        task = {"file": sha256_of(FOLDER / f"{name}.yaml"), "data": files}
        for count in dict.fromkeys(shots):
            for label, decoder in decoders.items():
                model = {"sha256": decoder.folder.fingerprint, "mode": decoder.mode}
                for how in ATTENTIONS:
                    if how in (attention or decoder.attentions):
                        yield _Job(label, how, name, count, {**shared, "model": model, "task": task})


def _done(job: _Job, folder: Path) -> bool:
    """Return whether the job's file exists; refuse one with other settings."""
    path = job.path(folder)
    if not path.is_file():
        return False
    refuse_changed(folder, read_json(path, "settings", "scores")["settings"], job.settings, free=RENAMED)
    return True


def _work(
    jobs: Sequence[_Job],
    decoders: dict[str, Decoder],
    data: Path,
    folder: Path,
    examples: int | None,
    batch: int,
    device: torch.device,
    stop: StopRequest,
    console: Console,
) -> None:
    """Run the jobs in turn until asked to stop."""
    weights: dict[str, PreTrainedModel] = {}
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        whole = bar.add_task("jobs", total=len(jobs))
        for number, job in enumerate(jobs):
            bar.update(whole, completed=number, description=f"{job}, 0 answers")
            decoder = decoders[job.model]
            answered = 0

            def count(done: int, job: _Job = job) -> None:
                nonlocal answered
                answered += done
                bar.update(whole, description=f"{job}, {answered:,} answers")

            if job.model not in weights:
                weights[job.model] = decoder.weights(device)
            scorer = Scorer(decoder, weights[job.model], job.attention, batch=batch, stop=stop, on_requests=count)
            try:
                result = judge(load_task(job.task, data), scorer, job.shots, examples)
            except Stopped:
                return
            except torch.OutOfMemoryError as error:
                raise ValueError("out of memory on the GPU. Lower --batch.") from error
            job.path(folder).parent.mkdir(parents=True, exist_ok=True)
            named = {"model": job.model, "attention": job.attention, "task": job.task, "shots": job.shots}
            write_json(job.path(folder), {**named, "settings": job.settings, "device": device.type, **result})
            score = 100 * result["scores"][result["metric"]]
            console.print(f"{job}: {result['metric']} {score:.1f}", highlight=False, markup=False)
            if stop.asked:
                return


def _record(
    folder: Path,
    results: Sequence[dict[str, Any]],
    decoders: dict[str, Decoder],
    absent: Sequence[str],
    examples: int | None,
) -> dict[str, Any]:
    """Write the record of the jobs and its chart, and return the record."""
    models = {
        label: {
            "type": decoder.folder.config.model_type,
            "sha256": decoder.folder.fingerprint,
            "length": decoder.folder.longest(),
        }
        for label, decoder in decoders.items()
    }
    record = {
        "models": models,
        "examples": examples,
        "not_run": list(absent),
        **summed_up(results),
        "environment": {**environment(), "lm_eval": version("lm-eval")},
    }
    write_json(folder / f"{NAME}.json", record)
    save(draw(record), folder / f"{NAME}.png")
    return record
