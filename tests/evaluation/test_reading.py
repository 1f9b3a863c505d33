"""A task's files, in the forms in which they are found, and every refusal."""

import gzip
import json
import lzma
import re
from pathlib import Path

import pytest

from raptr.evaluation.reading import read_task
from raptr.evaluation.tasks import TASKS, find_task
from raptr.files import sha256_of
from tests.evaluation.tiny import make_task, opinions, write_jsonl

MNLI_COLUMNS = "index\tpromptID\tpairID\tgenre\tsentence1_parse\tsentence1\tsentence2\tlabel1\tgold_label"
STSB_COLUMNS = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
DOWNLOADED = {  # the task's tsv files as GLUE distributes them: columns, rows, then the first row's texts and target
    "sst2": ("sentence\tlabel", ['a "fine film \t1', "dull \t0"], ('a "fine film ',), 1.0),
    "mnli": (
        MNLI_COLUMNS,
        [f"{i}\t31193\t31193n\tgov\t( a )\tA man.\tA boy.\t-\t{label}" for i, label in enumerate("nec")],
        ("A man.", "A boy."),
        2.0,
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel",
        ["0\tWho?\tHe did.\tentailment", "1\tWhy?\tNo.\tnot_entailment"],
        ("Who?", "He did."),
        0.0,
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel",
        ["0\tIt is.\tIt was.\tnot_entailment", "1\tA.\tB.\tentailment"],
        ("It is.", "It was."),
        1.0,
    ),
    "cola": ("", ["gj04\t1\t\tHe sings.", "gj04\t0\t*\tHe sing."], ("He sings.",), 1.0),
    "stsb": (
        STSB_COLUMNS,
        ["0\tnews\tMSR\t2012\t1\tn\tn\tA.\tB.\t3.750", "1\tnews\tMSR\t2012\t2\tn\tn\tC.\tD.\t0"],
        ("A.", "B."),
        3.75,
    ),
}


@pytest.mark.parametrize("name", DOWNLOADED)
@pytest.mark.parametrize("lower", [False, True])
def test_files_as_glue_distributes_them(name: str, lower: bool, tmp_path: Path) -> None:
    header, lines, texts, target = DOWNLOADED[name]
    task = TASKS[name]
    folder = tmp_path / (name if lower else task.folder)
    folder.mkdir()
    whole = "\n".join(filter(None, [header, *lines])) + "\n"
    (folder / "train.tsv").write_text(whole, encoding="utf-8")
    (folder / ("dev_matched.tsv" if name == "mnli" else "dev.tsv")).write_text(whole, encoding="utf-8")
    data = read_task(task, tmp_path)  # the folder of all tasks, or the task's own
    assert data == read_task(task, folder)
    assert (data.train.texts[0], data.train.targets[0]) == (texts, target)
    assert len(data.train) == len(data.dev) == len(lines)
    assert data.outputs == (1 if name == "stsb" else task.labels)


def test_compressed_jsonl_and_labels_of_any_form(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"text": f"line\u2028break {i}", "label": i % 2 == 0} for i in range(4)]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows).encode()
    (tmp_path / "train.jsonl.xz").write_bytes(lzma.compress(content))
    (tmp_path / "validation.tsv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbftext\tlabel\n\none\ttrue\ntwo\tfalse\n"))
    data = read_task(TASKS["classification"], tmp_path)
    assert data.labels == ("false", "true")
    assert data.train.texts[1] == ("line\u2028break 1",)
    assert data.dev.targets == (1.0, 0.0)


def test_numbers_and_texts_are_the_same_label(tmp_path: Path) -> None:
    make_task(tmp_path, opinions(8, 0), [{"sentence": "a", "label": 1.0}, {"sentence": "b", "label": "0"}])
    assert read_task(TASKS["sst2"], tmp_path).dev.targets == (1.0, 0.0)


def test_columns_and_the_dev_file_can_be_named(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"sentence": "x", "ask": str(i), "tell": "t", "kind": i % 3} for i in range(9)]
    make_task(tmp_path, rows, rows)
    write_jsonl(tmp_path / "hard.jsonl", rows[:4])
    data = read_task(TASKS["classification"], tmp_path, texts=["ask", "tell"], label="kind", dev="hard")
    assert data.train.texts[3] == ("3", "t")
    assert (len(data.dev), data.labels) == (4, ("0", "1", "2"))
    assert read_task(TASKS["classification"], tmp_path, label="kind", dev="hard.jsonl").dev.texts[0] == ("x",)


def test_checksums_are_those_of_what_was_read(tmp_path: Path) -> None:
    make_task(tmp_path, opinions(8, 0), opinions(4, 1))
    data, sums = (
        read_task(TASKS["sst2"], tmp_path),
        [sha256_of(tmp_path / f"{name}.jsonl") for name in ("train", "dev")],
    )
    (tmp_path / "train.jsonl").unlink()
    write_jsonl(tmp_path / "dev.jsonl", opinions(2, 2))
    facts = data.facts()
    assert [facts[name]["sha256"] for name in ("train", "dev")] == sums


@pytest.mark.parametrize(("given", "name"), [("SST-2", "sst2"), ("sts_b", "stsb"), ("MNLI", "mnli")])
def test_names_of_tasks(given: str, name: str) -> None:
    assert find_task(given).name == name


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--task.*'wnli'.*sst2"):
        find_task("wnli")


GOOD_LINES = ["sentence\tlabel", "fine\t1", "dull\t0"]


@pytest.mark.parametrize(
    ("task", "train", "match"),
    [
        ("sst2", ["sentence\tlabel", "a\t1", "b\t0", "c\t2"], r"train\.tsv.*3 labels.*0, 1, 2.*sst2 has 2"),
        ("mnli", ["premise\thypothesis\tlabel", "a\tb\t1", "b\tc\t0"], r"2 labels.*mnli has 3"),
        ("classification", ["sentence\tlabel", "a\t1", "b\t1"], r"1 labels.*--label"),
        ("classification", ["sentence\tlabel", *(f"a\t{i}" for i in range(9))], r"9 labels.*--label"),
        ("sst2", ["sentence\tlabel", "a\t1", "b\tneg"], r"dev\.tsv, line 3: label is '0'.*1, neg"),
        ("sst2", ["review\tlabel", "a\t1"], r"'review', 'label'; 'sentence' is expected.*--text"),
        (
            "classification",
            ["review\tlabel", "a\t1"],
            r"expected: 'premise' \+ 'hypothesis', 'question' \+ 'sentence', .*, 'sentence', 'text'\. Name .*--text",
        ),
        ("sst2", ["question\tsentence\tlabel", "a\tb\t1"], r"question and sentence .* two texts.*sst2 has one.*--text"),
        ("sst2", ["sentence\tclass", "a\t1"], r"'sentence', 'class'; 'label' or 'gold_label' or .*--label"),
        ("sst2", ["sentence\tlabel", "a\tb\t1"], r"line 2.*3 fields.*2 are"),
        ("sst2", ["sentence\tlabel", "a\t "], r"line 2.*label is ' '"),
        ("sst2", ["sentence\tlabel"], r"train\.tsv has no examples"),
        ("stsb", ["sentence1\tsentence2\tscore", "a\tb\thigh"], r"line 2.*'high'.*number"),
        ("stsb", ["sentence1\tsentence2\tscore", "a\tb\tnan"], r"line 2.*'nan'.*finite"),
    ],
)
def test_tables_that_are_refused(task: str, train: list[str], match: str, tmp_path: Path) -> None:
    dev = GOOD_LINES if train[0].startswith("sentence\t") else train
    (tmp_path / "train.tsv").write_text("\n".join(train), encoding="utf-8")
    (tmp_path / "dev.tsv").write_text("\n".join(dev), encoding="utf-8")
    with pytest.raises(ValueError, match=match):
        read_task(TASKS[task], tmp_path)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"sentence": 3, "label": 1}', r"line 3.*sentence is 3"),
        ('{"sentence": "a", "label": null}', r"line 3.*label is None"),
        ('{"sentence": "a"}', r"line 3.*'label'.*missing"),
        ("[1, 2]", r"line 3.*object"),
        ('{"sentence"', r"line 3.*JSON"),
    ],
)
def test_lines_of_json_that_are_refused(line: str, match: str, tmp_path: Path) -> None:
    make_task(tmp_path, opinions(2, 0), opinions(2, 0))
    with (tmp_path / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=match):
        read_task(TASKS["sst2"], tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("train.tsv", b"sentence\tlabel\na\xff\t1\n", r"train\.tsv.*UTF-8"),
        ("train.tsv.xz", lzma.compress(b"sentence\tlabel\na\t1\n" * 99)[:-20], r"train\.tsv\.xz is damaged"),
        ("train.tsv.gz", gzip.compress(b"sentence\tlabel\na\t1\n" * 99)[:-20], r"train\.tsv\.gz is damaged"),
        ("train.tsv.gz", b"no gzip at all", r"train\.tsv\.gz is damaged"),
    ],
    ids=["not UTF-8", "torn xz", "torn gz", "no gz"],
)
def test_files_that_cannot_be_read(name: str, content: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "dev.tsv").write_text("\n".join(GOOD_LINES), encoding="utf-8")
    with pytest.raises(ValueError, match=match):
        read_task(TASKS["sst2"], tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data.*nowhere"):
        read_task(TASKS["sst2"], tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}.*train"):
        read_task(TASKS["sst2"], tmp_path)
    write_jsonl(tmp_path / "train.jsonl", opinions(4, 0))
    with pytest.raises(ValueError, match=r"dev.*dev_matched.*validation"):
        read_task(TASKS["sst2"], tmp_path)
    with pytest.raises(ValueError, match="mismatched"):
        read_task(TASKS["sst2"], tmp_path, dev="mismatched")
    with pytest.raises(ValueError, match=r"--text.*3 times"):
        read_task(TASKS["sst2"], tmp_path, texts=["a", "b", "c"])
