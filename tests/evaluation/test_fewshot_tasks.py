"""The task files: their prompts from rows of each file, their answers, and what they share with lm-eval's own."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs the extra eval")

import lm_eval.tasks
from lm_eval.tasks._yaml_loader import load_yaml

from raptr.evaluation.fewshot.documents import answer_scores, load, normalised, word_f1
from raptr.evaluation.fewshot.judging import build, constant_answer, load_task
from raptr.evaluation.fewshot.suite import PAPER, SUPERGLUE, TASKS, find_tasks, sources, task_file
from tests.evaluation.tiny import write_jsonl

TURNS = [{"question": "Who?", "answer": "Ann"}, {"question": "Where?", "answer": "Rome"}]
# a row of each file, with the prompt that it becomes and its gold answer
ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "boolq": ({"passage": "P", "question": "is it", "label": "true"}, "P\nQuestion: is it?\nAnswer:", " yes"),
    "cb": (
        {"premise": "P", "hypothesis": "H", "label": "neutral"},
        "P\nQuestion: H. True, False, or Neither?\nAnswer:",
        " Neither",
    ),
    "copa": (
        {"premise": "It fell.", "choice1": "It broke.", "choice2": "It rose.", "question": "effect", "label": 1},
        "It fell therefore",
        " it rose.",
    ),
    "rte": (
        {"premise": "P", "hypothesis": "H.", "label": "not_entailment"},
        "P\nQuestion: H. True or False?\nAnswer:",
        " False",
    ),
    "wic": (
        {"word": "run", "sentence1": "He runs.", "sentence2": "A run.", "start1": 3, "end1": 7, "label": False},
        "Sentence 1: He runs.\nSentence 2: A run.\nQuestion: Is the word 'runs' used in the same way in the two "
        "sentences above?\nAnswer:",
        " no",
    ),
    "wsc": (
        {
            "text": "Mark told Pete that he was late .",
            "target": {"span1_text": "Mark", "span2_text": "he", "span1_index": 0, "span2_index": 4},
            "label": True,
        },
        'Passage: Mark told Pete that *he* was late.\nQuestion: In the passage above, does the pronoun "*he*" refer to '
        '"*Mark*"?\nAnswer:',
        " yes",
    ),
    "multirc": (
        {"passage": {"text": "P", "questions": [{"question": "Q?", "answers": [{"text": "A", "label": 1}]}]}},
        "P\nQuestion: Q?\nAnswer: A\nIs the answer correct?",
        " yes",
    ),
    "record": (
        {
            "passage": {
                "text": "Ann met Bob\n@highlight\nIt rained",
                "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}],
            },
            "qas": [{"query": "Then @placeholder left", "answers": [{"text": "Bob"}]}],
        },
        "Ann met Bob\n\n  - It rained.\n",
        "  - Then Bob left",
    ),
    "hellaswag": (
        {"context": "[header] How to sew [title] Begin.", "choices": ["[step] A b", "C", "D", "E"], "label": 0},
        "How to sew. Begin.",
        " A b",
    ),
    "storycloze": (
        {
            **{f"input_sentence_{i}": f"S{i}." for i in range(1, 5)},
            "sentence_quiz1": "Sad.",
            "sentence_quiz2": "Glad.",
            "answer_right_ending": 2,
        },
        "S1. S2. S3. S4.",
        " Glad.",
    ),
    "triviaqa": (
        {"question": "Which vegetable?", "answer": "Onion", "aliases": ["Allium", "Onion"]},
        "Question: Which vegetable?\nAnswer:",
        " Onion",
    ),
    "nq_open": (
        {"question": "when was it", "answers": ["1972", "in 1972"]},
        "Answer these questions:\n\nQ: when was it?\nA:",
        " 1972",
    ),
    "webqs": ({"question": "what is it?", "answers": ["tea"]}, "Question: what is it?\nAnswer:", " tea"),
    "drop": (
        {"passage": "P", "question": "How many?", "answers": ["2.5"]},
        "Passage: P\nQuestion: How many?\nAnswer:",
        " 2.5",
    ),
    "squadv2": (
        {"title": "T", "context": "C", "question": "Q?", "answers": []},
        "Title: T\n\nBackground: C\n\nQuestion: Q?\n\nAnswer:",
        " unanswerable",
    ),
    "tydiqa": (
        {"context": "C", "question": "Q?", "answers": ["A"]},
        "Context: C\n\nQuestion: Q?\n\nAnswer:",
        " A",
    ),
    "coqa": ({"story": "S", "turns": TURNS}, "S\n\nQ: Who?\n\nA: Ann\n\nQ: Where?\n\nA:", " Rome"),
    "quac": ({"story": "S", "turns": TURNS}, "S\n\nQ: Who?\n\nA: Ann\n\nQ: Where?\n\nA:", " Rome"),
    "lambada": ({"context": "She went", "target": "home"}, "She went", " home"),
    "lambada_cloze": ({"context": "She went", "target": "home"}, "She went ____. ->", " home"),
}


@pytest.mark.parametrize("name", TASKS)
def test_prompts(name: str, tmp_path: Path) -> None:
    row, prompt, answer = ROWS[name]
    stem = task_file(name)["dataset_kwargs"]["files"][0]
    write_jsonl(tmp_path / f"{stem}.jsonl", [row] * 16)
    task = load_task(name, tmp_path)
    for shots in (0, 2):
        instances = [one for one in build(task, shots, 1) if one.doc_id == 0]
        context = instances[0].args[0]
        assert context.endswith(prompt.removeprefix("Answer these questions:\n\n"))
        assert context.startswith(prompt) or name in ("nq_open",)
        between = "\n" if name == "nq_open" else "\n\n"
        if shots:
            assert context.count(answer + between) == shots  # the exemplars show the gold answer, after one space
        gold = task.doc_to_target(instances[0].doc)
        if task.OUTPUT_TYPE == "multiple_choice":
            assert instances[gold].args[1] == answer
        else:
            assert instances[0].args[1] == answer if task.OUTPUT_TYPE == "loglikelihood" else gold[0] == answer[1:]
        assert len(instances) == (len(task.doc_to_choice(instances[0].doc)) if gold in range(9) else 1)


# What is not said to differ in a task's file asks as lm-eval does.
STOCK = {
    "boolq": "super_glue/boolq/default.yaml",
    "cb": "super_glue/cb/default.yaml",
    "rte": "super_glue/rte/default.yaml",
    "nq_open": "nq_open/nq_open.yaml",
    "webqs": "webqs/webqs.yaml",
}


@pytest.mark.parametrize("name", STOCK)
def test_prompts_are_those_of_lm_eval(name: str) -> None:
    assert lm_eval.tasks.__file__
    theirs = load_yaml(Path(lm_eval.tasks.__file__).parent / STOCK[name], resolve_func=False)
    ours = task_file(name)
    assert ours["doc_to_text"] == theirs["doc_to_text"]
    keys = ["description", "fewshot_delimiter", *(["doc_to_choice"] if name in SUPERGLUE else [])]
    assert [ours.get(key) for key in keys] == [theirs.get(key) for key in keys]


def test_tasks_without_data_here_are_marked() -> None:
    assert [name for name in TASKS if task_file(name)["metadata"].get("run") is False] == [
        "tydiqa",
        "quac",
        "storycloze",
    ]


def test_groups(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "cb.jsonl", [ROWS["cb"][0]])
    (tmp_path / "lambada.jsonl.xz").write_bytes(lzma.compress(json.dumps(ROWS["lambada"][0]).encode()))
    assert len(PAPER) == 11 + len(SUPERGLUE)
    found, absent = find_tasks(["superglue", "lambada"], tmp_path)
    assert (found, absent) == (["cb", "lambada"], [name for name in SUPERGLUE if name != "cb"])
    assert sources("lambada", tmp_path) == (tmp_path / "lambada.jsonl.xz", None)


def test_exemplars_are_not_judged(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"question": f"q{i}", "answers": [f"a{i}"]} for i in range(80)]
    write_jsonl(tmp_path / "a.jsonl", rows[:40])
    write_jsonl(tmp_path / "b.jsonl", rows[40:])
    one = load(folder=str(tmp_path), reader="open", files=["a"])
    assert (len(one["examples"]), len(one["exemplars"])) == (35, 5)
    assert sorted([*one["examples"]["question"], *one["exemplars"]["question"]]) == sorted(f"q{i}" for i in range(40))
    two = load(folder=str(tmp_path), reader="open", files=["a"], exemplars=["b"])
    assert (len(two["examples"]), len(two["exemplars"])) == (40, 40)
    assert list(two["examples"]["question"]) != [row["question"] for row in rows[:40]]  # files are sorted by article


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([{"question": "q", "label": 1}], r"boolq\.jsonl, line 1.*passage"),
        ([{"passage": "p", "question": "q", "label": "maybe"}], r"line 1.*maybe"),
        ([{"passage": "p", "question": "q", "label": 7}], r"line 1.*label is 7"),
    ],
)
def test_rows_that_are_refused(rows: list[dict[str, Any]], match: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "boolq.jsonl", rows)
    with pytest.raises(ValueError, match=match):
        load(folder=str(tmp_path), reader="boolq", files=["boolq"])


@pytest.mark.parametrize(
    ("text", "answers", "exact", "f1"),
    [
        (" The cat.", ["cat", "dog"], 1.0, 1.0),
        ("black cat", ["cat"], 0.0, 2 / 3),
        ("a b c d", ["b c x"], 0.0, 2 * 2 / (3 + 3)),  # a is an article
        ("", ["unanswerable"], 1.0, 1.0),
        ("", ["cat"], 0.0, 0.0),
        ("cat\nmore", ["cat"], 1.0, 1.0),
    ],
)
def test_answers_are_scored_as_squads(text: str, answers: list[str], exact: float, f1: float) -> None:
    found = answer_scores({"answers": answers}, [text])
    assert found["exact_match"] == exact
    assert found["f1"] == pytest.approx(f1)


def test_normalised() -> None:
    assert normalised("The  Magic-Circle, a!") == "magiccircle"
    assert word_f1("the", "a") == 1.0


def test_constant_answers(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"question": f"q{i}", "answers": ["tea" if i % 4 else "milk"]} for i in range(40)]
    write_jsonl(tmp_path / "webqs.jsonl", rows)
    write_jsonl(tmp_path / "webqs_train.jsonl", rows)
    task = load_task("webqs", tmp_path)
    answer, results = constant_answer(task, list(task.eval_docs))
    assert (answer, sum(one["exact_match"] for one in results)) == ("tea", 30)
    write_jsonl(tmp_path / "lambada.jsonl", [{"context": "c", "target": "a" if i % 3 else "b"} for i in range(30)])
    write_jsonl(tmp_path / "lambada_train.jsonl", [{"context": "c", "target": "a"}])
    task = load_task("lambada", tmp_path)
    answer, results = constant_answer(task, list(task.eval_docs))
    assert (answer, sum(one["acc"] for one in results)) == ("a", 20)
    write_jsonl(tmp_path / "copa.jsonl", [{**ROWS["copa"][0], "label": int(i % 5 == 0)} for i in range(30)])
    write_jsonl(tmp_path / "copa_exemplars.jsonl", [ROWS["copa"][0]])
    task = load_task("copa", tmp_path)
    answer, results = constant_answer(task, list(task.eval_docs))
    assert (answer, sum(one["acc"] for one in results)) == ("choice 1", 24)
