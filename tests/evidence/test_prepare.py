"""One command prepares the text of all comparisons."""

import json
import lzma
from pathlib import Path

import pytest

from evidence import prepare
from raptr.data import open_store


def names(folder: Path) -> set[str]:
    return {domain.name for domain in open_store(folder).domains}


def test_every_objective_gets_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "VOCABULARY", 512)
    for number, domain in enumerate(prepare.DOMAINS):
        for part, count in (("train", 40), ("valid", 12)):
            texts = (
                f"{domain} {part} {row} " + " ".join(str(row * number + k) for k in range(80)) for row in range(count)
            )
            with lzma.open(tmp_path / f"{domain}.{part}.jsonl.xz", "wt") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    prepare.main([str(tmp_path), "--out", str(tmp_path)])
    for name in ("corpus", "corpus-causal", "corpus-ul2"):
        assert names(tmp_path / name) == set(prepare.DOMAINS)
    assert names(tmp_path / "corpus-arxiv") == {"arxiv"}
    assert open_store(tmp_path / "corpus-arxiv").vocabulary == open_store(tmp_path / "corpus").vocabulary


def test_text_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prepare.main([str(tmp_path)])
    assert "no wikipedia.train.jsonl.xz" in capsys.readouterr().err
