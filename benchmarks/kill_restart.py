"""Kill preparation and training with SIGKILL again and again; the result must equal an undisturbed run's, bit for bit.

    python benchmarks/kill_restart.py [--kills 20] [--seed 0] [--processes 2 --parallel fsdp]

Each kill comes either after a random time or at the n-th call of a system function that checkpoints use when they are
written or pruned, or that the journal of the preparation uses (fsync, rename, replace, rmtree, unlink), so that the
delicate moments are sure to be hit. Whenever the program reaches its end, its output is compared: the prepared folder,
byte for byte, and all weights, moments and step counts. Then another round begins. The result goes to
benchmarks/results/kill_restart.json.

With several processes, torchrun starts the training, and restarts it by itself after each kill of one of them. A fifth
of the kills come while a checkpoint is written. The result goes to benchmarks/results/kill_restart_many.json.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = ["--steps", "120", "--length", "32", "--batch", "4", "--set", "model.width=32", "--set", "model.head_size=8"]
TRAIN += ["--set", "model.mlp=64", "--set", "optimizer.warmup=5", "--set", "train.eval_samples=8"]
TRAIN += ["--set", "train.checkpoint_every=5", "--set", "train.log_every=1", "--device", "cpu"]
CALLS = ("fsync", "rename", "replace", "rmtree", "unlink")


def main() -> None:
    """Prepare and train without kills, then with them, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--parallel", default="fsdp")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    if arguments.processes > 1:
        _many(arguments, draw)
        return
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        corpus = _corpus(root / "text", draw)
        calm = root / "calm"
        calm.mkdir()
        prepare = ["prepare", "--data", str(corpus), "--vocabulary", "1024", "--out"]
        started = time.monotonic()
        _run([*prepare, str(calm / "data")])
        prepare_seconds = time.monotonic() - started
        started = time.monotonic()
        _run(["pretrain", "--run", str(calm / "run"), "--data", str(calm / "data"), *TRAIN])
        train_seconds = time.monotonic() - started

        kills: list[str] = []
        rounds: list[dict[str, bool]] = []
        while len(kills) < arguments.kills:
            fire = root / f"fire-{len(rounds)}"
            fire.mkdir()
            run = ["pretrain", "--run", str(fire / "run"), "--data", str(fire / "data"), *TRAIN]
            for command, seconds in (([*prepare, str(fire / "data")], prepare_seconds), (run, train_seconds)):
                while len(kills) < arguments.kills:
                    ended, how = _kill(command, draw, seconds)
                    if ended == 0:  # it ended before the kill
                        break
                    assert ended == -signal.SIGKILL, how
                    kills.append(how)
                    print(f"kill {len(kills)}, round {len(rounds) + 1}: {how}", flush=True)
                _run(command)
            rounds.append(
                {
                    "prepared_bytes_equal": _contents(calm / "data") == _contents(fire / "data"),
                    "tensors_equal": _tensors_equal(calm / "run", fire / "run"),
                }
            )
            print(f"round {len(rounds)}: {rounds[-1]}", flush=True)
        result = {
            "command": f"python benchmarks/kill_restart.py --kills {arguments.kills} --seed {arguments.seed}",
            "environment": json.loads((calm / "run" / "environment.json").read_text()),
            "kills": kills,
            "rounds": rounds,
        }
    out = Path(__file__).parent / "results" / "kill_restart.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    if not all(equal for entry in rounds for equal in entry.values()):
        sys.exit(1)


def _many(arguments: argparse.Namespace, draw: random.Random) -> None:
    """Train with several processes, with kills and without, in one job of torchrun, and compare."""
    import yaml

    from raptr.train.config import Config

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _run(["prepare", "--data", str(_corpus(root / "text", draw)), "--vocabulary", "1024", "--out", f"{root}/data"])
        settings = {
            "model": {"width": 32, "head_size": 8, "mlp": 64},
            "data": {"source": f"{root}/data", "length": 32},
            "optimizer": {"warmup": 5},
            "train": {"steps": 120, "batch": 4, "eval_samples": 8, "checkpoint_every": 5, "log_every": 1}
            | {"device": "cpu", "parallel": arguments.parallel, "tracker": "none"},
        }
        (root / "config.yaml").write_text(yaml.safe_dump(Config.read(settings).mapping()))
        inside = range(0, arguments.kills, 5)  # these kills come while a checkpoint is written
        kills: list[dict[str, int | str]] = []
        for number, step in enumerate(sorted(draw.choices(range(1, 115), k=arguments.kills))):
            rank = draw.randrange(arguments.processes)
            if number in inside:
                saved = min(-(-step // 5) * 5, 115)
                kills.append(
                    {"rank": rank, "step": saved, "call": draw.choice(["rename", "fsync"]) if not rank else "fsync"}
                )
            else:
                kills.append({"rank": rank, "step": step})
        kills.sort(key=lambda kill: kill["step"])
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc-per-node={arguments.processes}", f"--max-restarts={arguments.kills}"]
        program = ["-m", "tests.distributed.killed", str(root), str(root / "config.yaml"), json.dumps(kills)]
        started = time.monotonic()
        project = Path(__file__).parents[1]
        subprocess.run([*launcher, *program], check=True, cwd=project, env={**os.environ, "OMP_NUM_THREADS": "1"})
        starts = json.loads((root / "fire" / "environment.json").read_text())
        options = f"--kills {arguments.kills} --seed {arguments.seed} --processes {arguments.processes}"
        result = {
            "command": f"python benchmarks/kill_restart.py {options} --parallel {arguments.parallel}",
            "environment": starts[0],
            "kills": kills,
            "killed": len(list(root.glob("killed-*"))),
            "starts": [start["step"] for start in starts],
            "seconds": round(time.monotonic() - started),
            "tensors_equal": _tensors_equal(root / "calm", root / "fire"),
        }
    (Path(__file__).parent / "results" / "kill_restart_many.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    if not result["tensors_equal"] or result["killed"] != arguments.kills:
        sys.exit(1)


def _run(command: list[str]) -> None:
    subprocess.run([sys.executable, __file__, "child", *command], check=True, capture_output=True)


def _kill(command: list[str], draw: random.Random, seconds: float) -> tuple[int, str]:
    """Start the command and kill it by SIGKILL, at a random time or at a call of a system function."""
    if draw.random() < 0.4:
        delay = draw.uniform(0.3, 1.0) * seconds
        process = subprocess.Popen([sys.executable, __file__, "child", *command], stderr=subprocess.DEVNULL)
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        return process.wait(), f"{command[0]} after {delay:.1f} s"
    call, count = draw.choice(CALLS), draw.randint(1, 12)
    environment = {**os.environ, "KILL_AT": f"{call}:{count}"}
    child = [sys.executable, __file__, "child", *command]
    ended = subprocess.run(child, env=environment, capture_output=True, check=False)
    return ended.returncode, f"{command[0]} at {call} number {count}"


def _child(command: list[str]) -> None:
    """Run the command line, with one system function turned into a trap."""
    call, _, count = os.environ.get("KILL_AT", "").partition(":")
    if call:
        module = shutil if call == "rmtree" else os
        original, left = getattr(module, call), [int(count)]

        def trap(*given: object, **named: object) -> object:
            left[0] -= 1
            if left[0] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given, **named)

        setattr(module, call, trap)
    from raptr.cli import main as raptr

    sys.argv = ["raptr", *command]
    raptr()


def _corpus(folder: Path, draw: random.Random) -> Path:
    """Write files of random text, enough for a preparation of a few seconds."""
    folder.mkdir()
    words = ["".join(draw.choices("abcdefghijklmnoprstuvw", k=draw.randint(2, 9))) for _ in range(4000)]
    for file in range(12):
        lines = [{"text": " ".join(draw.choices(words, k=200))} for _ in range(400)]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _tensors_equal(one: Path, other: Path) -> bool:
    import torch
    from safetensors.torch import load_file

    shards = [sorted((run / "checkpoints" / "step-120").glob("*.safetensors")) for run in (one, other)]
    if [file.name for file in shards[0]] != [file.name for file in shards[1]]:
        return False
    for tensors in zip(*([load_file(file) for file in files] for files in shards), strict=True):
        same = tensors[0].keys() == tensors[1].keys()
        if not same or not all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0]):
            return False
    return True


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        _child(sys.argv[2:])
    else:
        main()
