"""What the README and the guide show is run here as it stands there."""

import json
import re
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from raptr.cli import main
from raptr.comparison import read_comparison
from raptr.comparison.record import read_rows
from raptr.comparison.table import Row, finals
from raptr.methods import make_method
from raptr.subnetworks import Shape

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
TASKS = ("MNLI", "QNLI", "SST-2", "Avg.")
PROGRAMS = [p for p in re.findall(r"```python\n(.*?)```", README + GUIDE, flags=re.DOTALL) if "from raptr" in p]


def test_the_llama_loop_learns(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PROGRAMS[0], "README.md", "exec"), {})
    loss = float(capsys.readouterr().out.removeprefix("loss "))
    assert loss < 2.5  # ln 256 = 5.5 at the start


def test_the_callback_saves_a_quarter() -> None:
    shown = re.search(r"^callbacks = \[SubnetworkCallback\((.*)\)\]$", README, flags=re.MULTILINE)
    assert shown is not None
    name, settings = eval(f"(lambda name, **settings: (name, settings))({shown[1]})")
    method = make_method(name, shape=Shape(12), steps=5800, **settings)
    assert method.name == "progressive-stacking"
    sizes = [method.subnetwork(step).size for step in range(method.steps)]
    assert sum(sizes) / len(sizes) == pytest.approx(9, abs=0.01)
    assert sorted(set(sizes)) == [3, 6, 12]


def test_the_bert_example_names_the_idle_layers(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PROGRAMS[1], "README.md", "exec"), {})
    assert re.fullmatch(r"layers \[\d, \d, \d\] did not run\n", capsys.readouterr().out)


def test_the_example_with_heads_and_parts_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PROGRAMS[2], "guide.md", "exec"), {})
    # 4 layers with half of the heads and a quarter of the MLP.
    assert re.fullmatch(r"Shape\(layers=6, heads=4, parts=4\): 1\.\d of 6 layers.*\n", capsys.readouterr().out)


def test_the_plan_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.search(r"```\n\$ (raptr plan .*?)\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert shown is not None
    monkeypatch.setattr(sys, "argv", shown[1].split())
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr().out
    assert [line.strip() for line in shown[2].splitlines() if "│" in line] == [
        line.strip() for line in printed.splitlines() if "│" in line
    ]


def test_the_comparison_is_one() -> None:
    shown = re.search(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert shown is not None
    asked = read_comparison(yaml.safe_load(shown[1]))
    assert [entry.label for entry in asked.entries] == ["full", "full (reduced)", "raptr", "raptr, zeros", "pld"]
    assert asked.count == 3 * (3 + 3 + 3 + 1 + 3)


def test_the_closed_form_on_the_card_of_full_is_what_torch_counts(capsys: pytest.CaptureFixture[str]) -> None:
    card = (ROOT / "docs" / "methods" / "full.md").read_text(encoding="utf-8")
    shown = re.search(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert shown is not None
    exec(compile(textwrap.dedent(shown[1]), "full.md", "exec"), {})
    counted, promised = capsys.readouterr().out.split()
    assert counted == promised
    assert f"{int(counted):,} FLOPs" in card


PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md")) + sorted(ROOT.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)  # code has no links
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        path, _, section = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if section:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert section in [heading.lower().replace(" ", "-") for heading in headings], link


def final(name: str) -> dict[str, Row]:
    record = json.loads((ROOT / f"docs/results/evidence/{name}.json").read_text(encoding="utf-8"))
    return {row.label: row for row in finals(read_rows(record))}


def test_the_readme_says_what_the_decoders_gave() -> None:
    causal, ul2 = final("causal-12x256"), final("ul2-12x256")
    alone, missing = ul2["raptr, sqrt"].to_full, causal["full (reduced)"].to_full
    ahead = causal["progressive stacking, 20-20-60%"].to_reduced
    assert alone is not None
    assert missing is not None
    assert ahead is not None
    assert f"without that the difference was {alone.mean:+.3f}" in README
    assert -ahead.mean / missing.mean == pytest.approx(0.5, abs=0.05)  # "made up for half"
    methods = [row for rows in (causal, ul2) for label, row in rows.items() if label != "full (reduced)"]
    fewer = [row.steps / 5800 for row in methods if row.steps < 5800]
    assert f"{min(fewer):.2f} to {max(fewer):.2f} times those of full training" in README


def test_the_readme_says_how_accurate_the_scores_are() -> None:
    rows = final("glue-12x256")
    errors = [{f"{100 * (row.scores[task].interval or 0):.1f}" for row in rows.values()} for task in TASKS]
    (mnli,), (qnli,), (sst2,), (average,) = errors
    assert mnli == qnli
    assert f"± {mnli} for MNLI and QNLI, ± {sst2} for SST-2 and ± {average} for the average" in README
    for label, said in {
        "progressive stacking, 20-20-60%": "{} points below",
        "stacking": "gradual stacking {};",
    }.items():
        below = rows["full (reduced)"].scores["QNLI"].mean - rows[label].scores["QNLI"].mean
        assert said.format(f"{100 * below:.1f}") in README
    runs = json.loads((ROOT / "docs/results/evidence/glue-12x256.json").read_text(encoding="utf-8"))["runs"]
    edges = [score["edge"] for run in runs for score in run["scores"].values()]
    assert f"{sum(edges)} of {len(edges)} scores" in README


def test_the_command_for_the_advised_method_spends_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.search(r"^raptr pretrain .*--method auto.*$", README, flags=re.MULTILINE)
    assert shown is not None
    spent = []
    for command in (shown[0], "raptr pretrain bert-mini --data data/mine --method full"):
        monkeypatch.setattr(sys, "argv", [*command.replace("data/mine", "builtin").split(), "--dry-run"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        total = re.search(r"([\d.e+]+) in all", capsys.readouterr().out)
        assert total is not None
        spent.append(float(total[1]))
    assert spent[0] / spent[1] == pytest.approx(0.758, abs=0.003)
