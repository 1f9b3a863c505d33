"""Domains are read from one word each, and find the files that are meant."""

import math
from pathlib import Path

import pytest

from raptr.data import DomainSource, parse_domain
from raptr.data.domains import checked
from raptr.data.reading import FileInput, HubInput


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("wiki=data/w.jsonl:17", DomainSource("wiki", ("data/w.jsonl",), 17.0)),
        ("wiki=data/w.jsonl:0.5", DomainSource("wiki", ("data/w.jsonl",), 0.5)),
        ("wiki=data/w.jsonl", DomainSource("wiki", ("data/w.jsonl",))),
        ("data/wiki.train.jsonl.xz", DomainSource("wiki.train", ("data/wiki.train.jsonl.xz",))),
        ("data/wiki.jsonl:3", DomainSource("wiki", ("data/wiki.jsonl",), 3.0)),
        ("web=C:\\text", DomainSource("web", ("C:\\text",))),
        ("data/books/", DomainSource("books", ("data/books/",))),
        ("data/web/**/*.jsonl.gz", DomainSource("web", ("data/web/**/*.jsonl.gz",))),
        ("my texts/ä b.md", DomainSource("b.md", ("my texts/ä b.md",))),
        ("hf:allenai/c4:en", DomainSource("c4", ("hf:allenai/c4:en",))),
        ("web=hf:allenai/c4:en:train:57", DomainSource("web", ("hf:allenai/c4:en:train",), 57.0)),
        ("a/b=c.txt", DomainSource("b-c", ("a/b=c.txt",))),
    ],
)
def test_a_domain_in_one_word(text: str, expected: DomainSource) -> None:
    assert parse_domain(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "domain is ''; NAME=PATH:WEIGHT, NAME=PATH or PATH is allowed"),
        ("wiki=", "domain is 'wiki='; NAME=PATH"),
        ("wiki=a:0", "domain wiki: weight is 0; a finite number above 0 is allowed"),
        ("wiki=a:-3", "domain wiki: weight is -3; a finite"),
        ("wiki=a:nan", "domain wiki: weight is nan; a finite"),
        ("wiki=a:inf", "domain wiki: weight is inf; a finite"),
    ],
)
def test_bad_words(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_domain(text)


def test_bad_domains() -> None:
    for name in ("", "a b", "../up", ".hidden", "-a"):
        with pytest.raises(ValueError, match="a name of letters, digits"):
            DomainSource(name, ("a",))
    with pytest.raises(ValueError, match="domain a: no path was given"):
        DomainSource("a", ())
    with pytest.raises(ValueError, match="domains: none was given"):
        checked([])
    with pytest.raises(ValueError, match="domain wiki was given twice"):
        checked([DomainSource("wiki", ("a",)), DomainSource("Wiki", ("b",))])
    with pytest.raises(ValueError, match="domain b has no weight but others have"):
        checked([DomainSource("a", ("a",), 1.0), DomainSource("b", ("b",))])
    checked([DomainSource("a", ("a",)), DomainSource("b", ("b",))])
    assert math.isclose(DomainSource("a", ("a",), 1e-9).weight or 0, 1e-9)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.md", "a/b/c.jsonl", "a.txt", ".git/config", "a/.hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    (tmp_path / "empty").mkdir()
    return tmp_path


def found(tree: Path, *paths: str) -> list[str]:
    inputs = DomainSource("d", tuple(str(tree / path) for path in paths)).inputs("text")
    assert all(isinstance(one, FileInput) for one in inputs)
    return [one.path.relative_to(tree).as_posix() for one in inputs if isinstance(one, FileInput)]


def test_files_folders_and_patterns(tree: Path) -> None:
    assert found(tree, "b.txt") == ["b.txt"]
    assert found(tree, "") == ["a.txt", "a/b/c.jsonl", "a/z.md", "b.txt"]
    assert found(tree, "*.txt") == ["a.txt", "b.txt"]
    assert found(tree, "**/*.md") == ["a/z.md"]
    assert found(tree, "?") == ["a/b/c.jsonl", "a/z.md"]
    assert found(tree, "b.txt", "*.txt") == ["b.txt", "a.txt"]
    assert DomainSource("d", ("hf:a:b",)).inputs("body") == (HubInput("hf:a:b", "body"),)


def test_a_file_whose_name_is_a_pattern(tree: Path) -> None:
    (tree / "c[1].txt").write_text("text", encoding="utf-8")
    assert found(tree, "c[1].txt") == ["c[1].txt"]


def test_nothing_there(tree: Path) -> None:
    with pytest.raises(ValueError, match=r"domain d: .*empty is a folder without files; at least one is needed"):
        found(tree, "empty")
    for path in ("nowhere.txt", "*.csv", "b.txt:x"):
        with pytest.raises(ValueError, match=r"domain d: .* is no file and no folder, and as a pattern it matches"):
            found(tree, path)


def test_the_request_knows_when_a_file_changes(tree: Path) -> None:
    source = DomainSource("d", (str(tree),))
    before = source.request(source.inputs("text"))
    assert source.request(source.inputs("text")) == before
    assert (before["files"], before["bytes"]) == (4, 5 + 6 + 11 + 5)
    (tree / "b.txt").write_text("B.txt", encoding="utf-8")
    assert source.request(source.inputs("text")) != before
