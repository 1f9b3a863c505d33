"""The page in a real browser: what it draws, and what happens when a reader acts on it.

A test puts a script of its own at the end of a copy of the page. The script acts, and writes what it sees as JSON
into the document, which the browser prints.
"""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from raptr.report.page import render
from raptr.report.runs import Run

MakeRun = Callable[..., Run]
See = Callable[..., dict[str, Any]]

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="the page is looked at in chromium, which is not installed")

WATCH = """<script>
window.faults = [];
addEventListener("error", (event) => faults.push(String(event.message ?? event.target)), true);
addEventListener("securitypolicyviolation", (event) => faults.push(event.blockedURI));
Element.prototype.setPointerCapture = () => {}; // refuses pointers that no hand moves
</script>"""
HELPERS = """
const all = (selector) => [...document.querySelectorAll(selector)];
const one = (selector) => document.querySelector(selector);
const count = (selector) => all(selector).length;
const text = (selector) => one(selector).textContent;
const svg = one("#plot > svg");
const ticks = () => all(".axes .tick + text").map((tick) => tick.textContent);
const key = (name, more = {}) => svg.dispatchEvent(new KeyboardEvent("keydown", { key: name, ...more }));
const hand = (type, share, pointerType = "mouse") => {
  const { left, top, width, height } = svg.getBoundingClientRect();
  const place = { clientX: left + share * width, clientY: top + height / 2 };
  svg.dispatchEvent(new PointerEvent(type, { ...place, button: 0, pointerType }));
};
const background = () => getComputedStyle(document.body).backgroundColor;
"""


def browse(page: Path, *options: str) -> str:
    """The document as the browser has it after running the page."""
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}"]
    command += ["--window-size=1200,1000", "--virtual-time-budget=2000", *options, "--dump-dom", page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, timeout=120, encoding="utf-8").stdout


@pytest.fixture
def see(tmp_path: Path) -> See:
    """Open the page of some runs, run a script there, and return what it saw."""

    def look(runs: Sequence[Run], script: str, *options: str) -> dict[str, Any]:
        act = f"<script>{{{HELPERS}\nconst seen = {{}};\n{script}\nconst out = document.createElement('output');\n"
        act += "out.textContent = JSON.stringify({ ...seen, faults }); document.body.append(out); }</script>"
        page = render(runs).replace("<head>", f"<head>{WATCH}").replace("</body>", f"{act}</body>")
        (tmp_path / "page.html").write_text(page, encoding="utf-8")
        written = re.search(r"<output>(.*?)</output>", browse(tmp_path / "page.html", *options), flags=re.DOTALL)
        assert written is not None, "the script did not come to its end"
        seen: dict[str, Any] = json.loads(html.unescape(written[1]))
        assert seen["faults"] == []
        return seen

    return look


def test_every_run_is_drawn_and_every_table_filled(make_run: MakeRun, see: See) -> None:
    runs = [make_run("staged", sizes=(6, 8, 10, 12)), make_run("full"), make_run("unfinished", sizes=(6, 12), upto=250)]
    runs[1] = replace(runs[1], scores={"SST-2": {"score": 0.87, "interval": 0.02, "constant": 0.51}})
    seen = see(
        runs,
        """
        seen.scores = text("[data-sheet=scores] tbody");
        seen.lines = ["held", "train", "stage", "dot"].map((kind) => count(`.area .${kind}`));
        seen.tables = all("[data-sheet]").map((place) => place.querySelectorAll("tbody tr").length);
        seen.title = document.title;
        seen.legend = all("#legend button").map((entry) => entry.textContent);
        seen.colours = new Set(all(".area .held").map((line) => getComputedStyle(line).stroke)).size;
        seen.height = svg.getBoundingClientRect().height;
        """,
    )
    assert seen["lines"] == [3, 3, 4, 5 + 5 + 3]
    assert seen["tables"] == [3, 1, 7, 4, 2, 4, 1]
    assert seen["scores"] == "full87.0 ± 2.087.0"  # the task and the average
    assert seen["title"] == "staged, full, unfinished – raptr report"
    assert seen["legend"] == [f"{run.name} {run.evals[-1].loss:.3f}" for run in runs]
    assert seen["colours"] == 3
    assert seen["height"] > 250


def test_the_axis_can_be_steps_flops_and_time_and_logarithmic(make_run: MakeRun, see: See) -> None:
    seen = see(
        [make_run(sizes=(6, 12)), make_run("b")],
        """
        seen.axes = all("#axis input").map((choice) => { choice.click(); return [text(".axes .name"), ticks()]; });
        one("#axis input").click();
        one("#log").click();
        seen.log = ticks();
        seen.sizes = all(".size").map((size) => size.textContent);
        """,
    )
    labels, values = zip(*seen["axes"], strict=True)
    assert labels == (
        "steps",
        "training compute of the whole model (PFLOP)",
        "training time without evaluation (seconds)",
    )
    assert values[0] == ["0", "50", "100", "150", "200", "250", "300", "350", "400"]
    assert values[1] == ["0", "1", "2", "3", "4", "5"]
    assert seen["log"][:3] == ["10", "20", "50"]
    assert "12 layers" in seen["sizes"]


def test_a_drag_zooms_and_everything_can_be_reset(make_run: MakeRun, see: See) -> None:
    seen = see(
        [make_run(sizes=(6, 12))],
        """
        const reset = one("#reset");
        seen.before = [ticks(), reset.disabled];
        const zoom = () => { hand("pointerdown", 0.5); hand("pointermove", 0.7); hand("pointerup", 0.7); };
        zoom();
        seen.zoomed = [ticks(), reset.disabled];
        reset.click();
        seen.after = [ticks(), reset.disabled];
        zoom();
        svg.dispatchEvent(new MouseEvent("dblclick"));
        seen.double = [ticks(), reset.disabled];
        hand("pointerdown", 0.5); hand("pointerup", 0.502);
        seen.click = [ticks(), reset.disabled];
        """,
    )
    assert seen["before"] == seen["after"] == seen["double"] == seen["click"]
    assert seen["before"][1] is True
    assert seen["zoomed"][1] is False
    first, last = (int(seen["zoomed"][0][place]) for place in (0, -1))
    assert 170 < first < last < 300


def test_the_losses_under_the_pointer_are_read_out(make_run: MakeRun, see: See) -> None:
    runs = [make_run("a", sizes=(6, 12)), make_run("b", upto=100)]
    seen = see(
        runs,
        """
        const readout = one(".readout");
        seen.before = readout.hidden;
        hand("pointermove", 0.98);
        seen.rows = all(".readout tr").map((row) => [...row.children].map((entry) => entry.textContent));
        seen.marks = count(".marks .mark");
        hand("pointerleave", 0.98);
        seen.after = readout.hidden;
        for (const type of ["pointerdown", "pointerup", "pointerleave"]) hand(type, 0.5, "touch");
        seen.tapped = readout.hidden;
        """,
    )
    assert (seen["before"], seen["after"], seen["tapped"], seen["marks"]) == (True, True, False, 2)
    heading, first, second = seen["rows"]
    assert re.fullmatch(r"step 39\d|step 400", heading[0])
    assert heading[1:] == ["held-out", "", "train"]
    assert first[:3] == ["a", f"{runs[0].evals[-1].loss:.3f}", "at 400"]
    assert second[:3] == ["b", f"{runs[1].evals[-1].loss:.3f}", "at 100"]


def test_everything_is_done_with_the_keyboard_too(make_run: MakeRun, see: See) -> None:
    seen = see(
        [make_run(sizes=(6, 12))],
        """
        const readout = () => text(".readout th");
        svg.focus();
        seen.focused = document.activeElement === svg;
        const walk = (direction) => { key(`Arrow${direction}`); return readout(); };
        seen.walked = ["Right", "Right", "Right", "Left"].map(walk);
        seen.ends = [ticks().at(0), ticks().at(-1)];
        key("+"); key("+");
        seen.near = [ticks().at(0), ticks().at(-1)];
        key("ArrowRight", { shiftKey: true });
        seen.moved = [ticks().at(0), ticks().at(-1)];
        for (let n = 0; n < 20; n++) key("ArrowRight", { shiftKey: true });
        seen.edge = [ticks().at(-1), one("#reset").disabled];
        key("-"); key("-"); key("-");
        seen.back = [ticks().at(0), ticks().at(-1)];
        key("+"); key("0");
        seen.reset = [ticks().at(0), ticks().at(-1)];
        seen.buttons = all("button, input, summary, .scroll").every((element) => element.tabIndex === 0);
        """,
    )
    assert seen["focused"]
    assert seen["buttons"]
    assert seen["walked"] == ["step 0", "step 100", "step 200", "step 100"]
    assert seen["ends"] == seen["back"] == seen["reset"] == ["0", "400"]
    low, high = map(int, seen["near"])
    assert 0 < low < 100 < high < 200
    assert int(seen["moved"][0]) > low
    assert seen["edge"] == ["400", False]


def test_the_legend_hides_shows_and_points_out_runs(make_run: MakeRun, see: See) -> None:
    seen = see(
        [make_run("a", sizes=(6, 12)), make_run("b", sizes=(9, 12))],
        """
        const [first, second] = all("#legend button");
        const state = () => [count(".area .held"), count(".size"), first.getAttribute("aria-pressed")];
        seen.both = state();
        first.click();
        seen.one = state();
        second.click();
        seen.none = state();
        first.click(); second.click();
        seen.again = state();
        first.dispatchEvent(new PointerEvent("pointerenter"));
        seen.faint = count(".area .held.faint");
        first.dispatchEvent(new PointerEvent("pointerleave"));
        seen.clear = count(".area .faint");
        """,
    )
    assert seen["both"] == seen["again"] == [2, 0, "true"]
    assert seen["one"] == [1, 2, "false"]  # a staged run that is alone has its sizes written above
    assert seen["none"] == [0, 0, "false"]
    assert (seen["faint"], seen["clear"]) == (1, 0)


@pytest.mark.parametrize(("scheme", "dark"), [(0, True), (1, False)])
def test_the_page_follows_the_system_and_its_own_switch(make_run: MakeRun, see: See, scheme: int, dark: bool) -> None:
    script = """
        const look = () => [background(), text("#theme")];
        seen.looks = [look()];
        for (let n = 0; n < 2; n++) { one("#theme").click(); seen.looks.push(look()); }
        """
    seen = see([make_run()], script, f"--blink-settings=preferredColorScheme={scheme}")
    light, night = ["rgb(255, 255, 255)", "Dark"], ["rgb(21, 24, 28)", "Light"]
    assert seen["looks"] == ([night, light, night] if dark else [light, night, light])


def test_a_hostile_name_is_shown_as_it_is(make_run: MakeRun, see: See) -> None:
    name = """</script><img src=x onerror="faults.push(1)"> & 'b' &amp; ${1}"""
    runs = [replace(make_run(name, sizes=(6, 12)), config={"method": {"name": name}}), make_run()]
    seen = see(
        runs,
        """
        hand("pointermove", 0.5);
        seen.images = count("img");
        seen.names = [text("#names"), text("#legend b"), text("tbody th"), text(".readout span"), text("tbody td")];
        """,
    )
    assert seen["images"] == 0
    assert seen["names"] == [f"{name}, a", *[name] * 4]


def test_runs_with_hardly_anything_to_draw_are_drawn(make_run: MakeRun, see: See) -> None:
    full = make_run()
    broken = tuple(replace(record, loss=nan) for record in full.evals)
    script = "seen.lines = [count('.area .held'), count('.area .train'), ticks().length];"
    script += "key('ArrowRight'); hand('pointermove', 0.4);"
    script += "all('#axis input').forEach((choice) => { choice.click(); one('#log').click(); key('+'); });"
    assert see([make_run(upto=0)], script)["lines"][0] == 1
    assert see([make_run(upto=10, eval_every=1000)], script)["lines"][1] == 1
    assert see([replace(full, train=(), evals=broken)], script)["lines"][2] > 1
    assert see([make_run(upto=10), full, make_run(upto=0)], script)["lines"][1] == 2


def test_a_phone_shows_the_page_without_sideways_scrolling(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a-long-name-without-a-place-to-break-it-" * 3, sizes=(6, 8, 10, 12)), make_run("b")]
    # A window cannot be as narrow as a phone, a frame can.
    measure = "this.contentWindow.document.querySelectorAll('details').forEach((part) => { part.open = true; });"
    measure += "const root = this.contentDocument.documentElement;"
    measure += "document.body.dataset.widths = [root.clientWidth, root.scrollWidth,"
    measure += "this.contentDocument.querySelector('#plot > svg').getBoundingClientRect().width]"
    page = f'<iframe style="width:390px;height:800px;border:0" srcdoc="{html.escape(render(runs))}" onload="{measure}">'
    (tmp_path / "phone.html").write_text(f"<!doctype html><body>{page}</iframe>", encoding="utf-8")
    widths = re.search(r'data-widths="([\d.,]+)"', browse(tmp_path / "phone.html", "--hide-scrollbars"))
    assert widths is not None
    visible, needed, plot = map(float, widths[1].split(","))
    assert visible == needed == 390
    assert 300 < plot <= 390


def test_the_results_fit_a_window_of_1300_pixels_or_show_that_there_is_more(make_run: MakeRun, see: See) -> None:
    names = ("raptr-6-8-10-12-seed-0", "full-training-seed-0", "gradual-stacking-seed-0")
    plain = [make_run(name, sizes=sizes) for name, sizes in zip(names, [(6, 8, 10, 12), (12,), (3, 12)], strict=True)]
    domains = dict.fromkeys(("wikipedia", "books", "web", "arxiv", "code"), 3.0)
    many = {f"domain-{number}": 3.0 for number in range(20)}
    script = "const box = one('[data-sheet=results] .scroll'); seen.wide = box.scrollWidth > box.clientWidth;"
    script += "seen.clipped = document.documentElement.scrollWidth > document.documentElement.clientWidth;"
    # The shadow at the edge stays where it is, the paper over it moves with the table.
    script += "seen.shadow = getComputedStyle(box).backgroundAttachment;"
    for judged, wide in ((domains, False), (many, True)):
        runs = [replace(run, evals=tuple(replace(e, domains=judged) for e in run.evals)) for run in plain]
        seen = see(runs, script, "--window-size=1300,1000")
        assert seen["wide"] == wide
        assert not seen["clipped"]
        assert seen["shadow"] == "local, scroll"
