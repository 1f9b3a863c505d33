"""Runs on several domains: both means of the held-out loss are in the table, and which is which is said."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from raptr.report.runs import Run, read_run
from raptr.report.tables import dicts, notes, summary, table_columns


def table_of(*runs: Run) -> dict[str, tuple[str, ...]]:
    """The cells under each heading."""
    rows = summary(runs)
    return {column.heading.strip(): tuple(map(column.cell, rows)) for column in table_columns(rows)}


def test_both_means_are_shown(make_run: Callable[..., Run]) -> None:
    one = make_run("mixed")
    last = replace(one.evals[-1], loss=3.0, loss_mixture=3.5, domains={"web": 2.5, "wiki": 4.0})
    mixed, plain = replace(one, evals=(*one.evals[:-1], last)), make_run("plain")
    table = table_of(mixed, plain)
    assert table["held-out loss"][0] == "3.000"
    (heading,) = [heading for heading in table if "mixture" in heading]
    assert table[heading] == ("3.500", "–")
    assert any(
        "held-out loss" in note and "windows" in note and "mixture" in note for note in notes(summary([mixed, plain]))
    )
    assert not any("mixture" in text for text in (*table_of(plain), *notes(summary([plain]))))


def test_measures_of_text_are_shown_where_there_are_any(make_run: Callable[..., Run]) -> None:
    one = make_run("causal")
    last = replace(one.evals[-1], loss=3.0, perplexity=20.0855, bits_per_byte=1.0821)
    table = table_of(replace(one, evals=(*one.evals[:-1], last)), make_run("plain"))
    assert (table["perplexity"], table["bits per byte"]) == (("20.09", "–"), ("1.082", "–"))
    assert not any("perplexity" in text or "bits" in text for text in table_of(make_run("plain")))


def test_every_denoiser_is_shown_where_there_are_any(make_run: Callable[..., Run]) -> None:
    one = make_run("mixed")
    last = replace(one.evals[-1], denoisers={"R-3-0.15": 2.5, "S": 4.0})
    shown = table_of(replace(one, evals=(*one.evals[:-1], last)), make_run("plain"))
    table = {heading.split()[-1]: cells for heading, cells in shown.items()}
    assert (table["R-3-0.15"], table["S"]) == (("2.500", "–"), ("4.000", "–"))


def test_it_is_read_from_the_records(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "environment.json").write_text("[{}]")
    cost = {"tokens": 0, "flops": 0, "flops_layers": 0, "seconds": 0}
    record = {"kind": "eval", "step": 0, "loss": 2.0, "loss_mixture": 2.5, "domains": {"a": 1.0, "b": 3.0}, **cost}
    record |= {"perplexity": 7.5, "bits_per_byte": 1.25, "denoisers": {"S": 1.5}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (row,) = dicts(summary([read_run(tmp_path)]))
    assert (row["eval_loss"], row["eval_loss_mixture"]) == (2.0, 2.5)
    assert (row["eval_perplexity"], row["eval_bits_per_byte"]) == (7.5, 1.25)
    assert row["eval_denoisers"] == {"S": 1.5}
