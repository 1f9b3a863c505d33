"""What the README shows is run here as it stands there."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from raptr.cli import main
from raptr.comparison import read_comparison

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PROGRAMS = [p for p in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "from raptr" in p]


def test_the_llama_loop_learns(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PROGRAMS[0], "README.md", "exec"), {})
    loss = float(capsys.readouterr().out.removeprefix("loss "))
    assert loss < 2.5  # ln 256 = 5.5 at the start


def test_the_bert_example_names_the_idle_layers(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PROGRAMS[1], "README.md", "exec"), {})
    assert re.fullmatch(r"layers \[\d, \d, \d\] did not run\n", capsys.readouterr().out)


def test_the_plan_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.search(r"```\n\$ (raptr plan .*?)\n(.*?)```", README, flags=re.DOTALL)
    assert shown is not None
    monkeypatch.setattr(sys, "argv", shown[1].split())
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr().out
    assert [line.strip() for line in shown[2].splitlines() if "│" in line] == [
        line.strip() for line in printed.splitlines() if "│" in line
    ]


def test_the_comparison_is_one() -> None:
    shown = re.search(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    assert shown is not None
    comparison = read_comparison(yaml.safe_load(shown[1]))
    assert [entry.label for entry in comparison.entries] == ["full", "full (reduced)", "raptr", "raptr, zeros", "pld"]
    assert comparison.count == 3 * (3 + 3 + 3 + 1 + 3)


@pytest.mark.parametrize("path", re.findall(r"\]\((?!https?://)([^)]+)\)", README))
def test_links_lead_somewhere(path: str) -> None:
    assert (Path(__file__).parents[1] / path).exists()
