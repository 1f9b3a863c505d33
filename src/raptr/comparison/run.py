"""Runs a comparison: each run an ordinary run folder, made by `pretrain`, in an order of whole seeds.

    OUT/runs/LABEL-peakP-seedS/   the runs; `outcome.json` in one says that it is finished, or where it diverged
    OUT/compare.md, .json, .png   the tables and the plot, over the runs that are finished

A run that is finished is not run again and one that was stopped goes on, so the same command continues a comparison
that was stopped or killed. A run that diverges is recorded as such and the comparison goes on.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape

from raptr.comparison.spec import PlannedRun, read_comparison, read_file
from raptr.train.config import differences
from raptr.train.loop import open_data, pretrain
from raptr.train.run import RunFolder, write_file
from raptr.train.safety import Diverged, StopRequest, locked

RUNS = "runs"
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Compared:
    """Where a comparison stands: the runs finished of all, and the table over them (None: no run is finished)."""

    out: Path
    finished: int
    runs: int
    table: Group | None
    stopped: bool = False  # asked to stop by SIGTERM or Ctrl-C


def compare(
    spec: Mapping[str, Any] | Path,
    out: Path,
    *,
    device: str | None = None,
    keep_models: bool = False,
    console: Console | None = None,
) -> Compared:
    """Run the comparison that `spec` describes (a YAML file, or its content), or go on with the one in `out`.

    The checkpoints of a run are dropped when it is finished, unless `keep_models` is set.
    """
    from raptr.comparison.results import write_results  # imports matplotlib, which is slow

    console = console or Console(stderr=True)
    comparison = read_comparison(read_file(spec) if isinstance(spec, Path) else spec, device=device)
    runs, stop = comparison.runs, StopRequest()
    folders = [out / RUNS / run.name for run in runs]
    with locked(out), stop.listening():
        data = open_data(runs[0].config, folders[0], console).fingerprint
        for run, folder in zip(runs, folders, strict=True):
            _refuse_other(run, folder, data)
        for number, (run, folder) in enumerate(zip(runs, folders, strict=True), start=1):
            if stop.asked:
                break
            if _finished(folder):
                continue
            console.print(f"run {number} of {len(runs)}: {escape(str(run))}", highlight=False)
            _train(run, folder, data, stop, console, keep_models=keep_models)
            if number < len(runs) and runs[number].seed != run.seed:
                write_results(comparison, out)  # what a kill in the next seed leaves
        table = write_results(comparison, out)
    finished = sum(map(_finished, folders))
    return Compared(out, finished, len(runs), table, stopped=finished < len(runs))


def read_outcome(folder: Path) -> dict[str, Any] | None:
    """What is known of a finished run beside its metrics: the step it diverged in, and its data's fingerprint."""
    path = folder / OUTCOME
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _finished(folder: Path) -> bool:
    return (folder / OUTCOME).exists()


def _train(run: PlannedRun, folder: Path, data: str, stop: StopRequest, console: Console, *, keep_models: bool) -> None:
    """Bring one run to its end, or as far as it comes before a stop."""
    diverged = None
    try:
        if pretrain(run.config, folder, console=console, stop=stop).stopped:
            return
    except Diverged as error:
        diverged = error.step
        console.print(f"diverged: {escape(str(error))}", highlight=False)
    write_file(folder / OUTCOME, json.dumps({"diverged": diverged, "data": data}) + "\n")
    if not keep_models:
        shutil.rmtree(RunFolder(folder).checkpoints, ignore_errors=True)


def _refuse_other(run: PlannedRun, folder: Path, data: str) -> None:
    """Refuse a run that is there but is not the one wanted."""
    if not RunFolder(folder).config.exists():
        return
    old, new = RunFolder(folder).read().mapping(), run.config.mapping()
    changed = differences(old, new)
    judged = [mapping["train"]["eval_samples"] for mapping in (old, new)]
    if judged[0] != judged[1]:  # free in a run of its own, but losses on other samples do not compare
        changed.append(f"train.eval_samples: was {judged[0]}, now {judged[1]}")
    outcome = read_outcome(folder)
    if outcome is not None and outcome["data"] != data:
        changed.append(f"the data's fingerprint: was {outcome['data']}, now {data}")
    if changed:
        raise ValueError(
            f"the run in {str(folder)!r} was made with other settings ({'; '.join(changed)}); "
            "go on with the old ones, compare in another folder, or remove that run"
        )
