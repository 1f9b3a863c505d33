"""The built-in corpus is the same every time and holds what it should."""

from pathlib import Path

from raptr.data.corpus import Document, builtin, python_files


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
