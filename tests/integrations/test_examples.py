"""The examples run as they stand, and the page shows lines of them."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ("hf_trainer", "lightning_trainer", "plain_loop")
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.filterwarnings("ignore::FutureWarning:lightning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, str(tmp_path)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    losses = re.findall(r"held-out loss (\d\.\d+)", capsys.readouterr().out)
    assert float(losses[-1]) < 3  # ln 256 = 5.5 at the start


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "plain_loop"])
def test_an_example_without_its_folder_says_how_it_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py"])
    with pytest.raises(SystemExit, match=rf"{name}\.py OUTPUT_FOLDER"):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_shows_lines_of_the_example_and_all_that_are_raptrs(name: str) -> None:
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    shown = re.search(rf"\(\.\./examples/{name}\.py\).*?```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert shown is not None
    lines = [line.strip() for line in shown[1].splitlines() if line.strip() != "..."]
    rest = iter([line.strip() for line in source.splitlines()])
    assert [line for line in lines if line not in rest] == []  # each one after the one before it
    assert [line.strip() for line in source.splitlines() if "# raptr" in line] == [
        line for line in lines if "# raptr" in line
    ]


def test_a_callback_is_three_lines() -> None:
    for name in ("hf_trainer", "lightning_trainer"):
        source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        assert len([line for line in source.splitlines() if line.endswith("# raptr")]) == 3
