"""Every kind of input gives its documents, and every kind of damage is named with file and line."""

import gzip
import io
import json
import logging
import lzma
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raptr.data.prepare import Document, reading
from raptr.data.prepare.compression import extra
from raptr.data.prepare.reading import DOCUMENTS, DocumentsInput, FileInput, HubInput, Input

TEXTS = ["first\nline", "zweiter Text: größer", "第三 🐍", "", "fifth"]


def lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"n": i, field: text}) + "\n" for i, text in enumerate(texts)).encode()


def zstd(data: bytes) -> bytes:
    compressor = pytest.importorskip("zstandard").ZstdCompressor()
    half = len(data) // 2
    # Two frames in one file, as parallel compressors write them.
    return bytes(compressor.compress(data[:half]) + compressor.compress(data[half:]))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def written(path: Path, data: bytes, field: str = "text") -> FileInput:
    path.write_bytes(data)
    return FileInput.of(path, field)


def texts(one: Input, start: int = 0) -> list[str]:
    records = list(one.records(start))
    assert [record.problem for record in records] == [""] * len(records)
    positions = [record.position for record in records]
    assert positions == sorted(positions)
    assert max(positions, default=0) <= one.size
    return [record.text for record in records]


def problems(one: Input, start: int = 0) -> list[str]:
    return [record.problem for record in one.records(start)]


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("kind", ["jsonl", "json", "ndjson"])
def test_lines_of_json(tmp_path: Path, kind: str, compression: str) -> None:
    one = written(tmp_path / f"a.{kind}{compression}", COMPRESSORS[compression](lines(TEXTS)))
    assert texts(one) == TEXTS
    for start in range(6):
        assert texts(one, start) == TEXTS[start:]


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("name", ["a.txt", "README.md", "module.py", "no_ending"])
def test_whole_files(tmp_path: Path, name: str, compression: str) -> None:
    text = "Eine Zeile.\r\nNoch eine: 第三\n"
    one = written(tmp_path / f"{name}{compression}", COMPRESSORS[compression](text.encode()))
    assert texts(one) == [text]
    assert texts(one, 1) == []


def test_other_fields_blank_lines_marks_and_missing_ends(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + lines(["a", "b"], "content") + b"\n  \n" + lines(["c"], "content").rstrip()
    assert texts(written(tmp_path / "a.jsonl", data, "content")) == ["a", "b", "", "", "c"]
    assert texts(written(tmp_path / "a.txt", b"\xef\xbb\xbftext")) == ["text"]


def test_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"n": list(range(5)), "text": TEXTS})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    one = FileInput.of(tmp_path / "a.parquet", "text")
    for start in range(6):
        assert texts(one, start) == TEXTS[start:]
    parquet.write_table(arrow.table({"text": ["a", None, "c"]}), tmp_path / "b.parquet")
    broken = FileInput.of(tmp_path / "b.parquet", "text")
    assert [record.text for record in broken.records(0)] == ["a", "", "c"]
    assert re.search(r"b\.parquet, row 2: .*string.*'text'.*null", problems(broken)[1])
    (other,) = problems(FileInput.of(tmp_path / "a.parquet", "content"))
    assert re.search(r"a\.parquet: .*'content'.*'n', 'text'", other)
    whole = (tmp_path / "a.parquet").read_bytes()
    (torn,) = problems(written(tmp_path / "c.parquet", whole[: len(whole) // 2]))
    assert "c.parquet, row 1: " in torn


def test_a_streamed_dataset(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(lines(TEXTS))
    (tmp_path / "set" / "validation.jsonl").write_bytes(lines(["held out"]))
    name = f"hf:{tmp_path / 'set'}"
    for start in range(6):
        assert texts(HubInput(name, "text"), start) == TEXTS[start:]
    assert texts(HubInput(f"{name}::validation", "text")) == ["held out"]
    assert re.match(f"{name}, row 2: .*'body'.*'n', 'text'", problems(HubInput(name, "body"))[1])
    assert re.search("row 1: .*string.*'n'.*number", problems(HubInput(name, "n"))[0])
    for bad in (f"{name}::nonsense", f"hf:{tmp_path / 'nowhere'}"):
        with pytest.raises(ValueError, match=f"{bad}: .*dataset"):
            list(HubInput(bad, "text").records(0))
    with pytest.raises(ValueError, match=r"hf:a:b:c:d: .*hf:NAME:CONFIG:SPLIT"):
        list(HubInput("hf:a:b:c:d", "text").records(0))


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    logger = logging.getLogger("huggingface_hub")

    def unreachable(*_: Any, **__: Any) -> Any:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("Couldn't reach 'a/b' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(reading, "_reach_hub", lambda _: None)
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(shown := io.StringIO())])
    level = logger.level
    with pytest.raises(ValueError, match=r"hf:a/b\b.*hub.*network"):
        list(HubInput("hf:a/b", "text").records(0))
    assert shown.getvalue() == ""
    assert logger.level == level
    logger.warning("seen")
    assert shown.getvalue() == "seen\n"


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets, hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    asked: list[str] = []

    class Client:
        def head(self, address: str, **_: Any) -> None:
            asked.append(address)
            raise RuntimeError("no route to it")

    monkeypatch.setattr(hub, "get_session", Client)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(ValueError, match=r"hf:a/b: .*hub was not reached.*no route.*network.*--data"):
        list(HubInput("hf:a/b", "text").records(0))
    assert asked == [hub.constants.ENDPOINT]


def test_documents_in_memory() -> None:
    one = DocumentsInput(lambda: [Document(f"{i}", text) for i, text in enumerate(TEXTS)])
    assert texts(one) == TEXTS
    assert texts(one, 3) == TEXTS[3:]
    (problem,) = problems(DocumentsInput(lambda: [Document("a", "\ud800")]))
    assert re.match("document 'a': .*surrogate", problem)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", "JSON.*column 2"),
        (b'{"text": "cut', "JSON.*column 10"),
        (b"[" * 10**6, "JSON.*nested"),
        (b'{"text": "a", "more": ' + b"[" * 10**6, "JSON.*nested"),
        (b'["text"]', "'text'.*list"),
        (b'"text"', "'text'.*string"),
        (b"7.5", "'text'.*number"),
        (b"1" * 5000, "'text'.*number"),
        (b"null", "'text'.*null"),
        (b'{"title": "a", "body": "b"}', "'text'.*'title', 'body'"),
        (b"{}", "'text'.*no field"),
        (b'{"text": null}', "string.*'text'.*null"),
        (b'{"text": true}', "string.*'text'.*boolean"),
        (b'{"text": 1e999}', "string.*'text'.*number"),
        (b'{"text": {"a": 1}}', "string.*'text'.*object"),
        (b'{"text": "\xff"}', "UTF-8.*0xff"),
        (b'{"text": "\\ud83d"}', "'text'.*surrogate"),
    ],
)
def test_a_broken_line_is_named_and_the_others_are_read(tmp_path: Path, line: bytes, message: str) -> None:
    one = written(tmp_path / "a.jsonl", lines(["a", "b"]) + line + b"\n" + lines(["d"]))
    for start in range(3):
        records = list(one.records(start))
        assert [record.position for record in records] == sorted(record.position for record in records)
        assert [record.text for record in records] == ["a", "b", "", "d"][start:]
        assert re.match(f"{tmp_path / 'a.jsonl'}, line 3: .*{message}", records[2 - start].problem)
    assert texts(one, 3) == ["d"]


def test_numbers_beside_the_text_may_be_of_any_size(tmp_path: Path) -> None:
    line = b'{"text": "a", "n": ' + b"1" * 5000 + b', "m": 1e999}\n'
    assert texts(written(tmp_path / "a.jsonl", line)) == ["a"]


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("eins\nzwei\ngröße\n".encode("latin-1"), "line 3: .*UTF-8.*0xf6"),
        ("one\n".encode("utf-16"), "line 1: .*UTF-8.*UTF-16.*iconv"),
        (b"one\ntwo\n\0\0\0", "line 3: .*zero byte"),
        ("one".encode("utf-16-le"), "line 1: .*zero byte.*UTF-16"),
        (b"\x89PNG\r\n\x1a\n", "line 1: .*UTF-8.*0x89"),
    ],
)
def test_what_is_no_text(tmp_path: Path, documents: str, data: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    found = [problem for problem in problems(FileInput.of(tmp_path / "a.txt", "text", documents)) if problem]
    assert re.match(f"{tmp_path / 'a.txt'}, {message}", found[0])


TEXT = "\n \nOne line.\nAnother.\n\r\n\n  \tThird, indented.\r\nFourth: größer\r\n\n\nLast"
PARAGRAPHS = ["One line.\nAnother.", "  \tThird, indented.\r\nFourth: größer", "Last"]


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_paragraphs_and_lines_of_a_text(tmp_path: Path, compression: str) -> None:
    for data in (TEXT.encode(), b"\xef\xbb\xbf" + TEXT.lstrip().encode() + b"\n"):
        path = tmp_path / f"a.txt{compression}"
        path.write_bytes(COMPRESSORS[compression](data))
        by_paragraph, by_line = FileInput.of(path, "text", "blank-line"), FileInput.of(path, "text", "line")
        rows = [line.rstrip("\r") for paragraph in PARAGRAPHS for line in paragraph.split("\n")]
        for start in range(6):
            assert texts(by_paragraph, start) == PARAGRAPHS[start:]
            assert texts(by_line, start) == rows[start:]
    assert [one.unit for one in (by_paragraph, by_line, FileInput.of(path, "text"))] == [
        "paragraph",
        "line of text",
        "text file",
    ]


def test_json_and_tables_have_their_own_documents(tmp_path: Path) -> None:
    data = lines(["a\n\nb", "c"])
    (tmp_path / "a.jsonl").write_bytes(data)
    for documents in DOCUMENTS:
        one = FileInput.of(tmp_path / "a.jsonl", "text", documents)
        assert texts(one) == ["a\n\nb", "c"]
        assert one.unit == "line of JSON"
    assert FileInput.of(tmp_path / "a.parquet", "text", "line").unit == "row"


def test_what_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raptr.data.prepare.reading.LONGEST", 100)
    (problem,) = problems(written(tmp_path / "a.txt", b"x" * 101))
    assert re.match(f"{tmp_path / 'a.txt'}: .*100 bytes", problem)
    assert texts(written(tmp_path / "a.txt", b"x" * 100)) == ["x" * 100]
    one = written(tmp_path / "a.jsonl", lines(["a", "x" * 350, "c"]))
    assert [record.text for record in one.records(0)] == ["a", "", "c"]
    assert re.search(r"a\.jsonl, line 2: .*100 bytes", problems(one)[1])
    (tmp_path / "b.txt").write_bytes(b"one\n" + b"x" * 101 + b"\ntwo\n" + b"three four\n" * 20)
    by_paragraph = FileInput.of(tmp_path / "b.txt", "text", "blank-line")
    records = list(by_paragraph.records(0))
    assert [record.text.count("\n") for record in records] == [0, 0, 9, 9, 0]
    assert [re.search(r"b\.txt, line 2: .*100 bytes", record.problem) is not None for record in records] == [
        False,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_a_torn_file_is_no_short_one(tmp_path: Path, compression: str) -> None:
    many = [f"{i} {os.urandom(40).hex()}" for i in range(4000)]
    whole = COMPRESSORS[compression](lines(many))
    for cut in (len(whole) - 1, len(whole) * 3 // 4, len(whole) // 3, 20):
        one = written(tmp_path / f"a.jsonl{compression}", whole[:cut])
        *good, last = one.records(0)
        assert [record.text for record in good] == many[: len(good)]
        assert re.search(rf"a\.jsonl{compression}, line {len(good) + 1}: .*damaged", last.problem)
        # Gone on from any place, the damage is met once.
        assert [record.problem for record in one.records(len(good))] == [last.problem]
        assert list(one.records(len(good) + 1)) == []
        (text,) = problems(written(tmp_path / f"a.txt{compression}", whole[:cut]))
        assert re.search(rf"a\.txt{compression}: .*damaged", text)
        torn = FileInput.of(tmp_path / f"a.txt{compression}", "text", "line")
        assert re.search(rf"a\.txt{compression}, line {len(good) + 1}: .*damaged", list(torn.records(0))[-1].problem)


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_what_only_claims_to_be_compressed(tmp_path: Path, compression: str) -> None:
    COMPRESSORS[compression](b"")
    (problem,) = problems(written(tmp_path / f"a.jsonl{compression}", lines(TEXTS)))
    assert re.search(rf"a\.jsonl{compression}, line 1: .*damaged", problem)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", lines(TEXTS))
    one.path.unlink()
    (record,) = one.records(0)
    assert (record.text, record.position) == ("", one.size)
    assert re.match(f"{one.path}: .*No such file", record.problem)
    assert list(one.records(1)) == []
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    (problem,) = problems(FileInput.of(tmp_path / "link.txt", "text"))
    assert re.search(r"link\.txt: .*No such file", problem)


def test_a_mistake_of_ours_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: Any) -> Any:
        raise AttributeError("ours")

    one = written(tmp_path / "a.txt.gz", gzip.compress(b"text"))
    monkeypatch.setattr("gzip.GzipFile.read", mistaken)
    with pytest.raises(AttributeError, match="ours"):
        list(one.records(0))


def test_a_missing_package_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("zstandard", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ValueError, match=r"a\.zst.*zstandard.*'\.\[zst\]'"):
        list(written(tmp_path / "a.zst", b"").records(0))
    with pytest.raises(ValueError, match=r"a\.parquet.*pyarrow.*'\.\[datasets\]'"):
        list(written(tmp_path / "a.parquet", b"").records(0))
    with pytest.raises(ValueError, match=r"hf:a\b.*datasets.*'\.\[datasets\]'"):
        list(HubInput("hf:a", "text").records(0))
    assert extra("json", "any", "any") is json
