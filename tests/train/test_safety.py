"""Stopped, killed, crowded or starved: nothing saved is lost, and every end says why."""

import errno
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raptr.data.prepare import Document, prepare
from raptr.train import checkpoint
from raptr.train.diverged import Diverged
from raptr.train.safety import FiniteCheck, OutOfMemory, StopRequest, locked, memory_named

RAPTR = [sys.executable, "-c", "import torch; torch.set_num_threads(1); from raptr.cli import main; main()"]
SMALL = ["--set", "model.width=16", "--set", "model.heads=4", "--set", "model.head_size=4", "--set", "model.mlp=16"]
SMALL += ["--length", "24", "--batch", "4", "--set", "optimizer.warmup=3", "--set", "train.eval_samples=4"]
SMALL += ["--set", "train.log_every=1", "--set", "train.eval_every=50", "--set", "train.checkpoint_every=7"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [Document(f"{i}.txt", f"to be or not {i} to be, that is number {i * i}. " * 12) for i in range(80)]
    return prepare(tmp_path_factory.mktemp("corpus") / "store", lambda: documents, 600).path


def start(
    run: Path, data: Path, *more: str, steps: int = 60, before: Callable[[], None] | None = None
) -> subprocess.Popen[str]:
    command = [*RAPTR, "pretrain", "--run", str(run), "--data", str(data), "--steps", str(steps), *SMALL, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=before)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=120)
    assert "Traceback" not in said, said
    return process.returncode, said


def wait_for_steps(run: Path, count: int) -> None:
    for _ in range(1200):
        if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count('"train"') >= count:
            return
        time.sleep(0.05)
    raise AssertionError("the run did not start")


def assert_same(one: Path, other: Path, step: int) -> None:
    """Weights and optimizer state of two runs, bit for bit."""
    tensors = []
    for run in (one, other):
        (file,) = (run / "checkpoints" / f"step-{step}").glob("*.safetensors")
        tensors.append(load_file(file))
    assert tensors[0].keys() == tensors[1].keys()
    assert [name for name in tensors[0] if not torch.equal(tensors[0][name], tensors[1][name])] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_goes_on_later(number: signal.Signals, corpus: Path, tmp_path: Path) -> None:
    process = start(tmp_path / "run", corpus, steps=3000)
    wait_for_steps(tmp_path / "run", 5)
    process.send_signal(number)
    code, said = finish(process)
    assert code == 3
    stopped_at = checkpoint.steps(tmp_path / "run" / "checkpoints")[-1]
    assert f"stopped after step {stopped_at:,} of 3,000, saved" in said
    until = ["--until", str(stopped_at + 5)]
    code, said = finish(start(tmp_path / "run", corpus, *until, steps=3000))
    assert code == 0
    assert f"going on from step {stopped_at:,}" in said
    assert finish(start(tmp_path / "whole", corpus, *until, steps=3000))[0] == 0
    assert_same(tmp_path / "run", tmp_path / "whole", stopped_at + 5)


def test_killed_again_and_again_it_ends_as_if_never_killed(corpus: Path, tmp_path: Path) -> None:
    assert finish(start(tmp_path / "whole", corpus))[0] == 0
    for steps in (2, 12, 33):
        process = start(tmp_path / "run", corpus)
        wait_for_steps(tmp_path / "run", steps)
        process.kill()
        process.communicate()
    assert finish(start(tmp_path / "run", corpus))[0] == 0
    assert_same(tmp_path / "run", tmp_path / "whole", 60)


def test_a_second_run_on_one_folder_is_refused(corpus: Path, tmp_path: Path) -> None:
    process = start(tmp_path / "run", corpus, steps=3000)
    wait_for_steps(tmp_path / "run", 1)
    for more in ([], ["--fresh"]):
        code, said = finish(start(tmp_path / "run", corpus, *more, steps=3000))
        assert code == 2
        assert "where another process is training" in said
    process.kill()
    process.communicate()


def test_a_run_that_diverges_names_the_step_and_keeps_the_last_good_checkpoint(corpus: Path, tmp_path: Path) -> None:
    more = ["--lr", "3e37", "--set", "optimizer.warmup=20", "--set", "train.log_every=1000"]
    code, said = finish(start(tmp_path / "run", corpus, *more, "--set", "train.checkpoint_every=1"))
    assert code == 1
    step = int(said.split("gradient of step ")[1].split()[0])
    steps = checkpoint.steps(tmp_path / "run" / "checkpoints")
    assert steps == [] or steps[-1] <= step
    found = checkpoint.load_latest(tmp_path / "run" / "checkpoints")
    assert (found.step if found else 0) == step
    assert (str(found.path) if found else "no checkpoint") in said


def test_a_run_that_diverges_at_once_speaks_of_no_checkpoint(corpus: Path, tmp_path: Path) -> None:
    code, said = finish(start(tmp_path / "run", corpus, "--lr", "1e37", "--set", "optimizer.warmup=0"))
    assert code == 1
    assert "step 1 " in said
    assert "no checkpoint" in said
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == []


def test_a_full_disk_leaves_what_was_saved(corpus: Path, tmp_path: Path) -> None:
    assert finish(start(tmp_path / "run", corpus, "--until", "7"))[0] == 0

    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # a checkpoint is larger

    code, said = finish(start(tmp_path / "run", corpus, before=small_files_only))
    assert code == 2
    assert "File too large" in said
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [7]
    assert finish(start(tmp_path / "run", corpus))[0] == 0


@pytest.mark.parametrize("damage", ["short", "altered"])
def test_damaged_tokens_are_noticed_before_training(damage: str, corpus: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    subprocess.run(["cp", "-r", str(corpus), str(copy)], check=True)
    shard = max(copy.glob("*.tokens"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content[:-2] if damage == "short" else content)
    code, said = finish(start(tmp_path / "run", copy))
    assert code == 2
    assert shard.name in said


def test_a_lock_is_given_back(tmp_path: Path) -> None:
    with locked(tmp_path, "held"), pytest.raises(ValueError, match=r"^held$"), locked(tmp_path, "held"):
        pass
    with locked(tmp_path, "held"):
        pass


def test_signals_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stop = StopRequest()
    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
        os.kill(os.getpid(), signal.SIGTERM)  # Slurm asks every process, and torchrun asks its own again
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_first_bad_step_is_remembered(tmp_path: Path) -> None:
    check = FiniteCheck(torch.device("cpu"), tmp_path)
    good, bad = torch.tensor(1.0), torch.tensor(float("nan"))
    check.watch(3, good, good)
    check.check()
    check.watch(4, good, bad)
    check.watch(5, bad, bad)
    with pytest.raises(Diverged, match=r"step 4 .*no checkpoint") as diverged:
        check.check()
    assert diverged.value.step == 4
    checkpoint.save(tmp_path, 3, {"w": good}, {"step": 3}, keep=1)
    with pytest.raises(Diverged, match=f"step 4 .*{tmp_path}/step-3"):
        check.check()


CPU = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (MemoryError(), "CPU"),
        (RuntimeError(CPU), "CPU"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "CPU"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), "GPU"),
        (RuntimeError("CUDA error: out of memory"), "GPU"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "GPU"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_lack_of_memory_names_what_to_lower_and_what_is_kept(
    error: Exception, place: str, wrapped: bool, tmp_path: Path
) -> None:
    def fail() -> None:
        try:
            raise error
        except type(error):
            if wrapped:  # as the end of a graph's capture does
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from None
            raise

    for kept in ("[Nn]o checkpoint", f"{tmp_path}/step-3"):
        settings = r"train\.recompute.*train\.accumulate.*train\.batch.*data\.length.*model\.size"
        with pytest.raises(OutOfMemory, match=f"{place}.*{settings}.*{kept}") as raised, memory_named(tmp_path):
            fail()
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)  # from a comparison's processes
        checkpoint.save(tmp_path, 3, {"w": torch.ones(1)}, {"step": 3}, keep=1)


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes"), OSError(errno.ENOSPC, "No space left"), KeyError()]
)
def test_other_errors_pass(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as raised, memory_named(tmp_path):
        raise error
    assert raised.value is error


def test_tensorboard_holds_the_same_numbers(corpus: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert finish(start(tmp_path / "run", corpus, "--until", "10"))[0] == 0
    assert finish(start(tmp_path / "run", corpus, "--until", "20"))[0] == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    shown = {e.step: e.value for e in events.Scalars("train/loss")}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = {record["step"]: record["loss"] for record in lines if record["kind"] == "train"}
    assert shown == pytest.approx(logged)
    assert len(shown) == 20
