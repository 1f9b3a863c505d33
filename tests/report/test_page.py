"""The page without a browser: what it holds, that it fetches nothing, and that no text of a run can break out."""

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from html.parser import HTMLParser
from importlib.resources import files
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from raptr.report.page import SCRIPTS, STYLE, TEMPLATE, payload, render
from raptr.report.page.curves import POINTS, axes, curves, thin
from raptr.report.page.sheets import flat, sheets
from raptr.report.plots import COLOURS
from raptr.report.runs import EvalRecord, Run
from raptr.report.speed import OWN_STAGE

MakeRun = Callable[..., Run]

HOSTILE = """</script><script>alert("1")</script><!-- <img src=x> 'a' &lt; $data ${style} \u2028"""
ASSETS = {name: (files("raptr.report.page") / name).read_text(encoding="utf-8") for name in (STYLE, TEMPLATE, *SCRIPTS)}


class Elements(HTMLParser):
    """The tags of a page, and the text of the element that holds its data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self._inside = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        self.data += data if self._inside else ""


def texts(sheet: dict[str, Any]) -> list[list[str]]:
    """A sheet's lines as plain text."""
    return [[cell if isinstance(cell, str) else cell["text"] for cell in line] for line in sheet["lines"]]


# The file


def test_the_page_holds_its_data_and_fetches_nothing(make_run: MakeRun) -> None:
    runs = [make_run("a", sizes=(6, 12)), make_run("b")]
    page = render(runs)
    elements = Elements(page)
    assert json.loads(elements.data) == payload(runs)
    for _, attributes in elements.tags:
        assert "src" not in attributes
        assert attributes.get("href") in (None, "data:,")
    assert not re.search(r"@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", page)
    (policy,) = [attributes["content"] for tag, attributes in elements.tags if "http-equiv" in attributes]
    assert policy is not None
    assert policy.startswith("default-src 'none';")


def test_no_text_of_a_run_leaves_the_data(make_run: MakeRun) -> None:
    plain, hostile = make_run("a"), make_run(HOSTILE)
    hostile = replace(hostile, config={HOSTILE: {"x": HOSTILE}}, environment={HOSTILE: HOSTILE})
    hostile = replace(hostile, evals=(EvalRecord(0, 1.0, 0, 0, 0, 0, domains={HOSTILE: 1.0}),))
    elements = Elements(render([hostile]))
    assert elements.tags == Elements(render([plain])).tags
    assert not set(elements.data) & set("<>&")  # an end tag may also end in a space, and a comment can swallow one
    data = json.loads(elements.data)
    assert data["runs"][0]["name"] == HOSTILE
    assert texts(data["sheets"]["environment"]) == [[HOSTILE, HOSTILE]]
    assert f"  on {HOSTILE}" in data["sheets"]["results"]["headings"]


def test_the_scripts_set_text_and_never_html() -> None:
    for name in SCRIPTS:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|</script", ASSETS[name])


def test_the_files_of_the_page_are_packaged_and_short() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["raptr"]
    for name, text in ASSETS.items():
        assert any(fnmatch(f"report/page/{name}", pattern) for pattern in patterns)
        assert len(text.splitlines()) <= 400


def test_colours_are_those_of_the_plot() -> None:
    light = re.findall(r"--run-\d: light-dark\((#\w+), #\w+\)", ASSETS[STYLE])
    assert [colour.upper() for colour in light] == list(COLOURS)


def test_a_page_of_no_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        render([])


# Curves


def test_lines_hold_losses_against_steps_flops_and_time(make_run: MakeRun) -> None:
    run = make_run(sizes=(6, 12))
    (curve,) = curves([run])
    assert curve["held"]["step"] == [0, 100, 200, 300, 400]
    assert curve["held"]["loss"] == pytest.approx([record.loss for record in run.evals], rel=1e-5)
    assert curve["held"]["flops"][-1] == run.last.flops
    assert curve["train"]["seconds"] == pytest.approx([record.seconds for record in run.train], rel=1e-5)
    assert curve["final"] == pytest.approx(run.evals[-1].loss, rel=1e-5)
    assert [(stage["text"], stage["step"]) for stage in curve["stages"]] == [("6 layers", 200), ("12 layers", 400)]
    assert curve["stages"][0]["seconds"] == pytest.approx(14.0)


def test_the_final_loss_is_rounded_once_as_in_the_table(make_run: MakeRun) -> None:
    run = make_run()
    run = replace(run, evals=(*run.evals[:-1], replace(run.evals[-1], loss=10.383500709533692)))
    (curve,) = curves([run])
    assert f"{curve['final']:.3f}" == "10.384"


def test_losses_that_are_no_numbers_become_gaps(make_run: MakeRun) -> None:
    run = make_run()
    broken = tuple(replace(record, loss=nan if record.step == 200 else inf) for record in run.evals)
    (curve,) = curves([replace(run, evals=broken)])
    assert curve["held"]["loss"] == [None] * 5
    render([replace(run, evals=broken)])


def test_axes_have_units_that_fit_the_longest_run(make_run: MakeRun) -> None:
    steps, flops, time = axes([make_run(upto=10), make_run()])
    assert (steps["key"], flops["key"], time["key"]) == ("step", "flops", "seconds")
    assert (flops["unit"], flops["size"]) == ("PFLOP", 1e15)
    assert (time["unit"], time["size"]) == ("seconds", 1.0)


def test_thinning_keeps_the_ends_and_the_extremes() -> None:
    values = [float(n % 7) for n in range(100_000)]
    values[41_234], values[77_777] = 1e6, -1e6
    kept = thin(values)
    assert len(kept) <= POINTS
    assert kept == sorted(set(kept))
    assert {0, 41_234, 77_777, 99_999} <= set(kept)


def test_thinning_leaves_short_lines_alone_and_bridges_no_long_gap() -> None:
    assert thin([3.0, 1.0, 2.0]) == [0, 1, 2]
    assert thin([]) == []
    values = [nan if 2_000 <= n < 6_000 else 1.0 for n in range(8_000)]
    assert any(2_000 <= n < 6_000 for n in thin(values, 100))


def test_a_page_of_long_runs_stays_small(make_run: MakeRun) -> None:
    long = make_run(sizes=(6, 8, 10, 12), steps=20_000, every=1, eval_every=2)
    assert len(render([long] * 10)) < 3_000_000


# Tables


def test_results_are_the_summary_and_name_unfinished_runs(make_run: MakeRun) -> None:
    sheet = sheets([make_run("a", sizes=(6, 12), upto=300), make_run("b")])["results"]
    assert sheet["headings"][:3] == ["run", "method", "schedule"]
    assert [line[:4] for line in texts(sheet)] == [["a", "raptr", "6-12", "300"], ["b", "full", "–", "400"]]
    relative, unfinished = sheet["notes"]
    assert re.search(r"relative to b\b", relative)
    assert re.search(r"^a .*last record is of step 300 of 400", unfinished)
    assert len(sheet["words"]) == len(sheet["headings"]) == len(sheet["lines"][0])


def test_stages_have_their_speed_and_a_bar(make_run: MakeRun) -> None:
    sheet = sheets([make_run("a", sizes=(6, 12))])["stages"]
    assert texts(sheet) == [
        ["a", "1", "6 layers", "14.3k", "70 ms", "200", "19"],
        ["a", "2", "12 layers", "7.69k", "130 ms", "200", "19"],
    ]
    assert [line[3]["bar"] for line in sheet["lines"]] == pytest.approx([1.0, 7 / 13])


def test_speed_ups_are_worded_and_reasons_shown_where_there_are_some(make_run: MakeRun) -> None:
    sheet = sheets([make_run("a", sizes=(6, 12))])["speedups"]
    assert texts(sheet) == [["a", OWN_STAGE, "1.30×", "1.30×", "100%"]]
    assert len(sheet["headings"]) == 5
    sheet = sheets([make_run("a", sizes=(6, 12), upto=100)])["speedups"]
    ((*cells, reason),) = texts(sheet)
    assert cells == ["a", OWN_STAGE, "–", "–", "–"]
    assert "full stage" in reason


def test_only_differing_settings_are_compared(make_run: MakeRun) -> None:
    shared = {"model": {"size": "base", "layers": None}, "data": {"length": 128}}
    found = sheets([make_run("a", sizes=(6, 12), config=shared), make_run("b", config=shared)])
    assert texts(found["differences"]) == [["method.name", "raptr", "full"], ["method.schedule", "6-12", "–"]]
    assert [cell if isinstance(cell, str) else cell["text"] for cell in found["differences"]["headings"]] == [
        "setting",
        "a",
        "b",
    ]
    assert ["data.length", "128", "128"] in texts(found["settings"])
    assert texts(found["environment"]) == [["python", "3.11", "3.11"]]
    assert sheets([make_run("a"), make_run("b")])["differences"]["lines"] == []


def test_settings_are_flat_text() -> None:
    nested = {"a": {"b": [1, -1], "c": None, "d": {"e": True}}, "f": 1e-6, "g": "x"}
    assert flat(nested) == {"a.b": "[1, -1]", "a.d.e": "true", "f": "1e-06", "g": "x"}


def test_runs_with_hardly_any_record_have_a_page(make_run: MakeRun) -> None:
    for run in (make_run(upto=0), make_run(upto=10, eval_every=1000), replace(make_run(upto=10), evals=())):
        found = json.loads(Elements(render([run])).data)
        assert len(found["sheets"]["results"]["lines"]) == 1
