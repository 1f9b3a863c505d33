"""One command prepares the text of all comparisons."""

import json
import lzma
from pathlib import Path

import pytest

from evidence import prepare
from raptr.data import open_store

PARTS = {"train": 40, "valid": 12}


def names(folder: Path) -> set[str]:
    return {domain.name for domain in open_store(folder).domains}


def test_every_objective_gets_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "VOCABULARY", 512)
    more = tmp_path / "more"
    more.mkdir()
    files = {tmp_path / f"{domain}.{part}": count for domain in prepare.DOMAINS for part, count in PARTS.items()}
    files |= {more / name: 60 for name in ("books2.train.00", "books2.train.01", "talk2.train.00")}
    for number, (path, count) in enumerate(files.items()):
        texts = (f"{path.name} {row} " + " ".join(str(row * number + k) for k in range(80)) for row in range(count))
        with lzma.open(f"{path}.jsonl.xz", "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    prepare.main([str(tmp_path), "--more", str(more), "--out", str(tmp_path)])
    for name in ("corpus", "corpus-causal", "corpus-ul2"):
        assert names(tmp_path / name) == set(prepare.DOMAINS)
    assert names(tmp_path / "corpus-arxiv") == {"arxiv"}
    wide = open_store(tmp_path / "corpus-wide")
    assert names(tmp_path / "corpus-wide") == {*prepare.DOMAINS, "books2", "talk2"}
    (books,) = [domain for domain in wide.manifest.domains if domain.name == "books2"]
    assert books.count("train") > 60  # of both of its files
    for name in ("corpus-arxiv", "corpus-wide"):
        assert open_store(tmp_path / name).vocabulary == open_store(tmp_path / "corpus").vocabulary


def test_text_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prepare.main([str(tmp_path)])
    assert "no wikipedia.train.jsonl.xz" in capsys.readouterr().err
    for domain in prepare.DOMAINS:
        for part in PARTS:
            (tmp_path / f"{domain}.{part}.jsonl.xz").touch()
    with pytest.raises(SystemExit):
        prepare.main([str(tmp_path), "--more", str(tmp_path)])
    assert "no DOMAIN.train.*.jsonl.xz" in capsys.readouterr().err
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "web.train.00.jsonl.xz").touch()
    with pytest.raises(SystemExit):
        prepare.main([str(tmp_path), "--more", str(tmp_path / "more")])
    assert "web, which" in capsys.readouterr().err  # it would take the place of the text with the same name
