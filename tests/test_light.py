"""What a training loop of one's own needs is light to import, and so is the help of the command line.

Each program runs in a process of its own, in which some packages cannot be imported.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from raptr.extras import LIGHTNING, TRAIN, TRAINER
from tests.evaluation.tiny import make_bert, make_task, opinions

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = {"yaml": "PyYAML"}  # whose name is not their module's

OWN_LOOP = """
import torch
from raptr import Schedule, Shape, attach, flops, idle, make_method, plan, running, stepwise
from raptr.models.bert.config import SIZES

schedule = Schedule.recommended(layers=6, steps=100)
method = make_method("raptr", shape=Shape(layers=6), schedule=schedule)
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters())
with running(attach(model), method.subnetwork(0)):
    model(torch.ones(1, 4, 8)).sum().backward()
idle(optimizer, "zero")
optimizer.step()
steps = stepwise(model, "raptr", steps=100)
steps.begin(0)
model(torch.ones(1, 4, 8)).sum().backward()
steps.end()
cost = {"sequences": 2, "length": 16, "targets": 2}
assert flops(SIZES["tiny"], method.subnetwork(0), **cost).total > 0
assert plan(method, SIZES["tiny"], **cost).speedup > 1
"""
COMMAND = "import sys; sys.argv[0] = 'raptr'; from raptr.__main__ import main; main()"
SLOW = ("torch", "matplotlib", "transformers", "tensorboard")
HELP = f"""
import atexit
atexit.register(lambda: print(*filter(sys.modules.get, {SLOW}), end="", file=sys.stderr))
{COMMAND}
"""


def without(
    packages: Iterable[str], program: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a program where these packages seem not to be installed."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({sorted(packages)}))\n"
    return subprocess.run(
        [sys.executable, "-c", blocked + program, *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_loop_of_ones_own_needs_no_more_than_torch() -> None:
    ended = without([*TRAIN, *TRAINER, *LIGHTNING], OWN_LOOP)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", ["Schedule", "Shape", "Subnetwork", "METHODS", "make_method", "flops", "plan"])
def test_what_computes_no_tensor_needs_no_torch(name: str) -> None:
    ended = without([*TRAIN, "torch"], f"from raptr import {name}")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in ("pretrain", "plan", "prepare", "study", "compare", "finetune")),
    ],
    ids=" ".join,
)
def test_help_imports_nothing_slow(arguments: list[str]) -> None:
    ended = without(["torch"], HELP, *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "raptr" in ended.stdout


def test_completion_imports_nothing_slow() -> None:
    request = {"_RAPTR_COMPLETE": "complete_bash", "COMP_WORDS": "raptr pl", "COMP_CWORD": "1"}
    ended = without(["torch"], HELP, environment=request)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, ["plan"], "")


def test_fine_tuning_reads_and_scores_by_itself(tmp_path: Path) -> None:
    model = make_bert(tmp_path / "model")
    data = make_task(tmp_path / "task", opinions(32, 0), opinions(20, 1))
    options = ["--task", "sst2", "--data", str(data), "--out", str(tmp_path / "out"), "--rate", "1e-3", "--seeds", "1"]
    others = ["sklearn", "scipy", "datasets", "evaluate", "pandas", "pyarrow", "lm_eval"]
    ended = without(others, COMMAND, "finetune", str(model), *options, "--epochs", "1", "--device", "cpu")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "out" / "finetune.json").is_file()


@pytest.mark.parametrize("package", TRAIN)
def test_a_command_without_the_extra_names_it(package: str) -> None:
    ended = without([package], COMMAND, "plan", "--json")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(rf"raptr: .*{package}.*pip install '\.\[train\]'.*\n", ended.stderr)


@pytest.mark.parametrize("name", ["Config", "compare", "pretrain"])
def test_a_name_of_the_extra_names_it(name: str) -> None:
    program = f"try:\n    from raptr import {name}\nexcept ImportError as error:\n    print(error)"
    ended = without(TRAIN, program)
    assert re.fullmatch(rf"raptr\.{name} .*tokenizers.*pip install '\.\[train\]'.*\n", ended.stdout), ended.stderr


@pytest.mark.parametrize(
    ("module", "extra", "package"),
    [*(("transformers", "trainer", package) for package in TRAINER), ("lightning", "lightning", "lightning")],
)
def test_an_integration_without_its_package_names_the_extra(module: str, extra: str, package: str) -> None:
    name = f"raptr.integrations.{module}"
    ended = without([package], f"try:\n    import {name}\nexcept ImportError as error:\n    print(error)")
    assert re.fullmatch(rf"{name} .*{package}.*pip install '\.\[{extra}\]'.*\n", ended.stdout), ended.stderr


def test_the_base_install_is_torch_and_numpy_and_the_extra_is_what_is_checked() -> None:
    assert sorted(re.split("[<>=]", entry)[0] for entry in PYPROJECT["dependencies"]) == ["numpy", "torch"]
    for name, modules in {"train": TRAIN, "trainer": TRAINER, "lightning": LIGHTNING}.items():
        extra = [re.split("[<>=]", entry)[0] for entry in PYPROJECT["optional-dependencies"][name]]
        assert sorted(extra) == sorted(PACKAGES.get(module, module) for module in modules)
