"""Run by several processes: the trainings that a file lists, one after the other, in float64.

python -m torch.distributed.run --nproc-per-node N -m tests.distributed.launched FOLDER JOBS
"""

import json
import sys
from pathlib import Path

import torch
from rich.console import Console

from raptr.distributed.processes import joined
from raptr.train.loop import pretrain
from tests.distributed.cases import config

QUIET = Console(quiet=True)


def main(folder: Path, jobs: Path) -> None:
    """Train, or take up, each run of the list."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    with joined():
        for job in json.loads(jobs.read_text()):
            chosen = config(job["case"], folder, job["engine"], **job.get("train", {}))
            pretrain(
                chosen, folder / job["run"], until=job.get("until"), export=job.get("export", False), console=QUIET
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
