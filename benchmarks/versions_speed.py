"""Compare the speed of two versions of raptr, interleaved in one run: does a change cost anything?

    python benchmarks/versions_speed.py --old TREE --new TREE --data FOLDER [--case bert/base:256x128] [--out FILE]

TREE is a checkout (`git worktree add TREE COMMIT`), FOLDER is made by `raptr prepare`. Each version runs in a process
of its own, with its own training step (benchmarks/step_speed.py of that tree): full training, and RaPTr's first stage.
The processes take turns in blocks of a few steps, in shuffled order, so that changes of the device's speed affect both
alike. The result has the milliseconds of every block, the median ratio of speeds (new over old, above 1 is faster), and
the number of graphs compiled during the timing, which should be 0.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

WORKER = """
import importlib.util, json, sys
from pathlib import Path
tree, case, data = sys.argv[1:]
sys.path[:0] = [tree, tree + "/src"]
name = next(name for name in ("step_speed", "bert_speed") if Path(tree, "benchmarks", name + ".py").exists())
case = case if name == "step_speed" else case.split("/")[-1]  # an earlier version knows one family
spec = importlib.util.spec_from_file_location(name, tree + "/benchmarks/" + name + ".py")
speed = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(speed)
from torch._dynamo.utils import counters
import raptr
assert Path(raptr.__file__).is_relative_to(Path(tree).resolve()), raptr.__file__
bench = speed.Bench(speed.Case.parse(case), Path(data))
bench.way("full", bench.trainer("full", "auto"), 0)
bench.way("first stage", bench.trainer("raptr", "auto"), 0)
for step in bench.ways.values():
    speed.milliseconds(step, 5)
begun = counters["stats"]["unique_graphs"]
print("ready", flush=True)
for line in sys.stdin:
    way, steps = json.loads(line)
    took = speed.milliseconds(bench.ways[way], steps)
    print(json.dumps([took, counters["stats"]["unique_graphs"] - begun]), flush=True)
"""
WAYS = ("full", "first stage")


def main() -> None:
    """Run the benchmark."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("old", "new", "data"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--case", default="bert/base:256x128")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    parser.add_argument("--out", type=Path, default=Path("versions_speed.json"))
    options = parser.parse_args()
    trees = {"old": options.old, "new": options.new}
    workers = {
        name: subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tree.resolve()), options.case, str(options.data.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for name, tree in trees.items()
    }
    for name, worker in workers.items():
        if _line(worker) != "ready":
            sys.exit(f"the {name} version did not start")
    blocks: dict[str, dict[str, list[float]]] = {way: {name: [] for name in workers} for way in WAYS}
    graphs = dict.fromkeys(workers, 0)
    for block in range(options.blocks):
        turns = [(way, name) for way in WAYS for name in workers]
        Random(block).shuffle(turns)
        for way, name in turns:
            worker = workers[name]
            assert worker.stdin is not None
            worker.stdin.write(json.dumps([way, options.steps]) + "\n")
            worker.stdin.flush()
            took, graphs[name] = json.loads(_line(worker))
            blocks[way][name].append(took)
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
    result: dict[str, Any] = {"case": options.case, "steps": options.steps, "recompiled": graphs, "ways": {}}
    for way, by_name in blocks.items():
        ratios = [old / new for old, new in zip(by_name["old"], by_name["new"], strict=True)]
        result["ways"][way] = {"milliseconds": by_name, "ratio": statistics.median(ratios), "ratios": ratios}
        print(f"{way}: {statistics.median(ratios):.4f} times the speed ({min(ratios):.4f} to {max(ratios):.4f})")
    print(f"graphs compiled while timed: {graphs}")
    sys.path.insert(0, str(options.new.resolve() / "src"))
    from raptr.train.run import environment

    result["environment"] = environment()
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def _line(worker: "subprocess.Popen[str]") -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


if __name__ == "__main__":
    main()
