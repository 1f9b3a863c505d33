"""Starting several processes of a program, as torchrun does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(processes: int, *arguments: object, options: tuple[str, ...] = (), timeout: float = 300) -> str:
    """Run `python -m ARGUMENTS` in so many processes; returns what they say."""
    ended = run(processes, *arguments, options=options, timeout=timeout)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return ended.stderr


def run(
    processes: int, *arguments: object, options: tuple[str, ...] = (), timeout: float = 300
) -> "subprocess.CompletedProcess[str]":
    """The same, whatever its end."""
    return subprocess.run(
        command(processes, *arguments, options=options),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
    )


def command(processes: int, *arguments: object, options: tuple[str, ...] = ()) -> list[str]:
    """The command line of torchrun, for one machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*launcher, *options, "-m", *map(str, arguments)]


def environment() -> dict[str, str]:
    """One thread a process, no GPU, and modules as this process finds them."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
