"""The tables of speed.md."""

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.step_speed import paired, speed_up
from docs.results.pages.contract import Page, Records, fixed, table

NAMES = {
    "base:256x128": "BERT-Base, 256 × 128",
    "large:128x128": "BERT-Large, 128 × 128",
    "large:32x512": "BERT-Large, 32 × 512",
    "mini:256x128": "12 layers of width 256, 256 × 128",
}
FORMS = ("gather", "skip", "zero")


def full_model(records: Records) -> str:
    """A step with all layers."""
    rate = records["speed"]["matrix product, FLOP/s"]
    rows = [_row(NAMES[one["case"]], one, f"gather {one['sizes'][-1]}", rate) for one in records["speed"]["cases"]]
    return table(["model, batch", "ms a step", "tokens/s", "share of the matrix-product rate"], rows)


def peers(records: Records) -> str:
    """BERT-Base beside Hugging Face's model; the like-for-like ones once they are measured."""
    rows = []
    for run, record in (("", records["peers"]), (", one fixed batch", records["speed"])):
        if record is not None:
            one, rate = record["cases"][0], record["matrix product, FLOP/s"]
            ours = next(name for name in ("static 12", "gather 12") if name in one["milliseconds"])
            wanted = [ours, *(name for name in one["milliseconds"] if name.startswith("Hugging Face"))]
            named = {name: "raptr, full model" if name == ours else f"{name}{run}" for name in wanted}
            rows += [[*_row(named[name], one, name, rate), fixed(one["flops"][name] / 1e12, 1)] for name in wanted]
    head = ["BERT-Base, 256 × 128", "ms a step", "tokens/s", "share of the matrix-product rate", "TFLOP a step"]
    return table(head, rows)


def _row(shown: str, one: dict[str, Any], name: str, rate: float) -> list[str]:
    blocks = one["milliseconds"][name]
    middle, spread = statistics.median(blocks), (max(blocks) - min(blocks)) / 2
    share = one["flops"][name] / middle / rate * 1000
    tokens = round(one["tokens"] / middle, 0 if middle < 1000 else 1) * 1000
    return [shown, f"{middle:.1f} ± {spread:.1f}", f"{tokens:,.0f}", fixed(share, 2)]


def _cases(records: Records) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every case, with what was measured again below its first measurement."""
    for one in records["speed"]["cases"]:
        yield NAMES[one["case"]], one
        for again in records["again"]["cases"]:
            if again["case"] == one["case"]:
                yield "the same, again", again


def subnetworks(records: Records) -> str:
    """k of L layers against a model that has just k."""
    rows = []
    for shown, one in _cases(records):
        times = one["milliseconds"]
        for place, k in enumerate(one["sizes"]):
            ratios = [fixed(paired(times[f"{form} {k}"], times[f"static {k}"]), 3) for form in FORMS]
            static = statistics.median(times[f"static {k}"])
            rows.append(["" if place else shown, str(k), *ratios, f"{static:.1f}"])
    return table(["model, batch", "k", *FORMS, "static, ms"], rows)


def speed_ups(records: Records) -> str:
    """The realised speed-up of equal stages."""
    rows = []
    for shown, one in _cases(records):
        seen, counted = speed_up(one, "gather")
        stages = "-".join(map(str, one["sizes"]))
        rows.append([shown, stages, fixed(seen, 3), fixed(counted, 3), fixed(seen / counted, 3)])
    return table(["model, batch", "equal stages", "realised speed-up", "counted, whole model", "ratio"], rows)


def versions(records: Records) -> str:
    """Two versions of raptr in turns."""
    rows = []
    for way, one in records["versions"]["ways"].items():
        old, new = (f"{statistics.median(one['milliseconds'][name]):.1f}" for name in ("old", "new"))
        spread = f"{fixed(min(one['ratios']), 3)} to {fixed(max(one['ratios']), 3)}"
        rows.append([way, old, new, fixed(one["ratio"], 4), spread])
    head = ["BERT-Base, 256 × 128", "before, ms", "after, ms", "speed, after over before", "single blocks"]
    return table(head, rows)


PAGE = Page(
    name="results/speed",
    records={
        "speed": "benchmarks/results/bert_speed.json",
        "again": "benchmarks/results/bert_speed_large.json",
        "peers": "benchmarks/results/bert_peers.json",
        "versions": "benchmarks/results/versions_speed.json",
    },
    tables={
        "full-model": full_model,
        "peers": peers,
        "subnetworks": subnetworks,
        "speed-ups": speed_ups,
        "versions": versions,
    },
)
