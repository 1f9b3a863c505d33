"""A killed process: torchrun starts the job again, nobody does anything, and the end is that of the undisturbed run."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from raptr.data import TokenStore
from raptr.train import checkpoint
from tests.distributed.cases import config
from tests.distributed.launching import launch
from tests.train.legs import differing, records

STEPS = 24
KILLS = [{"rank": 1, "step": 13}, {"rank": 0, "step": 16, "call": "rename"}]


@pytest.fixture(scope="module")
def folder(stores: dict[str, TokenStore], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("killed")
    (place / "bert").symlink_to(stores["bert"].path, target_is_directory=True)
    chosen = config("bert, raptr", place, "fsdp", steps=STEPS, checkpoint_every=8, log_every=1)
    (place / "config.yaml").write_text(yaml.safe_dump(chosen.mapping()))
    arguments = (place, place / "config.yaml", json.dumps(KILLS))
    launch(2, "tests.distributed.killed", *arguments, options=(f"--max-restarts={len(KILLS)}",))
    return place


def tensors(run: Path) -> dict[str, Tensor]:
    found = checkpoint.load(run / "checkpoints", STEPS)
    blank = found.blank(without="nothing.")
    found.read(blank)
    return blank


def test_killed_twice_it_ends_bit_for_bit_as_undisturbed(folder: Path) -> None:
    assert sorted(path.name for path in folder.glob("killed-*")) == ["killed-0", "killed-1"]
    starts = json.loads((folder / "fire" / "environment.json").read_text())
    assert [start["step"] for start in starts] == [0, 8, 8]
    assert differing(tensors(folder / "fire"), tensors(folder / "calm")) == []
    assert records(folder / "fire") == records(folder / "calm")


def test_only_the_first_process_writes(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "calm" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    assert (folder / "calm" / "export" / "model.safetensors").is_file()
    assert (folder / "calm" / "report").is_dir()
    assert torch.get_default_dtype() == torch.float32
