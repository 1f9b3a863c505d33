"""Errors, interrupts and exit codes of the command line, and a package that is light to import."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import raptr
from raptr.failures import reported, work_in
from raptr.train.diverged import Diverged

PROGRAM = [sys.executable, "-m", "raptr"]


def failing(error: BaseException, folder: Path = Path("missing")) -> int:
    """The exit code of a command that works in this folder and raises this."""
    with pytest.raises(SystemExit) as ended, reported(), work_in(folder):
        raise error
    return int(str(ended.value.code))


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ValueError("train.steps is 0"), 2, "raptr: train.steps is 0\n"),
        (FileNotFoundError(2, "No such file", "x.txt"), 2, "raptr: x.txt: No such file. Check the path.\n"),
        (Diverged(7), 1, "step 7"),
        (KeyboardInterrupt(), 130, "raptr: interrupted\n"),
        (SystemExit(130), 130, "raptr: interrupted\n"),  # as typer ends an interrupted command
    ],
)
def test_what_was_foreseen_is_a_sentence(
    error: BaseException, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(error) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


def test_a_full_disk_says_what_to_do_and_where_the_work_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), tmp_path) == 2
    said = capsys.readouterr().err
    assert re.search("No space left.* Free .*space", said)
    assert str(tmp_path) in said
    assert "a file:" not in said


def test_a_problem_without_a_remedy_is_a_sentence_before_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(OSError(errno.EBUSY, os.strerror(errno.EBUSY), "x/.lock"), tmp_path) == 2
    assert "x/.lock: Device or resource busy. The work so far is in" in capsys.readouterr().err


def test_a_name_that_is_not_utf8_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnicodeEncodeError) as found:
        "runs/caf\udce9".encode()
    assert failing(found.value) == 2
    assert re.search(r"'runs/caf\\udce9' is not UTF-8.* Rename", capsys.readouterr().err)


def test_a_terminal_that_cannot_show_a_character_is_no_file_to_be_renamed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnicodeEncodeError) as found:
        "stages of 1, 2, 3, …".encode("ascii")
    assert failing(found.value) == 2
    said = capsys.readouterr().err
    assert "'ascii' codec can't encode character" in said
    assert "Rename" not in said


def test_an_unforeseen_error_names_the_traceback_file_and_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAPTR_TRACEBACK")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for step in (400, 1200):
        (tmp_path / "run" / "checkpoints" / f"step-{step}").mkdir(parents=True)
    assert failing(RuntimeError("odd"), tmp_path / "run") == 70
    said = capsys.readouterr().err
    assert re.search("RuntimeError: odd.*bug in raptr", said)
    assert re.search(f"{tmp_path / 'run'}, .* step 1,200", said)
    assert "Traceback" not in said
    written = re.search(r"traceback is in (\S+\.txt)", said)
    assert written is not None
    assert "RuntimeError: odd" in Path(written[1]).read_text()


def test_a_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RAPTR_TRACEBACK", "1")
    assert failing(RuntimeError("odd")) == 70
    assert "Traceback" in capsys.readouterr().err


def test_a_traceback_that_cannot_be_written_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAPTR_TRACEBACK")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert failing(RuntimeError("odd")) == 70
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    source = str(Path(raptr.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), source])}
    ended = subprocess.run([*PROGRAM, "plan"], env=environment, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "raptr: interrupted\n")


def test_output_that_nobody_reads(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run([*PROGRAM, "plan", "--json"], stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert ended.stderr == ""


def test_importing_raptr_imports_no_torch_and_every_public_name_is_there() -> None:
    program = "import sys, raptr; assert 'torch' not in sys.modules; from raptr import *; print(sorted(dir()))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert all(f"'{name}'" in ended.stdout for name in raptr.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        raptr.nothing  # type: ignore[attr-defined]  # noqa: B018
