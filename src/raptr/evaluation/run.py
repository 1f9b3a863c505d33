"""Fine-tune encoders on tasks: all missing learning rates and seeds, one by one or several at once.

Each fine-tuning is a job with a small file (finetuning.py), so nothing is done twice. Several at once are jobs on the
same examples, of one model or of several with the same architecture, whose models are joined (joined.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raptr.evaluation.encoder import Encoder, load_encoder
from raptr.evaluation.finetuning import Finetuning, Key, Request
from raptr.evaluation.jobs import Judged
from raptr.evaluation.reading import TaskData
from raptr.evaluation.tuning import Job, NotJoinedError, Tuning
from raptr.files import locked
from raptr.train.config import find_device
from raptr.train.safety import LOCK, StopRequest

NO_MEMORY = "out of memory on the GPU. Lower --batch or --length."
NAMES = ("_name_or_path", "architectures", "transformers_version")  # keys without effect on the model
COLUMNS = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())

Kind: TypeAlias = tuple[object, ...]


def finetune_all(
    requests: Sequence[Request],
    *,
    device: str = "auto",
    jobs: int = 1,
    console: Console | None = None,
    stop: StopRequest | None = None,
    on_judged: Callable[[Request, Judged], None] = lambda request, judged: None,
) -> list[Judged]:
    """Run the missing jobs of all requests, earlier ones first; `on_judged` is called for each finished request."""
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
        for finetuning in prepared:
            finetuning.open()
            message = f"{finetuning.folder} is used by another process; wait for it, or name another --out"
            held.enter_context(locked(finetuning.folder / LOCK, message))
            finetuning.settle()
        held.enter_context(stop.listening())
        for number, finetuning in enumerate(prepared):
            if not finetuning.missing():
                end(number)
        _work(prepared, jobs, where, stop, console, end)
        return [
            judged[number] if number in judged else finetuning.judged() for number, finetuning in enumerate(prepared)
        ]


def _prepared(requests: Sequence[Request]) -> list[Finetuning]:
    """Return the requests with their encoders and examples, reading each of these once."""
    examples: dict[object, TaskData] = {}
    encoders: dict[Path, Encoder] = {}
    prepared = []
    for request in requests:
        if request.files not in examples:
            examples[request.files] = request.examples()
        if request.model not in encoders:
            encoders[request.model] = load_encoder(request.model)
        prepared.append(Finetuning(request, encoders[request.model], examples[request.files]))
    return prepared


def _work(
    prepared: Sequence[Finetuning],
    jobs: int,
    device: torch.device,
    stop: StopRequest,
    console: Console,
    end: Callable[[int], None],
) -> None:
    """Run the jobs, up to `jobs` at once, until asked to stop."""
    kinds = [_kind(one) for one in prepared]
    most = dict.fromkeys(kinds, jobs)
    tunings: dict[Kind, Tuning] = {}
    with Progress(*COLUMNS, console=console, transient=True, disable=not console.is_terminal) as bar:
        whole = bar.add_task("", total=None)
        while not stop.asked and (group := _next(prepared, kinds, most)):
            first, kind = prepared[group[0][0]], kinds[group[0][0]]
            if kind not in tunings:
                tunings[kind] = Tuning(first.encoder, first.examples, first.request.recipe, device)
                if note := tunings[kind].note:
                    _speaker(bar.console)(f"{first.task.title}: {note}")
            tuning, asked = tunings[kind], [Job(prepared[number].encoder, *key) for number, key in group]
            bar.reset(whole, total=tuning.steps * len(group), description=_described(prepared, group))
            try:
                results = tuning.run(asked, stop, lambda count: bar.advance(whole, count), _speaker(bar.console))
            except (torch.OutOfMemoryError, NotJoinedError) as error:
                if len(group) == 1:
                    raise ValueError(NO_MEMORY) from error
                out_of_memory = isinstance(error, torch.OutOfMemoryError)
                most[kind] = len(group) // 2 if out_of_memory else 1
                reason = "the GPU lacks the memory" if out_of_memory else str(error)
                message = f"cannot make {len(group)} fine-tunings at once: {reason}; going on with {most[kind]}"
                _speaker(bar.console)(message)
                continue
            for (number, _), result in zip(group, results, strict=bool(results)):
                _keep(prepared[number], result, bar.console)
            for number in dict.fromkeys(number for number, _ in group):
                if not prepared[number].missing():
                    end(number)


def _kind(one: Finetuning) -> Kind:
    """Return what jobs must have in common to run at once: architecture, tokenizer, examples and recipe."""
    folder, asked = one.encoder.folder, one.request
    config = {key: value for key, value in folder.config.to_dict().items() if key not in NAMES}
    architecture = json.dumps(config, sort_keys=True, default=str)
    return (architecture, folder.tokenizer_fingerprint, folder.longest(), asked.files, asked.recipe)


def _next(prepared: Sequence[Finetuning], kinds: Sequence[Kind], most: Mapping[Kind, int]) -> list[tuple[int, Key]]:
    """Return the first missing job and others that can run with it, as many as `most` allows for their kind."""
    wanted = [(number, key) for number, one in enumerate(prepared) for key in one.missing()]
    if not wanted:
        return []
    kind = kinds[wanted[0][0]]
    return [(number, key) for number, key in wanted if kinds[number] == kind][: most[kind]]


def _described(prepared: Sequence[Finetuning], group: Sequence[tuple[int, Key]]) -> str:
    number, (rate, seed) = group[0]
    title = prepared[number].task.title
    if len(group) > 1:
        return f"{len(group)} fine-tunings on {title}, steps"
    return f"{prepared[number].encoder.folder.name} on {title}, rate {rate:g}, seed {seed}, steps"


def _speaker(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line without markup or highlighting."""
    return partial(console.print, highlight=False, markup=False)


def _keep(one: Finetuning, result: dict[str, Any], console: Console) -> None:
    """Write a job's result, and print it."""
    one.keep(result)
    where = f"{one.encoder.folder.name} on {one.task.title}"
    single = " (in float32: the model cannot compute in bfloat16)"
    note = single if (result["device"], result["precision"]) == ("cuda", "float32") else ""
    _speaker(console)(f"{where}, rate {result['rate']:g}, seed {result['seed']}: {_reached(result)}{note}")


def _reached(result: dict[str, Any]) -> str:
    if result["scores"] is None:
        return f"diverged in step {result['diverged']}"
    return ", ".join(f"{name} {100 * value:.2f}" for name, value in result["scores"].items())
