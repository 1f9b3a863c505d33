"""The tables of speed.md."""

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.step_speed import paired, speed_up
from docs.results.pages.contract import Page, Records, fixed, table
from raptr.subnetworks.schedule import LENGTHS

NAMES = {
    "base:256x128": "BERT-Base, 256 × 128",
    "large:128x128": "BERT-Large, 128 × 128",
    "large:32x512": "BERT-Large, 32 × 512",
    "mini:256x128": "12 layers of width 256, 256 × 128",
}
FORMS = ("gather", "skip", "zero")


def full_model(records: Records) -> str:
    """Tabulate a step with all layers."""
    rate = records["speed"]["matrix product, FLOP/s"]
    rows = [_row(NAMES[case["case"]], case, f"gather {case['sizes'][-1]}", rate) for case in records["speed"]["cases"]]
    return table(["model, batch", "ms a step", "tokens/s", "share of the matrix-product rate"], rows)


def peers(records: Records) -> str:
    """Compare BERT-Base with Hugging Face's model; the like-for-like measurements once there are any."""
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
    thousands = one["tokens"] / middle
    tokens = round(thousands, 0 if thousands >= 100 else 1) * 1000
    return [shown, f"{middle:.1f} ± {spread:.1f}", f"{tokens:,.0f}", fixed(share, 2)]


def _cases(records: Records) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every case, and below it any repeated measurement of the same case."""
    for case in records["speed"]["cases"]:
        yield NAMES[case["case"]], case
        for again in records["again"]["cases"]:
            if again["case"] == case["case"]:
                yield "the same, again", again


def subnetworks(records: Records) -> str:
    """Compare k of L layers with a model that has only k."""
    rows = []
    for shown, one in _cases(records):
        times = one["milliseconds"]
        for place, k in enumerate(one["sizes"]):
            ratios = [fixed(paired(times[f"{form} {k}"], times[f"static {k}"]), 3) for form in FORMS]
            static = statistics.median(times[f"static {k}"])
            rows.append(["" if place else shown, str(k), *ratios, f"{static:.1f}"])
    return table(["model, batch", "k", *FORMS, "static, ms"], rows)


def speed_ups(records: Records) -> str:
    """Tabulate the realised speed-up of equal stages."""
    rows = []
    for shown, one in _cases(records):
        seen, counted = speed_up(one, "gather")
        stages = "-".join(map(str, one["sizes"]))
        rows.append([shown, stages, fixed(seen, 3), fixed(counted, 3), fixed(seen / counted, 3)])
    return table(["model, batch", "equal stages", "realised speed-up", "counted, whole model", "ratio"], rows)


def versions(records: Records) -> str:
    """Compare two versions of raptr that took turns."""
    rows = []
    for way, one in records["versions"]["ways"].items():
        old, new = (f"{statistics.median(one['milliseconds'][name]):.1f}" for name in ("old", "new"))
        spread = f"{fixed(min(one['ratios']), 3)} to {fixed(max(one['ratios']), 3)}"
        rows.append([way, old, new, fixed(one["ratio"], 4), spread])
    head = ["BERT-Base, 256 × 128", "before, ms", "after, ms", "speed, after over before", "single blocks"]
    return table(head, rows)


PAPER = {12: 2.0, 16: 1.6, 20: 1.4, 24: 1.1}  # steps/s of UL2-1.6B on 256 TPU chips
EACH = "matrix product each time, FLOP/s"
DECODERS = {
    "decoder/1.6b:32x512": "1.6B, 32 × 512",
    "decoder/1.6b:64x512": "1.6B, 64 × 512",
    "decoder/100m:64x512": "100M, 64 × 512",
}


def _ceiling(records: Records) -> float:
    """Return the largest matrix-product rate of the decoders' runs: single readings of an idle card are too low."""
    runs = [records[name] for name in ("decoder", "decoder_100m", "decoder_peers", "ul2")]
    rates = [run["matrix product, FLOP/s"] for run in runs]
    return float(max(rates + [rate for run in runs for case in run["cases"] for rate in case.get(EACH, [])]))


def _decoders(records: Records) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the decoders of which k of L layers were timed."""
    for name in ("decoder", "decoder_100m"):
        for case in records[name]["cases"]:
            yield DECODERS[case["case"]], case


def decoder_full(records: Records) -> str:
    """Compare a decoder's step with all layers with that of Hugging Face's Llama."""
    rows, rate = [], _ceiling(records)
    for record in (records["decoder"], records["decoder_peers"], records["decoder_100m"]):
        for case in record["cases"]:
            size = case.get("sizes", [24])[-1]
            ours = next(name for name in (f"gather {size}", f"static {size}") if name in case["milliseconds"])
            memory = dict(case.get("peak memory, bytes, device", {}))
            if "peak memory" in case:
                memory[ours] = case["peak memory"]["gather"]["k of L, device"][str(size)]
            for name in (ours, *(name for name in case["milliseconds"] if "Hugging Face" in name)):
                way = "raptr" if name == ours else "Hugging Face, compiled by block"
                taken = f"{memory[name] / 2**30:.1f}" if name in memory else "–"
                rows.append([*_row(f"{DECODERS[case['case']]}, {way}", case, name, rate), taken])
    return table(
        ["decoder, batch", "ms a step", "tokens/s", "share of the matrix-product rate", "GiB of the GPU"], rows
    )


def decoder_subnetworks(records: Records) -> str:
    """Compare k of L layers of a decoder with a model that has only k."""
    rows = []
    for shown, one in _decoders(records):
        times, memory = one["milliseconds"], one["peak memory"]["gather"]["k of L, device"]
        for place, k in enumerate(one["sizes"]):
            ratio = paired(times[f"gather {k}"], times[f"static {k}"])
            ways = (f"{statistics.median(times[f'{way} {k}']):.1f}" for way in ("gather", "static"))
            taken = f"{memory[str(k)] / 2**30:.1f}"
            rows.append(["" if place else shown, str(k), *ways, fixed(ratio, 3), taken])
    return table(["decoder, batch", "k", "k of L, ms", "static, ms", "ratio", "GiB of the GPU"], rows)


def decoder_speed_ups(records: Records) -> str:
    """Tabulate the realised speed-up of a decoder's stages."""
    rows = []
    cases = list(_decoders(records))
    cases += [(f"{DECODERS[case['case']]}, UL2", case) for case in records["ul2"]["cases"]]
    for shown, case in cases:
        for lengths in LENGTHS:
            seen, counted = speed_up(case, "gather", lengths)
            stages = f"{'-'.join(map(str, case['sizes']))} {lengths.capitalize()}"
            rows.append([shown, stages, fixed(seen, 3), fixed(counted, 3), fixed(seen / counted, 3)])
    return table(["decoder, batch", "stages", "realised speed-up", "counted, whole model", "ratio"], rows)


def ul2(records: Records) -> str:
    """Compare a step of UL2 with a causal one of the same model."""
    rows, rate = [], _ceiling(records)
    named = {"causal": "causal, AdamW", "static": "UL2, AdamW", "adafactor": "UL2, Adafactor"}
    for case in records["ul2"]["cases"]:
        for way, shown in named.items():
            name = f"{way} {case['sizes'][-1]}"
            rows.append([*_row(shown, case, name, rate), fixed(case["flops"][name] / 1e12, 1)])
    head = ["1.6B, 32 × 512", "ms a step", "tokens/s", "share of the matrix-product rate", "TFLOP a step"]
    return table(head, rows)


def ul2_sizes(records: Records) -> str:
    """Compare UL2's steps per second by size with the paper's."""
    (case,) = records["ul2"]["cases"]
    times, flops, whole = case["milliseconds"], case["flops"], f"gather {case['sizes'][-1]}"
    rows = []
    for k in case["sizes"]:
        seen, counted = paired(times[whole], times[f"gather {k}"]), flops[whole] / flops[f"gather {k}"]
        ratio = paired(times[f"gather {k}"], times[f"static {k}"])
        rows.append([str(k), fixed(seen, 2), fixed(counted, 2), fixed(PAPER[k] / PAPER[24], 2), fixed(ratio, 3)])
    return table(["k of 24", "steps/s, relative", "counted", "the paper's", "ms, relative to a static model"], rows)


def axes(records: Records) -> str:
    """Compare kept heads, MLP parts and several axes at once with static models of those shapes."""
    if records["axes"] is None:
        return "**Not measured yet.**"
    (case,) = records["axes"]["cases"]
    times, flops, rows = case["milliseconds"], case["flops"], []
    for name in case["axes"]:
        narrow, static = times[name], times[f"static, {name}"]
        idle = [a - b for a, b in zip(times[f"update, {name}"], times[f"update, static, {name}"], strict=True)]
        without = [spent - more for spent, more in zip(narrow, idle, strict=True)]
        medians = (f"{statistics.median(each):.2f}" for each in (narrow, static, idle))
        ratios = (
            paired(narrow, static),
            paired(without, static),
            paired(narrow, times["full"]),
            flops[name] / flops["full"],
        )
        rows.append([name, *medians, *(fixed(ratio, 3) for ratio in ratios)])
    head = ["what runs", "ms a step", "static model, ms", "update of idle weights, ms", "ratio", "ratio without that"]
    return table([*head, "of the full step", "FLOPs of the full step"], rows)


def engines(records: Records) -> str:
    """Tabulate a step by the number of running layers, under each engine and without one."""
    return _engines(records["engines"])


def engines_512(records: Records) -> str:
    """Tabulate the same with sequences of 512 tokens, which is four times the work."""
    return _engines(records["engines_512"])


def _engines(record: Any) -> str:
    if record is None:
        return "**Not measured yet.**"
    counted = record["counted"]
    *sizes, whole = sorted(counted, key=int)
    rows = []
    for name, way in record["ways"].items():
        times = way["milliseconds"]
        saved = {size: 1 - times[size] / times[whole] for size in sizes}
        parts = [saved[size] / (1 - counted[size]) for size in sizes]
        parts.append(sum(saved.values()) / sum(1 - counted[size] for size in sizes))
        rows.append([name, *(f"{times[size]:.1f}" for size in (*sizes, whole)), *(fixed(part, 3) for part in parts)])
    head = ["way", *(f"{size} layers, ms" for size in (*sizes, whole))]
    stages = "-".join((*sizes, whole))
    return table([*head, *(f"realised saving, {size}" for size in (*sizes, stages))], rows)


def trainer(records: Records) -> str:
    """Tabulate steps under Hugging Face's Trainer, relative to the same trainer without the callback."""
    return _trainer(records["trainer"])


def trainer_growth(records: Records) -> str:
    """Tabulate the same for a method that grows, beside RaPTr."""
    return _trainer(records["trainer_growth"])


def _trainer(record: Any) -> str:
    if record is None:
        return "**Not measured yet.**"
    rows = []
    for case in record["cases"]:
        flops, times = case["flops"], {name: one["median"] for name, one in case["milliseconds"].items()}
        for name, median in times.items():
            way, _, size = name.rpartition(", ")
            size = size.removesuffix(" layers")
            base = "full, compiled" if "compiled" in way else "no callback"
            relative = fixed(median / times[f"{base}, 12 layers"], 3)
            rows.append([case["case"], way, size, f"{median:.1f}", relative, fixed(flops[size] / flops["12"], 3)])
    return table(["model", "way", "layers", "ms a step", "time, relative", "FLOPs, relative"], rows)


def trainer_speed_ups(records: Records) -> str:
    """Tabulate what the schedule saves under the Trainer, realised and counted."""
    if records["trainer"] is None:
        return "**Not measured yet.**"
    rows = []
    for case in records["trainer"]["cases"]:
        ratios = case["speed-up"]
        for way in [name.removeprefix("realised, ") for name in ratios if name.startswith("realised, ")]:
            counted = ratios[f"counted, {way.split(', ')[0].split(' against ')[0]}"]
            rows.append([case["case"], way, fixed(ratios[f"realised, {way}"], 3), fixed(counted, 3)])
    return table(["model", "way", "realised speed-up", "counted"], rows)


def finetunings(records: Records) -> str:
    """Tabulate several fine-tunings as one joined model."""
    rows = [
        [
            str(way["models"]),
            fixed(way["milliseconds"], 1),
            fixed(way["steps_per_second"], 0),
            fixed(way["floor_milliseconds"], 2),
            fixed(way["to_floor"], 1),
        ]
        for way in records["finetune"]["ways"]
    ]
    return table(["models", "ms a step", "steps/s of all together", "floor, ms", "ratio to it"], rows)


PAGE = Page(
    name="results/speed",
    records={
        "speed": "benchmarks/results/bert_speed.json",
        "again": "benchmarks/results/bert_speed_large.json",
        "peers": "benchmarks/results/bert_peers.json",
        "versions": "benchmarks/results/versions_speed.json",
        "decoder": "benchmarks/results/decoder_speed.json",
        "decoder_100m": "benchmarks/results/decoder_speed_100m.json",
        "decoder_peers": "benchmarks/results/decoder_peers.json",
        "ul2": "benchmarks/results/ul2_speed.json",
        "axes": "benchmarks/results/axes_speed.json",
        "engines": "benchmarks/results/parallel_speed.json",
        "engines_512": "benchmarks/results/parallel_speed_512.json",
        "trainer": "benchmarks/results/trainer_speed.json",
        "trainer_growth": "benchmarks/results/trainer_speed_growth.json",
        "finetune": "benchmarks/results/finetune_speed.json",
    },
    tables={
        "full-model": full_model,
        "peers": peers,
        "subnetworks": subnetworks,
        "speed-ups": speed_ups,
        "versions": versions,
        "decoder-full": decoder_full,
        "decoder-subnetworks": decoder_subnetworks,
        "decoder-speed-ups": decoder_speed_ups,
        "ul2": ul2,
        "ul2-sizes": ul2_sizes,
        "axes": axes,
        "engines": engines,
        "engines-512": engines_512,
        "trainer": trainer,
        "trainer-speed-ups": trainer_speed_ups,
        "trainer-growth": trainer_growth,
        "finetunings": finetunings,
    },
)
