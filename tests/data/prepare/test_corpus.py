"""The built-in corpus is the same every time and holds what it should."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from raptr.data.prepare import corpus
from raptr.data.prepare.corpus import Document, builtin, python_files
from raptr.data.prepare.overlap import WINDOW, without_shared


def test_the_builtin_corpus_is_large_ordered_and_free_of_tests() -> None:
    documents = list(builtin())
    names = [document.name for document in documents]
    topics = [name for name in names if name.startswith("topics/")]
    library = [name for name in names if name.startswith("library/")]
    assert names == sorted(topics) + sorted(library)
    assert len(set(names)) == len(names)
    assert {"topics/assert", "library/argparse.py", "library/json/decoder.py"} <= set(names)
    assert sum(len(document.text) for document in documents) > 5_000_000
    assert all(document.text.strip() for document in documents)
    # The help topics are documents already.
    assert "library/pydoc_data/topics.py" not in names
    for name in library:
        folders = name.split("/")[1:-1]
        assert not {"test", "tests", "idle_test", "site-packages", "__pycache__"} & set(folders), name
    assert documents == list(builtin())


def test_what_is_left_out(tmp_path: Path) -> None:
    kept = ["b.py", "a/z.py", "a.py", "pkg/inner/c.py"]
    left_out = [
        "test/t.py",
        "pkg/tests/t.py",
        "idlelib/idle_test/t.py",
        "site-packages/other/o.py",
        "__pycache__/p.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "notes.txt",
    ]
    for name in kept + left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text = {name!r}\n", encoding="utf-8")
    (tmp_path / "empty.py").write_text("\n", encoding="utf-8")
    (tmp_path / "latin.py").write_bytes("# é\n".encode("latin-1"))
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere.py")
    found = list(python_files(tmp_path))
    assert [document.name for document in found] == [f"library/{name}" for name in sorted(kept)]
    assert found[0] == Document("library/a.py", "text = 'a.py'\n")


def test_packages_are_held_out_whole_and_quotations_are_cut() -> None:
    licence = "# Copyright of somebody, who lets everybody use this file as they like.\n"
    documents = [
        Document(f"library/package{i}/{file}.py", f"{licence}number = {i}\n{'abc'[j]} = {i}\n")
        for i in range(200)
        for j, file in enumerate(("__init__", "one", "two"))
    ]
    train, valid = corpus.split(documents)
    packages = [{document.name.split("/")[1] for document in side} for side in (train, valid)]
    assert not packages[0] & packages[1]
    assert len(packages[1]) == len(valid) / 3
    assert 2 < len(packages[1]) < 30
    assert train == [document for document in documents if document in train]
    own = {document.name: document.text.splitlines()[-1] for document in documents}
    for document in valid:
        assert document.text.splitlines()[-1] == own[document.name]
        assert licence not in document.text


@given(st.lists(st.text("ab\né", max_size=400), max_size=4), st.lists(st.text("ab\né", max_size=400), max_size=4))
@settings(max_examples=100, deadline=None)
def test_what_is_left_shares_nothing(texts: list[str], others: list[str]) -> None:
    others = [*others, *(text[len(text) // 3 :] for text in texts)]
    left = without_shared(texts, others)
    for text, before in zip(left, texts, strict=True):
        lines = iter(before.split("\n"))
        assert all(line in lines for line in text.split("\n") if line)  # some of the lines, in order
        data = text.encode()
        for i in range(len(data) - WINDOW + 1):
            assert not any(data[i : i + WINDOW] in other.encode() for other in others)


def test_lines_that_are_not_shared_stay() -> None:
    shared = "x" * WINDOW
    assert without_shared([f"one\n{shared}\ntwo\n", "three"], [f"four {shared} five"]) == ["one\ntwo\n", "three"]
    assert without_shared([f"one\n{shared[1:]}\n"], [shared[1:]]) == [f"one\n{shared[1:]}\n"]
    assert without_shared([], ["text"]) == []
    assert without_shared(["text"], []) == ["text"]
