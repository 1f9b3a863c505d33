"""Domains are read from one word each, and find the files that are meant."""

import math
import os
import re
from pathlib import Path

import pytest

from raptr.data.prepare import DomainSource, parse_domain
from raptr.data.prepare.domains import checked, with_valid
from raptr.data.prepare.reading import FileInput, HubInput


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
        ("", "domain.*''.*NAME=PATH"),
        ("wiki=", "domain.*'wiki='.*NAME=PATH"),
        ("wiki=a:0", r"wiki.*weight.* 0\b"),
        ("wiki=a:-3", "wiki.*weight.* -3"),
        ("wiki=a:nan", "wiki.*weight.* nan"),
        ("wiki=a:inf", "wiki.*weight.* inf"),
    ],
)
def test_bad_words(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_domain(text)


def test_bad_domains() -> None:
    for name in ("", "a b", "../up", ".hidden", "-a"):
        with pytest.raises(ValueError, match=f"domain.*{name!r}.*letters"):
            DomainSource(name, ("a",))
    with pytest.raises(ValueError, match=r"domain a\b.*path"):
        DomainSource("a", ())
    with pytest.raises(ValueError, match="domain"):
        checked([])
    with pytest.raises(ValueError, match=r"wiki \(a\).*Wiki \(b\).*NAME=PATH"):
        checked([DomainSource("wiki", ("a",)), DomainSource("Wiki", ("b",))])
    with pytest.raises(ValueError, match=r"domain b\b.*weight"):
        checked([DomainSource("a", ("a",), 1.0), DomainSource("b", ("b",))])
    checked([DomainSource("a", ("a",)), DomainSource("b", ("b",))])
    assert math.isclose(DomainSource("a", ("a",), 1e-9).weight or 0, 1e-9)


@pytest.mark.parametrize("texts", [["x/train.jsonl", "y/train.jsonl"], ["a=X", "a=Y"], ["a=X:1", "a=X:1"]])
def test_domains_of_one_name_are_refused_with_and_without_held_out_text(texts: list[str]) -> None:
    domains = [parse_domain(text) for text in texts]
    for valid in ([], [f"{domains[0].name}=held-out.txt"]):
        with pytest.raises(ValueError, match=rf"{domains[0].name}.*{domains[0].paths[0]}.*{domains[1].paths[0]}"):
            checked(with_valid(domains, valid))


def test_weights_that_cannot_be_mixed() -> None:
    for weight in (1e308, 1e307):
        with pytest.raises(ValueError, match=r"weight.*1e\+30[78]"):
            checked([DomainSource(name, (name,), weight) for name in "ab"])
    with pytest.raises(ValueError, match=r"domain b\b.*weight.*0\.001.*100"):
        checked([DomainSource("a", ("a",), 1.0), DomainSource("b", ("b",), 0.001)])


def test_held_out_text_has_no_weight(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"valid.*'held\.txt:3'.*weight"):
        with_valid([parse_domain("a.txt")], ["held.txt:3"])
    (one,) = with_valid([parse_domain("a.txt")], ["b.txt", "c.txt"])
    assert one.valid == ("b.txt", "c.txt")


@pytest.mark.parametrize("name", ["notes:2", "x=1.txt", "a=b:3", "x=1:2.txt"])
def test_a_file_that_looks_like_a_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_text("text", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for text in (name, str(tmp_path / name), f"./{name}"):
        assert (parse_domain(text).paths, parse_domain(text).weight) == ((text,), None)
    assert parse_domain(f"mine={name}") == DomainSource("mine", (name,))
    assert parse_domain(f"mine={name}:5") == DomainSource("mine", (name,), 5.0)


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
    with pytest.raises(ValueError, match=rf"domain d\b.*{tree / 'empty'}"):
        found(tree, "empty")
    for path in ("nowhere.txt", "*.csv", "b.txt:x"):
        with pytest.raises(ValueError, match=rf"domain d\b.*{re.escape(str(tree / path))}"):
            found(tree, path)


def test_a_file_is_read_once_by_whatever_path(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "again.txt").symlink_to(tree / "b.txt")
    (tree / "a" / "up").symlink_to(tree)  # a loop
    everything = ["a.txt", "a/b/c.jsonl", "a/z.md", "again.txt"]
    assert found(tree, "") == everything
    assert sorted(Path(path).name for path in found(tree, "**/*.txt")) == ["a.txt", "again.txt"]
    monkeypatch.chdir(tree)
    assert len(DomainSource("d", ("a.txt", "./a.txt", str(tree / "a.txt"), "a.t*")).inputs("text")) == 1


def test_folders_behind_links_are_read(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    texts = tmp_path_factory.mktemp("texts")
    (texts / "linked").symlink_to(tree / "a")
    assert found(texts, "") == ["linked/b/c.jsonl", "linked/z.md"]


@pytest.mark.skipif(os.name == "nt", reason="has no such files")
def test_what_is_no_text_file_by_its_kind_is_passed_over(tree: Path) -> None:
    os.mkfifo(tree / "a" / "pipe")  # reading it would wait for a writer
    with pytest.raises(ValueError, match=r"domain pipe: \S+pipe is neither a file nor a folder.*read twice"):
        parse_domain(str(tree / "a" / "pipe")).inputs("text")
    assert found(tree, "a") == ["a/b/c.jsonl", "a/z.md"]
    assert found(tree, "a/*") == ["a/b/c.jsonl", "a/z.md"]


def test_a_folder_that_cannot_be_listed_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = os.scandir

    def refused(path: str) -> object:
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr("os.scandir", refused)
    with pytest.raises(OSError, match=str(tree / "a" / "b")):
        found(tree, "")


def test_the_request_knows_when_a_file_changes(tree: Path) -> None:
    source = DomainSource("d", (str(tree),))
    before = source.request(source.inputs("text"))
    assert source.request(source.inputs("text")) == before
    assert (before["files"], before["bytes"]) == (4, 5 + 6 + 11 + 5)
    (tree / "b.txt").write_text("B.txt", encoding="utf-8")
    assert source.request(source.inputs("text")) != before
