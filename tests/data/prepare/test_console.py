"""What `raptr prepare` says at its end is a command that works as it stands."""

import shlex
from pathlib import Path

import pytest

from tests.commands import call


def book(folder: Path, paragraphs: int) -> None:
    text = "\n\n".join(f"Paragraph {i} of the book tells of {i * i} things and more." for i in range(paragraphs))
    (folder / "book.txt").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(("objective", "first"), [("mlm", "demo"), ("causal", "decoder-demo")])
@pytest.mark.parametrize(("paragraphs", "length"), [(2000, 64), (40, None)])
def test_from_a_book_to_a_run_by_the_command_that_is_shown(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    objective: str,
    first: str,
    paragraphs: int,
    length: int | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    book(tmp_path, paragraphs)
    asked = ["--data", "book.txt", "--out", "data/my book", "--vocabulary", "300", "--objective", objective]
    assert call(monkeypatch, "prepare", *asked) == 0
    said = capsys.readouterr().err
    assert f"{paragraphs:,} documents, one per paragraph" in said
    (shown,) = [line.removeprefix("next") for line in said.splitlines() if line.startswith("next")]
    program, command, recipe, *options = shlex.split(shown)
    assert (program, command, recipe) == ("raptr", "pretrain", first)
    assert options[:4] == ["--data", "data/my book", "--run", "runs/my book"]
    assert ("--length" in options) == (length is None)
    # The demo's own run, on other data, is not in the way.
    (tmp_path / "runs" / f"{first}-raptr").mkdir(parents=True)
    (tmp_path / "runs" / f"{first}-raptr" / "config.yaml").write_text("{}")
    assert call(monkeypatch, command, recipe, *options, "--until", "1", "--batch", "2") == 0
    assert (tmp_path / "runs" / "my book" / "metrics.jsonl").exists()
    if length is None:  # a longer sequence than the one shown would not have fitted
        longer = [*options[:-1], str(int(options[-1]) + 1)]
        assert options[-2] == "--length"
        assert call(monkeypatch, command, recipe, *longer, "--until", "1", "--batch", "2", "--fresh") == 2


def test_too_little_text_to_train_on_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("a\n\nb\n", encoding="utf-8")
    assert call(monkeypatch, "prepare", "--data", "book.txt", "--out", "data/mine", "--vocabulary", "300") == 0
    said = capsys.readouterr().err
    assert "2 tokens in a row" in said
    assert "raptr pretrain" not in said


@pytest.mark.parametrize(
    ("objective", "gpu", "recipe"),
    [
        ("mlm", True, "bert-mini"),
        ("causal", True, "decoder-mini"),
        ("ul2", True, "ul2-small"),
        ("mlm", False, "demo"),
        ("causal", False, "decoder-demo"),
        ("ul2", False, "ul2-demo"),
    ],
)
def test_the_recipe_fits_the_machine_and_the_objective(
    objective: str,
    gpu: bool,
    recipe: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    book(tmp_path, 2000)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    asked = ["--data", "book.txt", "--out", "mine", "--vocabulary", "400", "--objective", objective]
    assert call(monkeypatch, "prepare", *asked) == 0
    shown = capsys.readouterr().err.partition("next    ")[2].strip()
    assert shown == f"raptr pretrain {recipe} --data mine --run runs/mine"


def test_a_refusal_is_all_that_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "prepare", "--data", "nope", "--out", "mine") == 2
    (said,) = capsys.readouterr().err.splitlines()  # no empty line of a bar that never began
    assert "nope" in said
    assert not list(tmp_path.iterdir())


def test_no_digit_is_cut_from_the_table_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    lines = [f"Sentence {i} of some length, as it stands in every line of the text.\n" for i in range(20_000)]
    (tmp_path / "wiki.txt").write_text("".join(lines), encoding="utf-8")
    asked = ["--data", "wiki.txt", "--out", "data/mine", "--vocabulary", "261", "--documents", "line"]
    assert call(monkeypatch, "prepare", *asked) == 0
    (row,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("│ wiki")]
    counts = [int(cell.replace(",", "")) for cell in row.strip("│").split("│")[1:]]
    assert counts[1] + counts[3] == 20_000
    assert counts[2] + counts[4] > 1_000_000
