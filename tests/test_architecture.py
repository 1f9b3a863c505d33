"""Imports go one way, no file grows too long, and every method has its card."""

import ast
from pathlib import Path

import pytest

from raptr.methods import METHODS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "raptr"

# each room may import from these (and from itself); the plain modules at the top belong to no room
ALLOWED: dict[str, set[str]] = {
    "hashing": set(),
    "settings": set(),
    "subnetworks": {"hashing"},
    "data": {"hashing"},
    "models": {"hashing", "subnetworks", "data"},
    "growth": {"subnetworks"},
    "methods": {"settings", "subnetworks", "growth"},
    "train": {"hashing", "settings", "subnetworks", "growth", "data", "models", "methods"},
    "report": set(),
    "recipes": set(),
    "studies": {"hashing", "subnetworks", "data", "models", "methods", "train", "report"},
    "comparison": {"data", "methods", "recipes", "report", "settings", "train"},
    "failures": {"train"},
    "cli": {"comparison", "data", "failures", "methods", "models", "recipes", "report", "settings", "studies", "train"},
    "__main__": {"cli"},
    "__init__": {"comparison", "subnetworks", "models", "methods", "train"},
}
FILES = sorted(SOURCE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    used = {name.split(".")[1] for name in imports(path) if name.startswith("raptr.")}
    rooms = {name for name in used if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").exists()}
    assert rooms <= ALLOWED[room] | {room}


@pytest.mark.parametrize("room", ["subnetworks", "methods", "report"])
def test_rooms_without_torch(room: str) -> None:
    for path in (SOURCE / room).rglob("*.py"):
        assert not {name for name in imports(path) if name.split(".")[0] == "torch"}, path


def test_methods_know_plans_of_growth_not_tensors() -> None:
    assert not {name for name in imports(SOURCE / "growth" / "plan.py") if name.split(".")[0] == "torch"}
    for path in (SOURCE / "methods").rglob("*.py"):
        used = {name for name in imports(path) if name.startswith("raptr.growth")}
        assert all(name.startswith("raptr.growth.plan") for name in used), path


def test_no_pickle() -> None:
    for path in FILES:
        assert not imports(path) & {
            "pickle",
            "torch.save",
            "torch.load",
            "cloudpickle",
            "shelve",
            "marshal",
        }, path
        assert "trust_remote_code=True" not in path.read_text(encoding="utf-8"), path


def test_files_stay_short() -> None:
    assert [path.name for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []
    assert not list(SOURCE.rglob("utils.py"))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_card_with_the_same_headings(name: str) -> None:
    card = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    headings = [line for line in card.splitlines() if line.startswith("## ")]
    assert headings == [
        "## What it does",
        "## When to use it",
        "## Settings",
        "## What it costs",
        "## What we measured",
        "## Where we deviate",
        "## Source",
    ]
