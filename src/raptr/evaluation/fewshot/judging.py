"""One job: score a decoder on one task with one number of exemplars, through lm-eval.

lm-eval builds the prompts and scores the answers. Every task also asks for the gold answer's likelihood, so that models
can be told apart even if all their answers are wrong.
"""

import io
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from raptr.evaluation.fewshot.decoder import Scorer
from raptr.evaluation.fewshot.suite import FOLDER

Task = Any  # lm-eval's ConfigurableTask, most of which has no types

SEED = 1234  # of the exemplars; lm-eval's default
CANDIDATES = 20  # how many frequent answers are tried as the constant one


def load_task(name: str, data: Path) -> Task:
    """Load one of this package's tasks, with its local documents."""
    with _quiet():
        manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata={"folder": str(data)})
        return manager.load([name])["tasks"][name]


def judge(task: Task, scorer: Scorer, shots: int, examples: int | None) -> dict[str, Any]:
    """Return the scores of each example and of the whole task, in its metrics, with the constant answer's."""
    instances = build(task, shots, examples)
    scorer.cut.clear()
    for kind in dict.fromkeys(instance.request_type for instance in instances):
        of_kind = [instance for instance in instances if instance.request_type == kind]
        for instance, response in zip(of_kind, getattr(scorer, kind)(of_kind), strict=True):
            instance.resps.append(response)
    cut = len(scorer.cut)
    task.apply_filters()
    by_example: dict[int | None, list[Instance]] = {}
    for instance in instances:
        by_example.setdefault(instance.doc_id, []).append(instance)
    groups = [sorted(group, key=lambda one: one.idx) for group in by_example.values()]
    results = [
        task.process_results(group[0].doc, [next(iter(one.filtered_resps.values())) for one in group])
        for group in groups
    ]
    likelihoods = _gold(task, scorer, groups)
    main = next(iter(task.aggregation()))
    constant, constants = constant_answer(task, [group[0].doc for group in groups])
    return {
        "metric": main,
        "scores": _whole(task, results),
        "constant": {"answer": constant, "scores": _whole(task, constants)},
        "cut": cut,  # prompts that lost their beginning
        "examples": [
            {
                "score": float(result[main]),
                "constant": float(fixed[main]),
                "nats": -likelihood,
                "bytes": size,
                **_written(group),
            }
            for group, result, fixed, (likelihood, size) in zip(groups, results, constants, likelihoods, strict=True)
        ],
    }


def build(task: Task, shots: int, examples: int | None) -> list[Instance]:
    """Return the requests of a task; the exemplars are the same for every model."""
    available = len(task.fewshot_docs())
    if shots > available:
        raise ValueError(f"--shots has {shots}, but the task {task.task_name} has {available} exemplars")
    task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(SEED)
    with _quiet():
        task.build_all_requests(limit=examples)
    return list(task.instances)


def _whole(task: Task, results: Sequence[dict[str, Any]]) -> dict[str, float]:
    by_metric = {name: [result[name] for result in results if name in result] for name in task.aggregation()}
    return {name: _finite(task.aggregation()[name](values)) for name, values in by_metric.items() if values}


def _finite(value: float) -> float:
    """Return a finite number, since JSON has no infinity and a perplexity may be infinite."""
    return float(np.clip(value, -1e30, 1e30))


def _gold(task: Task, scorer: Scorer, groups: Sequence[list[Instance]]) -> list[tuple[float, int]]:
    """Return the log-likelihood of each example's gold answer in nats, and the answer's length in bytes."""
    if task.OUTPUT_TYPE == "generate_until":
        requests = [
            Instance("loglikelihood", group[0].doc, (group[0].args[0], f" {task.doc_to_target(group[0].doc)[0]}"), 0)
            for group in groups
        ]
        likelihoods = [likelihood for likelihood, _ in scorer.loglikelihood(requests)]
        answers = [instance.args[1] for instance in requests]
    else:
        right = [
            group[task.doc_to_target(group[0].doc)] if task.OUTPUT_TYPE == "multiple_choice" else group[0]
            for group in groups
        ]
        likelihoods, answers = [instance.resps[0][0] for instance in right], [instance.args[1] for instance in right]
    return [(value, len(answer.encode())) for value, answer in zip(likelihoods, answers, strict=True)]


def _written(group: Sequence[Instance]) -> dict[str, str]:
    """Return the text that was written, if the task asks for one."""
    return {"answer": group[0].resps[0]} if group[0].request_type == "generate_until" else {}


def constant_answer(task: Task, documents: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the best of the answers that are the same for every example, and its results.

    The candidates are each label or place of a choice or, for texts, the most frequent gold answers.
    """
    main = next(iter(task.aggregation()))
    best: tuple[float, str, list[dict[str, Any]]] | None = None
    for name, results in _constants(task, documents):
        score = math.fsum(float(result[main]) for result in results)
        if best is None or score > best[0]:
            best = score, name, results
    assert best is not None
    return best[1], best[2]


def _constants(task: Task, documents: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    if task.OUTPUT_TYPE == "multiple_choice":
        counts = [len(task.doc_to_choice(document)) for document in documents]
        named = task.config.doc_to_choice if isinstance(task.config.doc_to_choice, list) else None
        for place in range(max(counts)):
            # A log-likelihood of 0 for one choice, far less for the others. An example with fewer gets its last.
            picked = [[(0.0 if i == min(place, count - 1) else -1e9, False) for i in range(count)] for count in counts]
            results = [task.process_results(d, r) for d, r in zip(documents, picked, strict=True)]
            yield (named[place] if named else f"choice {place + 1}"), results
        return
    golds = [task.doc_to_target(document) for document in documents]
    firsts = Counter(gold[0] if isinstance(gold, list) else gold for gold in golds)
    for answer, _ in firsts.most_common(CANDIDATES):
        if task.OUTPUT_TYPE == "generate_until":
            results = [task.process_results(document, [answer]) for document in documents]
        else:
            results = [
                task.process_results(document, [(0.0, gold == answer)])
                for document, gold in zip(documents, golds, strict=True)
            ]
            for result in results:
                result.pop("perplexity", None)  # a constant answer has none
        yield answer.strip(), results


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval from drawing progress bars and from logging."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
