"""The documents of few-shot tasks: rows of local files, in the form that the prompts of the task files need.

The scored examples and the exemplars shown before them come from two files or, if there is no file of exemplars, from
two parts of one. Both are shuffled, in the same way for every model, because many files are sorted by article. Answers
are normalised as in SQuAD's own script: lower case, no punctuation, no articles.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets.arrow_dataset import Dataset

from raptr.evaluation.metrics import binary_f1, macro_f1
from raptr.evaluation.reading import file_named, read_rows

EXEMPLARS = 64  # held out if there is no file of exemplars, but at most an eighth of the examples
NO_ANSWER = "unanswerable"

Row = Mapping[str, Any]
Document = dict[str, Any]


def load(
    *, folder: str, reader: str, files: Sequence[str], exemplars: Sequence[str] = (), **_: Any
) -> dict[str, Dataset]:
    """Return a task's examples and exemplars in the form that lm-eval's `custom_dataset` needs."""
    path, other = file_named(Path(folder), files), file_named(Path(folder), exemplars)
    if path is None:
        raise ValueError(f"{folder} has none of {', '.join(files)}, as jsonl, plain or compressed")
    rows = _shuffled(list(read_rows(path)))
    if not rows:
        raise ValueError(f"{path} has no examples")
    if other is None:
        held = min(EXEMPLARS, len(rows) // 8)
        judged, shown, other = rows[: len(rows) - held], rows[len(rows) - held :], path
    else:
        judged, shown = rows, _shuffled(list(read_rows(other)))
    return {
        "examples": Dataset.from_list(_shuffled(_documents(path, reader, judged))),
        "exemplars": Dataset.from_list(_shuffled(_documents(other, reader, shown))),
    }


def _shuffled(items: list[Any]) -> list[Any]:
    return [items[place] for place in np.random.default_rng(0).permutation(len(items))]


def _documents(path: Path, reader: str, rows: Iterable[tuple[int, Row]]) -> list[Document]:
    documents = []
    for number, row in rows:
        try:
            documents += READERS[reader](row)
        except KeyError as error:
            raise ValueError(f"{path}, line {number}: {error} is missing; found {', '.join(row)}") from error
        except (IndexError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: not a row of this task ({error})") from error
    return documents


def _labelled(row: Row, fields: Sequence[str], labels: Sequence[str]) -> list[Document]:
    """Return the fields unchanged, and the label as a number; files have it as a number, a word or a truth value."""
    label = row["label"]
    if isinstance(label, bool):
        label = str(label).lower()
    if (isinstance(label, str) and label not in labels) or (isinstance(label, int) and not 0 <= label < len(labels)):
        raise ValueError(f"label is {label!r}; {', '.join(labels)} are allowed")
    number = labels.index(label) if isinstance(label, str) else int(label)
    return [{**{field: row[field] for field in fields}, "label": number}]


TRUTH = ("false", "true")


def _wic(row: Row) -> list[Document]:
    (document,) = _labelled(row, ("sentence1", "sentence2"), TRUTH)
    return [{**document, "word": row["sentence1"][row["start1"] : row["end1"]]}]


def _wsc(row: Row) -> list[Document]:
    (document,) = _labelled(row, (), TRUTH)
    target = row["target"]
    words = row["text"].split()
    before = " ".join(words[: target["span2_index"]])
    after = " ".join(words)[len(before) + len(target["span2_text"]) + 1 :]
    passage = f"{before} *{target['span2_text']}*{after}".replace(" ,", ",").replace(" .", ".").replace(" '", "'")
    return [{**document, "passage": passage.strip(), "pronoun": target["span2_text"], "noun": target["span1_text"]}]


def _copa(row: Row) -> list[Document]:
    (document,) = _labelled(row, (), ("0", "1"))
    connector = {"cause": "because", "effect": "therefore"}[row["question"]]
    choices = [row[name][0].lower() + row[name][1:] for name in ("choice1", "choice2")]
    return [{**document, "text": f"{row['premise'].strip()[:-1]} {connector}", "choices": choices}]


def _multirc(row: Row) -> list[Document]:
    passage = row["passage"]
    return [
        {
            "paragraph": passage["text"],
            "question": question["question"],
            "answer": answer["text"],
            "label": int(answer["label"]),
        }
        for question in passage["questions"]
        for answer in question["answers"]
    ]


def _record(row: Row) -> list[Document]:
    text, *highlights = row["passage"]["text"].strip().split("\n@highlight\n")
    text += "\n\n" + "".join(f"  - {highlight}.\n" for highlight in highlights)
    passage = row["passage"]["text"]
    entities = sorted({passage[span["start"] : span["end"] + 1] for span in row["passage"]["entities"]})
    documents = []
    for question in row["qas"]:
        answers = {answer["text"] for answer in question["answers"]}
        right = [place for place, entity in enumerate(entities) if entity in answers]
        if right:
            choices = [f"  - {question['query']}".replace("@placeholder", entity) for entity in entities]
            documents.append({"text": text, "choices": choices, "label": right[0], "right": right})
    return documents


def _hellaswag(row: Row) -> list[Document]:
    (document,) = _labelled(row, (), ("0", "1", "2", "3"))
    return [{**document, "text": _without_headers(row["context"]), "choices": [*map(_without_headers, row["choices"])]}]


def _without_headers(text: str) -> str:
    """Clean HellaSwag's text as lm-eval does, of the bracketed marks that come from its source website."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ").strip()


def _storycloze(row: Row) -> list[Document]:
    text = " ".join(row[f"input_sentence_{number}"] for number in range(1, 5))
    choices = [row["sentence_quiz1"], row["sentence_quiz2"]]
    return [{"text": text, "choices": choices, "label": int(row["answer_right_ending"]) - 1}]


def _triviaqa(row: Row) -> list[Document]:
    """Put the answer first, since an exemplar shows the first one; the aliases after it also count as right."""
    return [{"question": row["question"], "answers": list(dict.fromkeys([row["answer"], *row["aliases"]]))}]


def _question(*fields: str) -> Callable[[Row], list[Document]]:
    def read(row: Row) -> list[Document]:
        answers = list(row["answers"]) or [NO_ANSWER]
        return [{**{field: row[field] for field in fields}, "answers": answers}]

    return read


def _conversation(row: Row) -> list[Document]:
    """Return a story with its questions and answers; the last question is scored."""
    *earlier, last = row["turns"]
    dialogue = "".join(f"Q: {turn['question']}\n\nA: {turn['answer']}\n\n" for turn in earlier)
    answers = [last["answer"], *last.get("other_answers", ())]
    return [{"story": row["story"], "earlier": dialogue, "question": last["question"], "answers": answers}]


READERS: dict[str, Callable[[Row], list[Document]]] = {
    "boolq": lambda row: _labelled(row, ("passage", "question"), TRUTH),
    "cb": lambda row: _labelled(row, ("premise", "hypothesis"), ("entailment", "contradiction", "neutral")),
    "rte": lambda row: _labelled(row, ("premise", "hypothesis"), ("entailment", "not_entailment")),
    "wic": _wic,
    "wsc": _wsc,
    "copa": _copa,
    "multirc": _multirc,
    "record": _record,
    "hellaswag": _hellaswag,
    "storycloze": _storycloze,
    "triviaqa": _triviaqa,
    "open": _question("question"),
    "passage": _question("passage", "question"),
    "squad": _question("title", "context", "question"),
    "context": _question("context", "question"),
    "conversation": _conversation,
    "lambada": lambda row: [{"context": row["context"].rstrip(), "target": row["target"].strip()}],
}


def answer_scores(document: Document, results: Sequence[str]) -> dict[str, float]:
    """Return exact match and word F1 with the nearest of the answers; an empty text counts as `unanswerable`."""
    text = results[0].strip().split("\n")[0] or NO_ANSWER
    answers = document["answers"]
    return {
        "exact_match": max(float(normalised(text) == normalised(answer)) for answer in answers),
        "f1": max(word_f1(text, answer) for answer in answers),
    }


def normalised(text: str) -> str:
    """Return a text without capitals, punctuation, articles and extra spaces."""
    plain = "".join(sign for sign in text.lower() if sign not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def word_f1(text: str, answer: str) -> float:
    """Return the harmonic mean of precision and recall over the words of a text and an answer."""
    written, right = normalised(text).split(), normalised(answer).split()
    if not written or not right:
        return float(written == right)
    shared = sum((Counter(written) & Counter(right)).values())
    return 2 * shared / (len(written) + len(right))


def record_scores(document: Document, results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """Return 1 if the most likely entity is one of the right ones, else 0."""
    likely = int(np.argmax([likelihood for likelihood, _ in results]))
    return {"acc": float(likely in document["right"])}


def mean_f1(items: Sequence[tuple[int, int]]) -> float:
    """Return the mean of the classes' F1 over pairs of gold and prediction."""
    targets, predictions = zip(*items, strict=True)
    return macro_f1(targets, predictions)


def yes_f1(items: Sequence[tuple[int, int]]) -> float:
    """Return the F1 of class 1 over pairs of gold and prediction."""
    targets, predictions = zip(*items, strict=True)
    return binary_f1(targets, predictions)
