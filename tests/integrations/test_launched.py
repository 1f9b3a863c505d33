"""Two processes, launched by torchrun, train what one does: DDP and FSDP2, under the `Trainer` and Lightning."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.integrations import test_lightning
from tests.integrations.launched import NARROW, Sharded, callback
from tests.integrations.test_transformers import losses, raptr, trainer
from tests.integrations.tiny import STEPS, Rows

pytestmark = test_lightning.pytestmark
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("launched")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [*command, "-m", "tests.integrations.launched", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    outcomes: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return outcomes


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    result = {}
    ways: dict[str, dict[str, Any]] = {"skip": {"idle": "skip"}, "zero": {"idle": "zero"}, "narrow": NARROW}
    ways["growing"] = {"growing": True}
    for way, settings in ways.items():
        run = trainer(tmp_path_factory.mktemp(way), callback(raptr, **settings), per_device_train_batch_size=8)
        run.train()
        result[way] = losses(run)
        module = test_lightning.Module()
        lightning = test_lightning.trainer(tmp_path_factory.mktemp(way), callback(test_lightning.raptr, **settings))
        lightning.fit(module, DataLoader(Rows(), batch_size=8))
        result[f"lightning, {way}"] = module.losses
    return result


@pytest.mark.parametrize(
    ("name", "same", "wrapped"),
    [
        ("ddp", "skip", "DistributedDataParallel"),
        ("ddp, zero", "zero", "DistributedDataParallel"),
        ("ddp, checkpointed", "skip", "DistributedDataParallel"),
        ("fsdp", "skip", "FSDPLlamaForCausalLM"),
        ("fsdp, zero", "zero", "FSDPLlamaForCausalLM"),
        ("ddp, narrow", "narrow", "DistributedDataParallel"),
        ("fsdp, narrow", "narrow", "FSDPLlamaForCausalLM"),
        ("ddp, growing", "growing", "DistributedDataParallel"),
        ("fsdp, growing", "growing", "FSDPLlamaForCausalLM"),
        ("lightning, growing", "lightning, growing", "DistributedDataParallel"),
        ("lightning, fsdp, growing", "lightning, growing", "FSDPLlamaForCausalLM"),
        ("lightning", "lightning, skip", "DistributedDataParallel"),
        ("lightning, narrow", "lightning, narrow", "DistributedDataParallel"),
        ("lightning, fsdp", "lightning, skip", "FSDPLlamaForCausalLM"),
        ("lightning, fsdp, narrow", "lightning, narrow", "FSDPLlamaForCausalLM"),
    ],
)
def test_two_processes_train_what_one_does(
    found: dict[str, Any], alone: dict[str, list[float]], name: str, same: str, wrapped: str
) -> None:
    outcome = found[name]
    assert outcome["wrapped"] == wrapped
    assert outcome["losses"] == pytest.approx(alone[same], rel=1e-5)
    assert outcome["totals"][0] == outcome["totals"][1]


@pytest.mark.parametrize("how", ["zero", "skip", "growing"])  # with skip: by the checkpoint every layer has run once
@pytest.mark.parametrize("way", ["fsdp", "lightning"])
def test_a_sharded_run_that_is_resumed_is_the_undisturbed_one(found: dict[str, Any], way: str, how: str) -> None:
    runs = found[f"{way}, resumed, {how}"]
    assert len(runs["resumed"]["losses"]) == STEPS
    assert runs["resumed"] == runs["undisturbed"]


def test_the_page_shards_as_the_test_does() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    shown = re.search(r"```python\ndef configure_model.*?\n(.*?)```", page, flags=re.DOTALL)
    assert shown is not None
    shards = inspect.getsource(Sharded.configure_model)
    for line in shown[1].splitlines():
        assert line.partition("  #")[0].strip() in shards


def test_the_policies_differ(alone: dict[str, list[float]]) -> None:
    for one, two in (("skip", "zero"), ("lightning, skip", "lightning, zero")):
        assert alone[one] != pytest.approx(alone[two], rel=1e-5)


def test_ddp_that_waits_for_idle_layers_is_refused(found: dict[str, Any]) -> None:
    assert "ddp_find_unused_parameters=True" in found["refused"]
    assert "ddp_static_graph is True" in found["refused, static"]
