"""Every kind of input gives its documents, and every kind of damage is named with file and line."""

import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raptr.data import Document
from raptr.data.compression import extra
from raptr.data.reading import DocumentsInput, FileInput, HubInput, Input, Record

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
    assert problems(broken)[1].endswith("b.parquet, row 2: expected a string in the field 'text', found null")
    (other,) = problems(FileInput.of(tmp_path / "a.parquet", "content"))
    assert other.endswith("a.parquet: expected the column 'content', found 'n', 'text'")
    whole = (tmp_path / "a.parquet").read_bytes()
    (torn,) = problems(written(tmp_path / "c.parquet", whole[: len(whole) // 2]))
    assert "c.parquet, row 1: expected a whole parquet file, found" in torn


def test_a_streamed_dataset(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(lines(TEXTS))
    (tmp_path / "set" / "validation.jsonl").write_bytes(lines(["held out"]))
    name = f"hf:{tmp_path / 'set'}"
    for start in range(6):
        assert texts(HubInput(name, "text"), start) == TEXTS[start:]
    assert texts(HubInput(f"{name}::validation", "text")) == ["held out"]
    assert problems(HubInput(name, "body"))[1] == f"{name}, row 2: expected the field 'body', found 'n', 'text'"
    assert "row 1: expected a string in the field 'n', found a number" in problems(HubInput(name, "n"))[0]
    for bad in (f"{name}::nonsense", f"hf:{tmp_path / 'nowhere'}"):
        with pytest.raises(ValueError, match=f"{bad}: expected a dataset that can be read, found: "):
            list(HubInput(bad, "text").records(0))
    with pytest.raises(ValueError, match="hf:a:b:c:d: expected hf:NAME, hf:NAME:CONFIG or"):
        list(HubInput("hf:a:b:c:d", "text").records(0))


def test_documents_in_memory() -> None:
    one = DocumentsInput(lambda: [Document(f"{i}", text) for i, text in enumerate(TEXTS)])
    assert texts(one) == TEXTS
    assert texts(one, 3) == TEXTS[3:]
    assert problems(DocumentsInput(lambda: [Document("a", "\ud800")])) == [
        "document 'a': expected Unicode text in the field 'text', found half of a surrogate pair"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", "expected JSON, found text that is not (Expecting"),
        (b'{"text": "cut', "expected JSON, found text that is not (Unterminated string starting at, column 10)"),
        (b"[" * 10**6, "expected JSON, found text that is not (maximum recursion"),
        (b'["text"]', "expected an object with the field 'text', found a list"),
        (b'"text"', "expected an object with the field 'text', found a string"),
        (b"7.5", "expected an object with the field 'text', found a number"),
        (b"null", "expected an object with the field 'text', found null"),
        (b'{"title": "a", "body": "b"}', "expected the field 'text', found 'title', 'body'"),
        (b"{}", "expected the field 'text', found no field"),
        (b'{"text": null}', "expected a string in the field 'text', found null"),
        (b'{"text": true}', "expected a string in the field 'text', found a boolean"),
        (b'{"text": {"a": 1}}', "expected a string in the field 'text', found an object"),
        (b'{"text": "\xff"}', "expected UTF-8, found the byte 0xff (invalid start byte)"),
        (b'{"text": "\\ud83d"}', "expected Unicode text in the field 'text', found half of a surrogate pair"),
    ],
)
def test_a_broken_line_is_named_and_the_others_are_read(tmp_path: Path, line: bytes, message: str) -> None:
    one = written(tmp_path / "a.jsonl", lines(["a", "b"]) + line + b"\n" + lines(["d"]))
    for start in range(3):
        records = list(one.records(start))
        assert [record.position for record in records] == sorted(record.position for record in records)
        assert [record.text for record in records] == ["a", "b", "", "d"][start:]
        assert records[2 - start].problem.startswith(f"{tmp_path / 'a.jsonl'}, line 3: {message}")
    assert texts(one, 3) == ["d"]


def test_a_text_that_is_no_utf8(tmp_path: Path) -> None:
    one = written(tmp_path / "a.txt", "eins\nzwei\ngröße\n".encode("latin-1"))
    (problem,) = problems(one)
    assert problem == f"{one.path}, line 3: expected UTF-8, found the byte 0xf6 (invalid start byte)"


def test_what_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raptr.data.reading.LONGEST", 100)
    assert problems(written(tmp_path / "a.txt", b"x" * 101)) == [
        f"{tmp_path / 'a.txt'}: expected a document of at most 100 bytes, found more; split it into several"
    ]
    assert texts(written(tmp_path / "a.txt", b"x" * 100)) == ["x" * 100]
    one = written(tmp_path / "a.jsonl", lines(["a", "x" * 350, "c"]))
    assert [record.text for record in one.records(0)] == ["a", "", "c"]
    assert problems(one)[1].endswith("a.jsonl, line 2: expected a line of at most 100 bytes, found a longer one")


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_a_torn_file_is_no_short_one(tmp_path: Path, compression: str) -> None:
    many = [f"{i} {os.urandom(40).hex()}" for i in range(4000)]
    whole = COMPRESSORS[compression](lines(many))
    for cut in (len(whole) - 1, len(whole) * 3 // 4, len(whole) // 3, 20):
        one = written(tmp_path / f"a.jsonl{compression}", whole[:cut])
        *good, last = one.records(0)
        assert [record.text for record in good] == many[: len(good)]
        assert f"a.jsonl{compression}, line {len(good) + 1}: expected a whole file, found a damaged one" in last.problem
        # Gone on from any place, the damage is met once.
        assert [record.problem for record in one.records(len(good))] == [last.problem]
        assert list(one.records(len(good) + 1)) == []
        (text,) = problems(written(tmp_path / f"a.txt{compression}", whole[:cut]))
        assert f"a.txt{compression}: expected a whole file, found a damaged one" in text


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_what_only_claims_to_be_compressed(tmp_path: Path, compression: str) -> None:
    COMPRESSORS[compression](b"")
    (problem,) = problems(written(tmp_path / f"a.jsonl{compression}", lines(TEXTS)))
    assert f"a.jsonl{compression}, line 1: expected a whole file, found a damaged one" in problem


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", lines(TEXTS))
    one.path.unlink()
    assert list(one.records(0)) == [
        Record("", f"{one.path}: expected a file that can be read, found No such file or directory", one.size)
    ]
    assert list(one.records(1)) == []
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    (problem,) = problems(FileInput.of(tmp_path / "link.txt", "text"))
    assert problem.endswith("link.txt: expected a file that can be read, found No such file or directory")


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
    with pytest.raises(ValueError, match=r"a.zst: needs the package zstandard; install .* 'raptr\[zst\]'"):
        list(written(tmp_path / "a.zst", b"").records(0))
    with pytest.raises(ValueError, match=r"a.parquet: needs the package pyarrow; install .* 'raptr\[datasets\]'"):
        list(written(tmp_path / "a.parquet", b"").records(0))
    with pytest.raises(ValueError, match=r"hf:a: needs the package datasets; install .* 'raptr\[datasets\]'"):
        list(HubInput("hf:a", "text").records(0))
    assert extra("json", "any", "any") is json
