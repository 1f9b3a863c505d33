"""A job that is asked to stop: it saves once and ends, also where torchrun would start a failed one again."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from raptr.data import TokenStore
from raptr.train import checkpoint
from tests.distributed.cases import config
from tests.distributed.launching import ROOT, command, environment
from tests.train.test_safety import wait_for_steps


def children(parent: int) -> list[int]:
    """The processes that a process has started."""
    listed = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid="], encoding="utf-8")
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    return [process for process, started_by in pairs if started_by == parent]


@pytest.mark.parametrize("asked", ["torchrun", "every process"])  # a container's end; Slurm's scancel
def test_sigterm_saves_and_ends_the_job(asked: str, stores: dict[str, TokenStore], tmp_path: Path) -> None:
    (tmp_path / "bert").symlink_to(stores["bert"].path, target_is_directory=True)
    chosen = config("bert, raptr", tmp_path, "ddp", steps=100_000, batch=512, checkpoint_every=50_000, log_every=1)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(chosen.mapping()))
    run = tmp_path / "run"
    raptr = ["raptr", "--", "pretrain", "--config", str(tmp_path / "config.yaml"), "--run", str(run)]
    launcher = subprocess.Popen(
        command(2, *raptr, options=("--max-restarts=2",)),
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    wait_for_steps(run, 2)
    workers = children(launcher.pid)
    assert len(workers) == 2
    for process in workers if asked == "every process" else []:
        os.kill(process, signal.SIGTERM)
    time.sleep(0.02)  # less than a step: what torchrun passes on is a second signal
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 1  # torchrun's own
    (saved,) = checkpoint.steps(run / "checkpoints")
    assert f"stopped after step {saved:,} of 100,000, saved" in said
    assert [start["step"] for start in json.loads((run / "environment.json").read_text())] == [0]
