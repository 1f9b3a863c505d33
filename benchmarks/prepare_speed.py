"""The speed and memory of `raptr prepare`, compared with the tokenizer's own `encode_batch`.

    python benchmarks/prepare_speed.py TEXT.jsonl[.gz|.xz|.zst] [--repeats 5] [--megabytes 40]

Speed: tokens per second of all of `prepare_corpus` (two readings, encoding, writing, checksums; with an existing
tokenizer) and of its encoding alone, as ratios to `encode_batch` and `encode_batch_fast` on the same texts. These two
get a thousand texts at a time from memory, and their results are thrown away. The variants take turns, each in
a process of its own. On a machine that others use too, trust the ratios per CPU second, and look at the recorded load.
Memory: the peak (VmHWM) of a process that prepares the text, and of one that prepares ten times as much (copies that
differ in their first characters), each with an existing tokenizer and with one trained on the way, whose sample ends at
64 MiB.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from raptr.data import open_store
from raptr.data.prepare import DomainSource, Progress, prepare_corpus
from raptr.data.prepare.reading import FileInput
from raptr.data.tokenizer import load

RESULT = Path(__file__).parent / "results" / "prepare_speed.json"
BASELINES = ("encode_batch", "encode_batch_fast")
BATCH = 1000


def texts(path: Path, size: int) -> list[str]:
    """Return the first documents of a file, about `size` bytes in all."""
    documents, total = [], 0
    for record in FileInput.of(path, "text").records(0):
        if record.text:
            documents.append(record.text)
            total += len(record.text.encode())
        if total >= size:
            break
    return documents


def encode(folder: Path, name: str) -> dict[str, float]:
    """Time the tokenizer's own method, a thousand texts at a time."""
    tokenizer, documents = load(folder / "tokenizer.json"), texts(folder / "text.jsonl", 2**62)
    started, cpu, tokens = time.perf_counter(), time.process_time(), 0
    for first in range(0, len(documents), BATCH):
        tokens += sum(map(len, getattr(tokenizer, name)(documents[first : first + BATCH], add_special_tokens=False)))
    return {"rate": tokens / (time.perf_counter() - started), "per_cpu_second": tokens / (time.process_time() - cpu)}


def prepare(folder: Path, name: str, *, trained: bool) -> dict[str, float]:
    """Time the whole preparation, with the folder's tokenizer or with one trained on the way."""
    out = folder / "out"
    source = DomainSource("text", (str(folder / name),))
    encoding: list[float] = []

    def progress(how_far: Progress) -> None:
        if how_far.stage == "encoding":
            encoding.append(how_far.rate)

    started, cpu = time.perf_counter(), time.process_time()
    tokenizer = None if trained else folder / "tokenizer.json"
    store = prepare_corpus([source], out, tokenizer=tokenizer, progress=progress)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    part = store.domains[0]
    # [SEP] is not counted: the tokenizer does not produce it.
    tokens = sum(part.total(split) - part.count(split) for split in ("train", "valid"))
    shutil.rmtree(out)
    scale = tokens / sum(part.total(split) for split in ("train", "valid"))
    return {"rate": tokens / seconds, "per_cpu_second": tokens / cpu, "encoding_rate": encoding[-1] * scale}


def measure(folder: Path, variant: str) -> dict[str, float]:
    """Run one variant in a process of its own; return its rates and its peak memory."""
    command = [sys.executable, __file__, "--inside", variant, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    numbers: dict[str, float] = json.loads(done.stdout)
    return numbers


def inside(folder: Path, variant: str) -> None:
    """Run one variant, in the process that is measured, and print its rates and its peak memory."""
    if variant in BASELINES:
        numbers = encode(folder, variant)
    elif variant == "imports":
        numbers = {}
    else:
        name = "copies" if "tenfold" in variant else "text.jsonl"
        numbers = prepare(folder, name, trained="trained" in variant)
    # Not `ru_maxrss`, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    numbers["peak_mib"] = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print(json.dumps(numbers))


def summary(values: list[float]) -> dict[str, Any]:
    """Return count, mean and standard deviation."""
    return {"n": len(values), "mean": statistics.mean(values), "deviation": statistics.stdev(values)}


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--inside", nargs=2)
    options = parser.parse_args()
    if options.inside:
        inside(Path(options.inside[1]), options.inside[0])
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [json.dumps({"text": text}) for text in texts(options.text, options.megabytes * 10**6)]
        (folder / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        size, documents = (folder / "text.jsonl").stat().st_size, len(lines)
        (folder / "copies").mkdir()
        for copy in range(10):
            # Copies differ, since the tokenizer's sample would contain equal texts only once.
            others = "".join(json.dumps({"text": f"{copy}. {json.loads(line)['text']}"}) + "\n" for line in lines)
            (folder / "copies" / f"{copy}.jsonl").write_text(others, encoding="utf-8")
        started = time.perf_counter()
        source = DomainSource("text", (str(folder / "text.jsonl"),))
        trained = prepare_corpus([source], folder / "trained")
        end_to_end = time.perf_counter() - started
        shutil.copy(trained.path / "tokenizer.json", folder)
        facts = {part.name: part.total("train") + part.total("valid") for part in open_store(trained.path).domains}
        rounds, loads = [], []
        for turn in range(options.repeats):
            order = [*BASELINES, "prepare"]
            order = order[turn % 3 :] + order[: turn % 3]
            loads.append(os.getloadavg()[0])
            rounds.append({variant: measure(folder, variant) for variant in order})
            print(rounds[-1], file=sys.stderr, flush=True)
        rates = {v: [measured[v]["rate"] for measured in rounds] for v in (*BASELINES, "prepare")}
        rates["prepare, encoding alone"] = [measured["prepare"]["encoding_rate"] for measured in rounds]
        per_cpu = {v: [measured[v]["per_cpu_second"] for measured in rounds] for v in (*BASELINES, "prepare")}
        ratios = {
            f"{mine} / {theirs}": summary([a / b for a, b in zip(rates[mine], rates[theirs], strict=True)])
            for mine in ("prepare", "prepare, encoding alone")
            for theirs in BASELINES
        }
        for theirs in BASELINES:
            pairs = zip(per_cpu["prepare"], per_cpu[theirs], strict=True)
            ratios[f"prepare / {theirs}, per CPU second"] = summary([a / b for a, b in pairs])
        peaks = {"imports": [measure(folder, "imports")["peak_mib"]], "given": [], "given, tenfold": []}
        peaks |= {"trained": [], "trained, tenfold": []}
        for variant in list(peaks)[1:]:
            peaks[variant].append(measure(folder, variant)["peak_mib"])
            print(variant, peaks[variant], file=sys.stderr, flush=True)
        peaks["given"] += [measured["prepare"]["peak_mib"] for measured in rounds]
        memory: dict[str, Any] = {variant: {"n": len(all_), "each": all_} for variant, all_ in peaks.items()}
        for kind in ("given", "trained"):
            memory[f"{kind}: tenfold / once"] = statistics.mean(peaks[f"{kind}, tenfold"]) / statistics.mean(
                peaks[kind]
            )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "command": f"python benchmarks/prepare_speed.py {options.text.name} --repeats {options.repeats} "
        f"--megabytes {options.megabytes}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "hardware": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "machine": platform.machine()},
        "versions": {"python": platform.python_version(), **{p: version(p) for p in ("raptr", "tokenizers", "numpy")}},
        "text": {"bytes": size, "documents": documents, "tokens": facts["text"], "vocabulary": trained.vocabulary.size},
        "tokens_per_second": {variant: summary(values) for variant, values in rates.items()},
        "tokens_per_cpu_second": {variant: summary(values) for variant, values in per_cpu.items()},
        "load_before_each_round": loads,
        "ratios": ratios,
        "peak_memory_mib": memory,
        "seconds_with_training_of_the_tokenizer": end_to_end,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


def _cpu() -> str:
    facts = Path("/proc/cpuinfo")
    names = [line for line in facts.read_text().splitlines() if "model name" in line] if facts.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor()


if __name__ == "__main__":
    main()
