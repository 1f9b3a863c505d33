"""Imports go one way, no file grows too long, and every method has its card."""

import ast
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from raptr.methods import METHODS
from raptr.models.registry import FAMILIES

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "raptr"

# each package may import from these (and from itself); the plain modules at the top belong to no package
ALLOWED: dict[str, set[str]] = {
    "files": set(),
    "hashing": set(),
    "settings": set(),
    "strict_yaml": set(),
    "extras": set(),
    "distributed": set(),
    "subnetworks": {"hashing"},
    "data": {"extras", "files", "hashing"},
    "objectives": {"hashing", "data"},
    "models": {"hashing", "subnetworks", "data", "distributed"},
    "growth": {"distributed", "subnetworks", "models"},
    "methods": {"settings", "subnetworks", "growth"},
    "train": {
        *("extras", "files", "hashing", "settings", "strict_yaml", "subnetworks", "growth"),
        *("data", "distributed", "models", "methods", "objectives", "recipes", "report"),
    },
    "report": {"files"},
    "recipes": set(),
    "studies": {
        "failures",
        "files",
        "hashing",
        "settings",
        "subnetworks",
        "data",
        "models",
        "methods",
        "train",
        "report",
    },
    "evaluation": {"data", "extras", "failures", "files", "objectives", "report", "settings", "train"},
    "comparison": {
        "data",
        "evaluation",
        "extras",
        "files",
        "methods",
        "recipes",
        "report",
        "settings",
        "strict_yaml",
        "train",
    },
    "integrations": {"distributed", "extras", "growth", "methods", "models", "subnetworks", "train"},
    "failures": {"distributed", "extras", "train"},
    "options": {"methods", "models"},
    "planning": {"failures", "models", "options", "strict_yaml", "train"},
    "cli": {
        *("comparison", "data", "evaluation", "failures", "methods", "models", "objectives", "options", "planning"),
        *("recipes", "report", "settings", "strict_yaml", "studies", "train"),
    },
    "__main__": {"cli", "extras", "failures"},
    "__init__": {"comparison", "extras", "integrations", "subnetworks", "models", "methods", "train"},
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
    package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    used = {name.split(".")[1] for name in imports(path) if name.startswith("raptr.")}
    packages = {name for name in used if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").exists()}
    assert packages <= ALLOWED[package] | {package}


def test_the_page_names_what_each_package_may_import() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Packages")[2]
    rows = re.findall(r"^\| `(\w+)(?:\.py|/)`.*\| ([^|]*) \|$", page.partition("\n## ")[0], flags=re.MULTILINE)
    said = {name: set(re.sub(r" \([^)]*\)", "", names).split(", ")) - {"–"} for name, names in rows}
    assert said == ALLOWED


# Imports every module of a package where torch cannot be imported. The __init__ of raptr is replaced by an empty one,
# so that the packages of a changed copy of the source can be imported.
WITHOUT_TORCH = """
import importlib, pkgutil, sys, types
source, package = sys.argv[1:]
sys.modules["torch"] = None
root = sys.modules["raptr"] = types.ModuleType("raptr")
root.__path__ = [source]
module = importlib.import_module(f"raptr.{package}")
for found in pkgutil.walk_packages(getattr(module, "__path__", []), f"raptr.{package}."):
    importlib.import_module(found.name)
"""


def fault_without_torch(source: Path, package: str) -> str:
    """What importing a package says where there is no torch; nothing if all is well."""
    command = [sys.executable, "-c", WITHOUT_TORCH, str(source), package]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    return done.stderr.strip() if done.returncode else ""


@pytest.mark.parametrize(
    "package",
    ["files", "hashing", "settings", "subnetworks", "growth.plan", "methods", "models.registry", "report", "recipes"],
)
def test_packages_without_torch(package: str) -> None:
    assert fault_without_torch(SOURCE, package) == ""


def test_torch_is_found_behind_another_package(tmp_path: Path) -> None:
    broken = shutil.copytree(SOURCE, tmp_path / "raptr", ignore=shutil.ignore_patterns("__pycache__"))
    with (broken / "hashing.py").open("a") as file:
        file.write("\nimport torch\n")
    assert "hashing.py" in fault_without_torch(broken, "subnetworks")
    assert fault_without_torch(broken, "report") == ""


@pytest.mark.parametrize("package", ["train", "comparison", "studies/stability.py", "cli.py"])
def test_what_trains_names_no_family_of_models(package: str) -> None:
    place = SOURCE / package
    for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        packages = {name.split(".")[2] for name in imports(path) if name.startswith("raptr.models.")}
        assert packages.isdisjoint(FAMILIES), path
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        words = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert not [word for word in words if any(family in word.lower() for family in FAMILIES)], path


def test_methods_know_plans_of_growth_not_tensors() -> None:
    for path in (SOURCE / "methods").rglob("*.py"):
        used = {name for name in imports(path) if name.startswith("raptr.growth")}
        assert all(name.startswith("raptr.growth.plan") for name in used), path


def test_what_is_read_knows_nothing_of_preparing() -> None:
    readers = [path for package in ("objectives", "models") for path in (SOURCE / package).rglob("*.py")]
    readers += (SOURCE / "data").glob("*.py")
    assert len(readers) > 10
    for path in readers:
        assert not any(name.startswith("raptr.data.prepare") for name in imports(path)), path


PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
PICKLING = {"torch.save", "torch.load", "torch.jit.load", "torch.package", "pandas.read_pickle"}
UNSAFE = {"trust_remote_code", "allow_pickle"}


def pickling(tree: ast.AST) -> set[str]:
    """What a module does that reads or writes pickles, or runs code that it downloaded."""
    found, known = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                found |= {alias.name} if alias.name.split(".")[0] in PICKLES else set()
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            known |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
            found |= {module} if module.split(".")[0] in PICKLES else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            full = ".".join([known.get(first, first), *rest])
            found |= {full} & PICKLING
        elif isinstance(node, ast.keyword) and node.arg in UNSAFE:
            safe = isinstance(node.value, ast.Constant) and node.value.value is False
            found |= set() if safe else {node.arg}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_pickle(path: Path) -> None:
    assert pickling(ast.parse(path.read_text(encoding="utf-8"))) == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle", "pickle"),
        ("import pickle as p\np.dumps(1)", "pickle"),
        ("from pickle import loads", "pickle"),
        ("def f():\n    import joblib", "joblib"),
        ("import torch\ntorch.load('a')", "torch.load"),
        ("import torch as t\nt.save({}, 'a')", "torch.save"),
        ("from torch import load\nload('a')", "torch.load"),
        ("from torch import save as write\nf = write", "torch.save"),
        ("import numpy as np\nnp.load('a', allow_pickle=True)", "allow_pickle"),
        ("AutoModel.from_pretrained('a', trust_remote_code=trusted)", "trust_remote_code"),
    ],
)
def test_pickles_are_found(code: str, found: str) -> None:
    assert pickling(ast.parse(code)) == {found}


@pytest.mark.parametrize(
    "code", ["np.load('a', allow_pickle=False)", "import torch\ntorch.zeros(1)", "model.save('a')"]
)
def test_nothing_else_is_taken_for_a_pickle(code: str) -> None:
    assert pickling(ast.parse(code)) == set()


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


@pytest.mark.parametrize("name", METHODS)
def test_a_card_lists_every_setting_with_its_default(name: str) -> None:
    card = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    section = card.split("\n## Settings\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    listed = {setting: row[1] for row in rows for setting in re.findall(r"`(\w+)`", row[0])}
    settings = {field.name: field.default for field in fields(METHODS[name])}
    assert listed.keys() == settings.keys()
    for key, value in settings.items():
        if value is not None and key not in ("target", "steps", "seed"):  # those of every method are in one row
            shown = f"`{list(value)}`" if isinstance(value, tuple) else str(value).lower().removesuffix(".0")
            assert listed[key] == shown, key
