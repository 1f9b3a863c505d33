"""Run by several processes: the trainings that a file lists, one after the other, in float64.

python -m torch.distributed.run --nproc-per-node N -m tests.distributed.launched FOLDER JOBS
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import save_file

from raptr.distributed.processes import joined
from raptr.subnetworks import Subnetwork
from raptr.train.config import Config
from raptr.train.loop import Trainer, pretrain
from tests.distributed.cases import config
from tests.distributed.own_loop import trained

KINDS = {  # what torch calls them, in different versions
    "reduced": {"all_reduce"},
    "gathered": {"all_gather_into_tensor", "all_gather_single"},
    "scattered": {"reduce_scatter_tensor", "reduce_scatter_single"},
}
QUIET = Console(quiet=True)


def counted(chosen: Config, run: Path) -> list[dict[str, int]]:
    """The layers of each step of a run, and the bytes that its collectives sent between processes, by kind."""
    steps: list[dict[str, int]] = []
    sent: Counter[str] = Counter()

    def counting(kind: str, send: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: torch.Tensor, *others: Any, **named: Any) -> Any:
            every = [tensor, *(other for other in others if isinstance(other, torch.Tensor))]
            if dist.get_world_size(named.get("group")) > 1:
                sent[kind] += max(one.numel() * one.element_size() for one in every)
            return send(tensor, *others, **named)

        return counted

    def optimize(trainer: Trainer, subnetwork: Subnetwork) -> tuple[torch.Tensor, torch.Tensor]:
        sent.clear()
        result = whole(trainer, subnetwork)
        steps.append({"layers": subnetwork.size, **sent})
        return result

    whole = Trainer.optimize
    with ExitStack() as patches:
        patches.enter_context(patch.object(Trainer, "optimize", optimize))
        for kind, names in KINDS.items():
            for name in names & vars(dist).keys():
                patches.enter_context(patch.object(dist, name, by_name(counting(kind, getattr(dist, name)))))
        pretrain(chosen, run, console=QUIET)
    return steps


def by_name(send: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, to which tensors may be given by name, as FSDP2 does."""

    def called(*tensors: Any, **named: Any) -> Any:
        given = [named.pop(name) for name in ("output_tensor", "input_tensor", "output", "input") if name in named]
        return send(*given, *tensors, **named)

    return called


def main(folder: Path, jobs: Path) -> None:
    """Train, or take up, each run of the list."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.compile = partial(torch.compile, backend="eager")  # trace as the compiler does, but generate no code
    with joined():
        for job in json.loads(jobs.read_text()):
            if "own" in job:
                weights = trained(job["own"])
                if dist.get_rank() == 0:
                    save_file(weights, folder / f"{job['own']}.safetensors")
                continue
            if "bytes" in job:
                chosen = config(job["case"], folder, job["engine"], steps=9, checkpoint_every=9)
                (folder / job["bytes"]).write_text(json.dumps(counted(chosen, folder / job["run"])))
                continue
            chosen = config(job["case"], folder, job["engine"], **job.get("train", {}))
            pretrain(
                chosen, folder / job["run"], until=job.get("until"), export=job.get("export", False), console=QUIET
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
