"""A preparation that was stopped goes on and ends with the same bytes; another request does not."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from rich.console import Console

from raptr.data.prepare import DomainSource, Progress, prepare_corpus
from raptr.data.prepare.console import preparation_bar
from raptr.data.prepare.writer import _File
from raptr.failures import reported

KILLING = Path(__file__).with_name("killing.py")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for domain, count in (("wiki", 40), ("web", 25)):
        (tmp_path / "corpus" / domain).mkdir(parents=True)
        for part in range(2):
            texts = [f"In {domain}, text {i} says {i * part}. " * (1 + i % 5) for i in range(count)]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (tmp_path / "corpus" / domain / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path / "corpus"


def domains(corpus: Path) -> list[DomainSource]:
    return [DomainSource(name, (str(corpus / name),)) for name in ("wiki", "web")]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
# (1, 1) are all moments, and take a minute.
@pytest.mark.parametrize("settings", [("1", "7"), ("4", "7", "deduplicate")])
def test_killed_at_many_moments(corpus: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    (tmp_path / "work").mkdir()
    command = [sys.executable, str(KILLING), str(corpus), str(tmp_path / "work"), *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    kills, starts, files = map(int, ended.stdout.split())
    assert kills > 15
    assert starts > 2
    assert files > 12


class Stopped(BaseException):
    """Stands for Ctrl-C."""


def stop(corpus: Path, out: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare, and stop after some chunks were encoded and entered in the journal."""
    calls = 0

    def progress(how_far: Progress) -> None:
        nonlocal calls
        calls += how_far.stage == "encoding"
        if calls == at:
            raise Stopped

    monkeypatch.setattr("raptr.data.prepare.encoding.JOURNAL_EVERY", 0.0)
    monkeypatch.setattr("raptr.data.prepare.stream.CHUNK", 300)
    with pytest.raises(Stopped):
        prepare_corpus(domains(corpus), out, vocabulary=300, progress=progress)
    assert not out.exists()


def test_it_says_that_it_goes_on_and_encodes_only_the_rest(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said, calls = tmp_path / "out", list[str](), list[Progress]()
    stop(corpus, out, 12, monkeypatch)
    prepare_corpus(domains(corpus), out, vocabulary=300, progress=calls.append, say=said.append)
    assert len(said) == 1
    assert said[0].startswith(f"{out}.partial: going on")
    assert {call.stage for call in calls} == {"encoding"}
    assert calls[0].documents > 20
    assert calls[-1].documents == 130
    whole = prepare_corpus(domains(corpus), tmp_path / "whole", vocabulary=300)
    assert contents(out) == contents(whole.path)


def test_a_changed_request_starts_over_and_says_why(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said = tmp_path / "out", list[str]()
    stop(corpus, out, 12, monkeypatch)
    prepare_corpus(domains(corpus), out, vocabulary=290, say=said.append)
    assert re.match(f"{out}.partial: starting over.*vocabulary.*300.*290", said[0])
    whole = prepare_corpus(domains(corpus), tmp_path / "whole", vocabulary=290)
    assert contents(out) == contents(whole.path)


def test_changed_files_or_versions_start_over(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, said = tmp_path / "out", list[str]()
    stop(corpus, out, 5, monkeypatch)
    with (corpus / "web" / "1.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "one more"}\n')
    stop(corpus, out, 5, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "__version__", "0.0.1")
        with pytest.raises(Stopped):
            prepare_corpus(domains(corpus), out, vocabulary=300, say=said.append, progress=_stop)
    assert re.match(rf"{out}.partial: starting over.*tokenizers.*0\.0\.1", said[0])
    prepare_corpus(domains(corpus), out, vocabulary=300, say=said.append)
    assert not any("out.partial" in sentence for sentence in said[1:])
    with (corpus / "web" / "1.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "and another"}\n')
    with pytest.raises(ValueError, match=rf"{out}.*web.*files.*\(2 of \d+ bytes"):
        prepare_corpus(domains(corpus), out, vocabulary=300)


def _stop(_: Progress) -> None:
    raise Stopped


@pytest.mark.parametrize("older", [False, True], ids=["torn", "of an earlier version"])
def test_an_unreadable_journal_starts_over(
    older: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said = tmp_path / "out", list[str]()
    stop(corpus, out, 8, monkeypatch)
    journal = tmp_path / "out.partial" / "journal.json"
    facts = json.loads(journal.read_text(encoding="utf-8"))
    facts["left_out"] = facts.pop("counts")[:3]  # before bytes were counted
    journal.write_text(json.dumps(facts) if older else "{", encoding="utf-8")
    prepare_corpus(domains(corpus), out, vocabulary=300, say=said.append)
    assert "starting over" in said[0]
    assert contents(out) == contents(prepare_corpus(domains(corpus), tmp_path / "whole", vocabulary=300).path)


def test_what_is_prepared_is_reused(corpus: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "out", list[str]()
    out.mkdir()  # an empty folder is no obstacle
    store = prepare_corpus(domains(corpus), out, vocabulary=300)
    before = contents(out)
    again = prepare_corpus(domains(corpus), out, vocabulary=300, workers=1, say=said.append, progress=_stop)
    assert again.fingerprint == store.fingerprint
    assert len(said) == 1
    assert str(out) in said[0]
    assert contents(out) == before


@pytest.mark.parametrize("writings", [("texts", "texts/"), ("texts/", "texts"), ("texts", "./texts")])
def test_a_folder_may_be_written_in_two_ways(
    writings: tuple[str, str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (corpus / "wiki").rename(tmp_path / "texts")
    (corpus / "web").rename(tmp_path / "held")
    first, second = ([DomainSource("a", (path,), valid=(path.replace("texts", "held"),))] for path in writings)
    store = prepare_corpus(first, tmp_path / "out", vocabulary=300)
    assert prepare_corpus(second, tmp_path / "out", vocabulary=300, progress=_stop).fingerprint == store.fingerprint


def test_what_another_request_prepared_is_refused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_corpus(domains(corpus), out, vocabulary=300)
    both = domains(corpus)
    weighted = [DomainSource(one.name, one.paths, 2.0) for one in both]
    for given, settings, message in (
        (both, {"held_out": 0.1}, r"held_out.*0\.02.*0\.1"),
        (both, {"field": "body"}, "field.*text.*body"),
        (both[:1], {}, "domains.*wiki, web.*wiki"),
        (weighted, {}, r"wiki.*weight.*None.*2\.0"),
    ):
        with pytest.raises(ValueError, match=f"{out}.*{message}"):
            prepare_corpus(given, out, vocabulary=300, **settings)


def test_strange_folders_are_left_alone(corpus: Path, tmp_path: Path) -> None:
    for name, place in (("out", "out"), ("other", "other.partial")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "thesis.tex").write_text("mine", encoding="utf-8")
        with pytest.raises(ValueError, match=rf"{tmp_path / place}\b.*thesis\.tex"):
            prepare_corpus(domains(corpus), tmp_path / name, vocabulary=300)
        assert (tmp_path / place / "thesis.tex").read_text(encoding="utf-8") == "mine"
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match=f"out.*{tmp_path / 'file'}.*is a file"):
        prepare_corpus(domains(corpus), tmp_path / "file", vocabulary=300)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_a_full_disk_is_named_and_the_rest_can_be_done_later(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, written = tmp_path / "out", 0
    monkeypatch.setattr("raptr.data.prepare.encoding.JOURNAL_EVERY", 0.0)
    monkeypatch.setattr("raptr.data.prepare.stream.CHUNK", 300)
    append = _File.append

    def full(file: _File, data: bytes) -> None:
        nonlocal written
        written += len(data)
        if written > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(_File, "append", full)
        with pytest.raises(OSError, match=r"No space left.*same command") as error:
            prepare_corpus(domains(corpus), out, vocabulary=300)
    assert error.value.filename == f"{out}.partial"
    said: list[str] = []
    prepare_corpus(domains(corpus), out, vocabulary=300, say=said.append)
    assert "going on" in said[0]
    assert contents(out) == contents(prepare_corpus(domains(corpus), tmp_path / "whole", vocabulary=300).path)


@pytest.mark.parametrize(("stage", "code", "said"), [("reading", 130, "interrupted"), ("encoding", 3, "continues")])
def test_control_c_says_what_the_same_command_does(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: str, code: int, said: str
) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.stage == stage:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended, reported(), preparation_bar(Console(stderr=True), out):
        prepare_corpus(domains(corpus), out, vocabulary=300, progress=interrupt)
    assert ended.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert (tmp_path / "out.partial").exists() == (code == 3)


@pytest.mark.skipif(sys.platform == "win32", reason="has no flock")
def test_two_at_once_do_not_write_the_same_folder(corpus: Path, tmp_path: Path) -> None:
    refused: list[str] = []

    def meanwhile(_: Progress) -> None:
        if not refused:
            with pytest.raises(ValueError, match=r"out\.partial.*another process") as error:
                prepare_corpus(domains(corpus), tmp_path / "out", vocabulary=300)
            refused.append(str(error.value))

    prepare_corpus(domains(corpus), tmp_path / "out", vocabulary=300, progress=meanwhile).verify()
    assert refused
