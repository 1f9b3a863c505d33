"""Several processes train what one does: every engine, weights, optimizer and records; and go on from one another."""

import json
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from raptr.data import TokenStore
from raptr.train import checkpoint
from raptr.train.exporting import export
from raptr.train.loading import load_model
from raptr.train.loop import pretrain
from tests.distributed.cases import CASES, config
from tests.distributed.launching import launch
from tests.distributed.own_loop import WAYS, trained
from tests.train.legs import records

QUIET = Console(quiet=True)
DDP = signature(DistributedDataParallel.__init__).parameters
SOME = ["decoder, raptr, zero, accumulated", "bert, stacking, recomputed"]
SHORT = ["bert, gather", "bert, msg in width"]
SHARDED = [case for case in CASES if case not in ("bert, raptr", "bert, gather", "bert, muon")]
NARROW, GATHERED = "decoder, heads and parts", {"execution": "gather", "accumulate": 2}
ROUNDED = {"reduce": "bfloat16"}
BESIDE = {"async_checkpoints": True, "checkpoint_every": 3}
OWN = [way for way in WAYS if "running" not in way or "skip_all_reduce_unused_params" in DDP]
JOBS: dict[int, list[dict[str, Any]]] = {
    4: [
        *({"case": case, "engine": "hsdp", "run": f"hsdp-4/{case}", "train": {"shards": 2}} for case in SOME),
        # After one step half of the layers have not run yet, and have no optimizer state.
        {"case": "bert, raptr", "engine": "hsdp", "run": "elastic", "until": 1, "train": {"shards": 2, **BESIDE}},
        {"case": "bert, raptr", "engine": "fsdp", "run": "elastic", "until": 12, "train": BESIDE},
    ],
    2: [
        *({"case": case, "engine": "ddp", "run": f"ddp-2/{case}"} for case in [*SOME, *SHORT]),
        *(
            {"case": case, "engine": "fsdp", "run": f"fsdp-2/{case}"}
            for case in CASES
            if case not in ("bert, raptr", "bert, gather")
        ),
        *({"case": "bert, raptr", "engine": e, "run": f"counted-{e}", "bytes": f"{e}.json"} for e in ("ddp", "fsdp")),
        {"case": NARROW, "engine": "ddp", "run": f"ddp-2, gather/{NARROW}", "train": GATHERED},
        {"case": "bert, muon", "engine": "ddp", "run": "ddp-2, compiled/bert, muon", "train": {"compile": True}},
        {"case": "bert, muon", "engine": "fsdp", "run": "fsdp-2, compiled/bert, muon", "train": {"compile": True}},
        {"case": "bert, raptr", "engine": "fsdp", "run": "rounded-fsdp", "until": 5, "train": ROUNDED},
        {"case": "bert, gather", "engine": "ddp", "run": "rounded-ddp", "until": 5, "train": ROUNDED},
        *({"own": way, "run": ""} for way in OWN),
        {"case": "bert, raptr", "engine": "ddp", "run": "elastic", "until": 20},
        {"case": "bert, raptr", "engine": "fsdp", "run": "elastic", "until": 30, "train": {"accumulate": 2}},
    ],
}
RUNS = [(job["run"], job["case"]) for jobs in JOBS.values() for job in jobs if "/" in job["run"]]


@pytest.fixture(scope="module")
def folder(stores: dict[str, TokenStore], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All runs, in folders: those of one process, and those of several."""
    place = tmp_path_factory.mktemp("runs")
    for family, store in stores.items():
        (place / family).symlink_to(store.path, target_is_directory=True)
    torch.set_default_dtype(torch.float64)
    try:
        for case in CASES:
            pretrain(config(case, place), place / "one" / case, console=QUIET)
            if case == "bert, raptr":
                export(place / "one" / case, place / "export")
        for processes, jobs in JOBS.items():
            (place / "jobs.json").write_text(json.dumps(jobs))
            launch(processes, "tests.distributed.launched", place, place / "jobs.json")
        pretrain(config("bert, raptr", place), place / "elastic", console=QUIET)
        yield place
    finally:
        torch.set_default_dtype(torch.float32)


def tensors(run: Path) -> dict[str, Tensor]:
    """Everything that the last checkpoint of a run holds, read by this one process."""
    found = checkpoint.load_latest(run / "checkpoints")
    assert found is not None
    blank = found.blank(without="nothing.")
    found.read(blank)
    return blank


def numbers(run: Path) -> list[float]:
    """All numbers of a run's records, in their order."""
    return [value for record in records(run) for value in record.values() if isinstance(value, int | float)]


def assert_equal(one: Path, other: Path) -> None:
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys()
    assert len(mine) > 90
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-10, msg=name)
    assert numbers(one) == pytest.approx(numbers(other), rel=1e-10)


@pytest.mark.parametrize(("run", "case"), RUNS)
def test_several_processes_train_what_one_does(folder: Path, run: str, case: str) -> None:
    assert_equal(folder / "one" / case, folder / run)


def test_a_run_goes_on_with_other_engines_and_numbers_of_processes(folder: Path) -> None:
    assert_equal(folder / "one" / "bert, raptr", folder / "elastic")
    starts = json.loads((folder / "elastic" / "environment.json").read_text())
    assert [(start["step"], start["processes"]) for start in starts] == [(0, 4), (1, 4), (12, 2), (20, 2), (30, 1)]


def test_each_process_writes_its_shard(folder: Path) -> None:
    newest = {run: checkpoint.newest(folder / run / "checkpoints") or folder for run, _ in RUNS}
    files = {run: list(place.glob("*.safetensors")) for run, place in newest.items()}
    assert {run: len(found) for run, found in files.items()} == {run: int(run.split("-")[1][0]) for run in files}
    sizes = [file.stat().st_size for file in files["fsdp-2/bert, stacking, recomputed"]]
    assert max(sizes) < 0.7 * sum(sizes)


def test_one_process_exports_a_sharded_run(folder: Path) -> None:
    sharded = folder / "hsdp-4" / "bert, stacking, recomputed"
    model, alone = (load_model(run).model for run in (sharded, folder / "one" / "bert, stacking, recomputed"))
    for mine, theirs in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-10)
    assert (export(sharded) / "model.safetensors").is_file()


def rows(parameter: Tensor, shards: int) -> int:
    """The bytes of a parameter in so many shards of equally many rows, the last ones padded."""
    return -(-len(parameter) // shards) * shards * parameter[0].numel() * parameter.element_size()


@pytest.mark.parametrize(("engine", "shards"), [("ddp", 1), ("fsdp", 2)])
def test_only_layers_that_run_are_communicated(folder: Path, engine: str, shards: int) -> None:
    model = load_model(folder / "counted-ddp").model.double()
    layer = sum(rows(parameter, shards) for parameter in model.blocks[0].parameters())
    ends = sum(rows(parameter, shards) for name, parameter in model.named_parameters() if "blocks" not in name)
    steps = json.loads((folder / f"{engine}.json").read_text())
    assert {step["layers"] for step in steps} == {2, 3, 4}
    for step in steps:
        active, loss = step.pop("layers") * layer, 8
        if engine == "ddp":
            assert step == {"reduced": active + ends + loss}
        else:  # gathered before the forward and again before the backward pass; the ends only once
            assert step == {"gathered": 2 * active + ends, "scattered": active + ends, "reduced": loss}


@pytest.mark.parametrize("way", OWN)
def test_a_loop_of_ones_own_trains_what_one_process_does(folder: Path, way: str) -> None:
    expected, found = trained(None), load_file(folder / f"{way}.safetensors")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(("run", "case"), [("rounded-fsdp", "bert, raptr"), ("rounded-ddp", "bert, gather")])
def test_gradients_may_be_added_up_in_bfloat16(folder: Path, run: str, case: str) -> None:
    exact, rounded = (records(place) for place in (folder / "one" / case, folder / run))
    norms = [next(r["grad_norm"] for r in found if r["kind"] == "train") for found in (exact, rounded)]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert norms[1] != pytest.approx(norms[0], rel=1e-6)
