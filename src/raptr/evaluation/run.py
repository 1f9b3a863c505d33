"""Fine-tune encoders on tasks, at every learning rate and seed that is not done yet, in turn or several at once.

Each fine-tuning is a job with a small file (finetuning.py), so nothing is done twice. Several at once are processes
that serve all models and tasks: a process reads and tokenizes a task once.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raptr.evaluation.encoder import Encoder, load_encoder
from raptr.evaluation.finetuning import Finetuning, Key, Request
from raptr.evaluation.jobs import LOCK, Judged
from raptr.evaluation.reading import TaskData
from raptr.evaluation.tuning import Tuning
from raptr.files import locked
from raptr.train.run import find_device
from raptr.train.safety import StopRequest
from raptr.train.workers import PATIENCE, Workers

NO_MEMORY = "out of memory on the GPU. Lower --batch or --length."
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def finetune_all(
    requests: Sequence[Request],
    *,
    device: str = "auto",
    jobs: int = 1,
    console: Console | None = None,
    stop: StopRequest | None = None,
    on_judged: Callable[[Request, Judged], None] = lambda request, judged: None,
) -> list[Judged]:
    """Do what is missing of all requests, earlier ones first; `on_judged` is told of each that came to its end."""
    console, stop = console or Console(stderr=True), stop or StopRequest()
    where = find_device(device)
    if jobs < 1:
        raise ValueError(f"--jobs is {jobs}; a whole number from 1 on is allowed")
    prepared = _prepared(requests)
    judged: dict[int, Judged] = {}

    def end(number: int) -> None:
        judged[number] = prepared[number].judged()
        if not judged[number].stopped:
            on_judged(requests[number], judged[number])

    with ExitStack() as held:
        for one in prepared:
            one.open()
            message = f"{one.folder} is used by another process; wait for it, or name another --out"
            held.enter_context(locked(one.folder / LOCK, message))
            one.settle()
        held.enter_context(stop.listening())
        for number, one in enumerate(prepared):
            if not one.missing():
                end(number)
        if min(jobs, sum(len(one.missing()) for one in prepared)) > 1:
            _at_once(prepared, jobs, where, stop, console, end)
        else:
            _in_turn(prepared, where, stop, console, end)
        return [judged[number] if number in judged else one.judged() for number, one in enumerate(prepared)]


def _prepared(requests: Sequence[Request]) -> list[Finetuning]:
    """The requests with their encoders and examples, each of which is read once."""
    examples: dict[object, TaskData] = {}
    encoders: dict[Path, Encoder] = {}
    prepared = []
    for request in requests:
        files = (request.task, request.data, *request.texts, request.label, request.dev)
        if files not in examples:
            examples[files] = request.examples()
        if request.model not in encoders:
            encoders[request.model] = load_encoder(request.model)
        prepared.append(Finetuning(request, encoders[request.model], examples[files]))
    return prepared


def _in_turn(
    prepared: Sequence[Finetuning],
    device: torch.device,
    stop: StopRequest,
    console: Console,
    end: Callable[[int], None],
) -> None:
    """Do the jobs one after the other until asked to stop."""
    for number, one in enumerate(prepared):
        tuning: Tuning | None = None
        while not stop.asked and (missing := one.missing()):
            tuning = tuning or Tuning(one.encoder, one.examples, one.request.recipe, device)
            _work(tuning, one, missing, stop, console)
            if not one.missing():
                end(number)


def _work(tuning: Tuning, one: Finetuning, keys: Sequence[Key], stop: StopRequest, console: Console) -> None:
    with Progress(*COLUMNS, console=console, transient=True, disable=not console.is_terminal) as bar:
        whole = bar.add_task("steps", total=tuning.steps * len(keys))
        for number, (rate, seed) in enumerate(keys, start=1):
            bar.update(whole, description=f"job {number} of {len(keys)}: rate {rate:g}, seed {seed}")
            try:
                result = tuning.run(one.encoder, rate, seed, stop, lambda: bar.advance(whole))
            except torch.OutOfMemoryError as error:
                raise ValueError(NO_MEMORY) from error
            if result is None:
                return
            _keep(one, result, console)
            bar.update(whole, completed=tuning.steps * number)  # a job that diverged ends early


@lru_cache
def _tuning(shared: Request, device: torch.device) -> Tuning:
    return Tuning(load_encoder(shared.model), shared.examples(), shared.recipe, device)


def _tune(
    stop: StopRequest, shared: Request, device: torch.device, model: Path, rate: float, seed: int
) -> dict[str, Any] | None:
    return _tuning(shared, device).run(load_encoder(model), rate, seed, stop, lambda: None)


def _shared(prepared: Sequence[Finetuning]) -> list[Request]:
    """By what a process reads and tokenizes each one's task: equal for models with one tokenizer, the first's."""
    first: dict[tuple[str, int], Path] = {}
    shared = []
    for one in prepared:
        folder, asked = one.encoder.folder, one.request
        model = first.setdefault((folder.tokenizer_fingerprint, folder.longest()), folder.path)
        files: dict[str, Any] = {"texts": tuple(asked.texts), "label": asked.label, "dev": asked.dev}
        shared.append(Request(model, asked.task, asked.data, recipe=asked.recipe, **files))
    return shared


def _at_once(
    prepared: Sequence[Finetuning],
    jobs: int,
    device: torch.device,
    stop: StopRequest,
    console: Console,
    end: Callable[[int], None],
) -> None:
    """Do the jobs in several processes until asked to stop."""
    shared = _shared(prepared)
    jobs = min(jobs, sum(len(one.missing()) for one in prepared))
    running: dict[Future[dict[str, Any] | None], tuple[int, Key]] = {}

    def waiting() -> Mapping[tuple[int, Key], None]:
        wanted = ((number, key) for number, one in enumerate(prepared) for key in one.missing())
        return dict.fromkeys(one for one in wanted if one not in running.values())

    with (
        Workers(jobs, device) as workers,
        Progress(*COLUMNS, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        shown = bar.add_task(f"jobs, {jobs} at once", total=None)

        def submit() -> None:
            # No more than can run at once: the last seeds of a model come before the first of the next.
            for number, key in islice(waiting(), jobs - len(running)):
                model = prepared[number].encoder.folder.path
                running[workers.submit(_tune, shared[number], device, model, *key)] = (number, key)

        submit()
        while running and not stop.asked:
            for future in wait(running, PATIENCE, FIRST_COMPLETED).done:
                number, _ = running.pop(future)
                try:
                    result = future.result()
                except torch.OutOfMemoryError as error:
                    raise ValueError(f"{NO_MEMORY} Or lower --jobs.") from error
                if result is None:  # asked to stop
                    continue
                _keep(prepared[number], result, bar.console)
                submit()
                bar.advance(shown)
                if not prepared[number].missing():
                    end(number)


def _keep(one: Finetuning, result: dict[str, Any], console: Console) -> None:
    """Keep what a job came to, and say it."""
    one.keep(result)
    where = f"{one.encoder.folder.name} on {one.task.title}"
    single = " (in float32: the model cannot compute in bfloat16)"
    note = single if (result["device"], result["precision"]) == ("cuda", "float32") else ""
    said = f"{where}, rate {result['rate']:g}, seed {result['seed']}: {_reached(result)}{note}"
    console.print(said, highlight=False, markup=False)


def _reached(result: dict[str, Any]) -> str:
    if result["scores"] is None:
        return f"diverged in step {result['diverged']}"
    return ", ".join(f"{name} {100 * value:.2f}" for name, value in result["scores"].items())
