"""What `method.name: auto` chooses, what is said about it, and that a run keeps its choice."""

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from raptr.comparison import compare
from raptr.data import TokenStore
from raptr.methods import METHODS, make_method
from raptr.subnetworks import Shape
from raptr.train import advice
from raptr.train.advice import Difference, Measured, Place, best, matching, named, plain_settings, scaled
from raptr.train.config import Config
from raptr.train.loop import pretrain
from raptr.train.run import RunFolder
from tests.commands import call

PLACE = Place("bert", "mlm", "bert", layers=12, width=256, heads=4, parts=4, tokens_per_weight=20.0)
DOUBLING = {"name": "progressive-stacking", "schedule": "3-6-12"}
GRADUAL = {"name": "stacking", "schedule": "6-8-10-12"}


def row(method: dict[str, Any], to_full: float, *, seeds: int = 3, longer: float = 1.0, **keys: Any) -> Measured:
    """A measurement whose full training with the same FLOPs is 0.1 above full training of all steps."""
    interval = None if seeds == 1 else 0.01
    both = [Difference(mean, interval, seeds) for mean in (to_full, to_full - 0.1)]
    return Measured(
        record="some",
        entry=method["name"],
        method=method,
        steps=round(1000 * longer),
        full_steps=1000,
        flops=0.75,
        loss=2.5,
        to_full=both[0],
        to_reduced=both[1],
        **{"place": PLACE, **keys},
    )


def plain(name: str, **settings: Any) -> dict[str, Any]:
    return plain_settings(make_method(name, shape=Shape(12, heads=4, parts=4), steps=1000, **settings))


def chosen(*rows: Measured, place: Place = PLACE) -> str | None:
    found = best(place, rows)
    return None if found is None else found.method["name"]


def test_the_lowest_loss_is_taken_and_full_training_where_nothing_pays() -> None:
    assert chosen(row(DOUBLING, -0.05), row(GRADUAL, 0.02)) == "progressive-stacking"
    assert chosen(row(DOUBLING, 0.05), row(GRADUAL, 0.02)) == "stacking"
    assert chosen(row(DOUBLING, 0.12), row(GRADUAL, 0.096)) is None  # the interval reaches full with the same FLOPs
    assert chosen() is None


def test_a_difference_in_words() -> None:
    said = [str(Difference(mean, interval, 3)) for mean, interval in ((-0.05, 0.01), (0.02, None), (0.0, 0.01))]
    assert said == ["0.050 ± 0.010 below", "0.020 above", "0.000 ± 0.010 above"]
    single = Difference(-0.05, None, 1)
    assert (single.low, single.high) == (-0.05, -0.05)


def test_three_seeds_come_before_one() -> None:
    assert chosen(row(DOUBLING, -0.05, seeds=1), row(GRADUAL, -0.02)) == "stacking"
    assert chosen(row(DOUBLING, 0.02, seeds=1), row(GRADUAL, 0.05)) == "stacking"
    assert chosen(row(DOUBLING, -0.05, seeds=2), row(GRADUAL, -0.02)) == "stacking"
    assert chosen(row(DOUBLING, -0.05, seeds=1), row(GRADUAL, -0.02, longer=1.3)) == "stacking"
    # one seed that is as good as full training comes before what is only better than full training with the same FLOPs
    assert chosen(row(DOUBLING, -0.05, seeds=1), row(GRADUAL, 0.02)) == "progressive-stacking"
    assert chosen(row(DOUBLING, -0.001, seeds=1), row(GRADUAL, -0.005)) == "progressive-stacking"


def test_as_good_in_the_same_steps_comes_before_better_in_more() -> None:
    assert chosen(row(DOUBLING, -0.07, longer=1.27), row(GRADUAL, -0.03)) == "stacking"
    assert chosen(row(DOUBLING, -0.07, longer=1.27), row(GRADUAL, 0.005)) == "progressive-stacking"


def test_each_method_is_judged_by_its_nearest_measurement() -> None:
    short = replace(PLACE, tokens_per_weight=3.5)
    rows = (row(DOUBLING, -0.3, place=short), row(DOUBLING, 0.08), row(GRADUAL, 0.02))
    assert chosen(*rows) == "stacking"
    assert chosen(*rows, place=short) == "progressive-stacking"
    far = replace(PLACE, tokens_per_weight=300.0)
    assert chosen(*rows, place=far) == "stacking"
    # 3.5 tokens per weight are out of reach of 20, and do not count beside what was measured there
    assert chosen(row(GRADUAL, -0.3, place=short), row(DOUBLING, 0.02)) == "progressive-stacking"
    # nor does what is farther count where nothing is within reach
    assert chosen(row(GRADUAL, -0.3, place=short), row(DOUBLING, 0.02), place=far) == "progressive-stacking"
    one, three = row(DOUBLING, 0.2, seeds=1), row(DOUBLING, 0.05)
    assert best(PLACE, [one, three]) is best(PLACE, [three, one]) is three  # at one place, the one of more seeds


def test_what_is_within_a_factor_of_four_is_compared() -> None:
    for tokens, expected in ((80.0, "stacking"), (5.0, "stacking"), (81.0, "progressive-stacking")):
        other = replace(PLACE, tokens_per_weight=tokens)
        assert PLACE.factor(other) == other.factor(PLACE)
        assert chosen(row(GRADUAL, -0.3, place=other), row(DOUBLING, -0.1, seeds=1)) == expected


def test_what_is_known_of_a_method_nearby_counts_for_all_its_schedules() -> None:
    shallow = replace(PLACE, layers=6)
    short_start = {**DOUBLING, "lengths": "equal", "average": 9.0}
    here = row({**short_start, "schedule": "2-3-6", "average": 4.5}, 0.02, place=shallow)
    rows = (
        row(short_start, -0.05),
        row(DOUBLING, -0.07, longer=1.27),
        row({**short_start, "average": 8.0}, -0.03),
        here,
    )
    assert best(shallow, rows) is here  # not a schedule that was measured with 12 layers only
    assert best(replace(PLACE, layers=7), rows) is here
    assert best(PLACE, rows) is rows[0]
    assert best(shallow, rows[:-1]) is rows[0]


def test_of_what_is_equally_well_known_the_nearest_is_taken() -> None:
    here, there = replace(PLACE, layers=6), replace(PLACE, layers=8)
    rows = (row(DOUBLING, -0.03, seeds=1, place=here, longer=1.3), row(GRADUAL, -0.09, seeds=1, place=there))
    assert chosen(*rows, place=here) == "progressive-stacking"
    assert chosen(*rows, place=there) == "stacking"


def test_the_same_objective_then_the_same_initial_weights_count_first() -> None:
    causal, fan_in = replace(PLACE, family="decoder", objective="causal"), replace(PLACE, init="fan-in")
    rows = (row(DOUBLING, -0.05), row(GRADUAL, 0.02, place=causal, seeds=1), row(DOUBLING, 0.11, place=fan_in))
    assert chosen(*rows) == "progressive-stacking"
    assert chosen(*rows, place=causal) == "stacking"
    assert chosen(*rows, place=fan_in) is None
    ul2 = replace(causal, objective="ul2")
    assert chosen(*rows, place=ul2) == "stacking"  # of the same family
    assert chosen(rows[1], row(DOUBLING, -0.05, place=ul2), place=causal) == "stacking"
    assert chosen(rows[0], place=causal) == "progressive-stacking"  # better than nothing


def test_a_few_steps_do_not_decide_between_places_as_near() -> None:
    longer, here = (replace(PLACE, layers=6, tokens_per_weight=length) for length in (40.3, 20.1))
    deep = row(DOUBLING, -0.05, place=replace(PLACE, tokens_per_weight=20.1))
    shallow = row({**DOUBLING, "schedule": "2-3-6"}, -0.005, place=longer, seeds=5)
    wider = row(plain("msg", parts="1-2-4"), 0.012, place=here)
    for length in (19.7, 20.0, 20.1, 20.5):
        between = replace(here, tokens_per_weight=length)
        assert best(between, [deep, shallow]) == shallow  # of more seeds
        assert best(between, [deep, shallow, wider]) == wider


def test_schedules_adapt_to_the_depth() -> None:
    measured = row({**DOUBLING, "lengths": "equal", "average": 9.0}, -0.05)
    sizes = {6: "2-3-6", 8: "2-4-8", 10: "3-5-10", 12: "3-6-12", 24: "6-12-24", 2: "1-1-2", 1: "1-1-1"}
    for layers, schedule in sizes.items():
        settings = measured.settings(replace(PLACE, layers=layers), 1000)
        average = max(0.75 * layers, 1)
        assert settings == {**DOUBLING, "schedule": schedule, "lengths": "equal", "average": average}
        make_method(**settings, shape=Shape(layers), steps=1000)  # is not refused
    started = row({"name": "raptr", "schedule": "6-8-10-12", "full_start": 50}, -0.05)
    assert started.settings(replace(PLACE, layers=2), 3000) == {
        "name": "raptr",
        "schedule": "2-2-2-2",
        "full_start": 150,
    }
    for layers, schedule in ((3, "2-2-3"), (2, "2-2-2"), (1, "1-1-1")):
        assert scaled({"name": "raptr", "schedule": "3-6-12"}, layers / 12, 1.0) == {
            "name": "raptr",
            "schedule": schedule,
        }
    pairs = row({"name": "raptr", "schedule": "6-12", "groups": 6}, -0.05)
    assert pairs.settings(PLACE, 1000) == pairs.method
    assert pairs.settings(replace(PLACE, layers=24), 1000) is None
    assert best(replace(PLACE, layers=24), [pairs]) is None
    assert matching(replace(PLACE, layers=24), pairs.method, 10, [pairs]) is None


def test_schedules_adapt_to_the_heads_and_mlp_parts() -> None:
    wider = plain("msg", heads="2-3-4", parts="1-2-4")
    assert wider == {"name": "msg", "heads": "2-3-4", "parts": "1-2-4"}  # all layers, as without a schedule
    measured = row(wider, -0.05)
    assert measured.settings(replace(PLACE, layers=24, heads=12, parts=8), 1000) == {
        "name": "msg",
        "heads": "6-9-12",
        "parts": "2-4-8",
    }
    assert measured.settings(replace(PLACE, heads=3), 1000) == {**wider, "heads": "2-2-3"}
    for fewer in (replace(PLACE, heads=2), replace(PLACE, parts=1)):  # than the stages have sizes
        assert measured.settings(fewer, 1000) is None
        assert best(fewer, [measured]) is None
    assert scaled({"name": "raptr", "parts": "3-3-4"}, 1.0, 1.0, {"parts": 2}) is None  # 2-2-2 would leave out nothing
    assert named(wider) == "msg heads=2-3-4 mlp=1-2-4"
    timed = plain("raptr", heads="1-2-4", average=12)
    assert timed == {"name": "raptr", "schedule": "12-12-12", "heads": "1-2-4", "average": 12.0}
    assert named(timed).startswith("raptr depth=12-12-12 heads=1-2-4")
    deep = plain("msg", schedule="3-6-12", parts="1-2-4", mask_steps=7)
    assert deep == {"name": "msg", "schedule": "3-6-12", "parts": "1-2-4", "mask_steps": 7}
    assert named(deep) == "msg depth=3-6-12 mlp=1-2-4 (mask_steps 7)"


def test_a_method_is_recognised_by_what_differs_from_its_defaults() -> None:
    assert plain("raptr") == plain("raptr", lengths="equal") == {"name": "raptr", "schedule": "6-8-10-12"}
    assert plain("raptr", scaling="sqrt", fixed=[1, -1]) == {
        "name": "raptr",
        "schedule": "6-8-10-12",
        "scaling": "sqrt",
    }
    assert plain("stacking", average=9.5) == {**GRADUAL, "average": 9.5}
    assert plain("g-stack") == {"name": "g-stack", "schedule": "3-12", "growth_at": 0.333}
    assert plain("g-stack", lengths="equal") == {"name": "g-stack", "schedule": "3-12", "lengths": "equal"}
    assert plain("stacking", lengths="proportional") == {**GRADUAL, "lengths": "proportional"}
    assert plain("stacking", lengths="equal", average=9.0) == {**GRADUAL, "lengths": "equal", "average": 9.0}
    rows = [row(DOUBLING, -0.05), row({"name": "g-stack", "schedule": "3-12", "growth_at": 0.3333}, 0.02)]
    deeper = replace(PLACE, layers=24)
    assert matching(deeper, {**DOUBLING, "schedule": "6-12-24"}, 10, rows) == rows[0]
    assert matching(deeper, DOUBLING, 10, rows) is None
    assert matching(PLACE, {"name": "g-stack", "schedule": "3-12", "growth_at": 1 / 3}, 10, rows) == rows[1]
    assert matching(replace(PLACE, width=600), DOUBLING, 10, rows) is None
    beside = row(DOUBLING, -0.04, place=replace(PLACE, width=300))
    assert matching(PLACE, DOUBLING, 10, [beside, *rows]) == rows[0]
    assert matching(beside.place, DOUBLING, 10, [*rows, beside]) == beside
    assert named({**rows[1].method, "growth_at": 1 / 3, "moments": "zero"}) == (
        "g-stack 3-12 (growth_at 0.333333, moments zero)"
    )


def test_a_setting_that_is_on_is_named_alone() -> None:
    assert named({"name": "raptr", "schedule": "6-12", "hold": 3, "mirrored": True}) == "raptr 6-12 (hold 3, mirrored)"


def test_a_schedule_that_starts_with_one_layer_has_a_name() -> None:
    shallow = {**DOUBLING, "schedule": "1-2-4", "lengths": "equal", "average": 3.0}
    assert named(shallow) == "progressive-stacking 1-2-4 (stages of 20, 20 and 60%)"


MEASURED = ["--size", "mini", "--batch", "512", "--length", "64"]  # as the long runs, at 5,800 steps


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert call(monkeypatch, "plan", *options, "--json") == 0
    return " ".join(json.loads(capsys.readouterr().out)["advice"])


def test_plan_says_what_auto_rests_on_and_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (row(DOUBLING, -0.05, longer=1.25), row(GRADUAL, 0.02))
    monkeypatch.setattr(advice, "table", lambda: rows)
    near = said(monkeypatch, capsys, "--method", "auto", *MEASURED, "--steps", "5000")
    for word in (
        "progressive-stacking 3-6-12",
        "12 layers of width 256",
        "20 tokens",
        "0.050 ± 0.010 below",
        "3 seeds",
    ):
        assert word in near
    assert "0.63" in near  # of the FLOPs
    assert "--steps 6250" in near
    assert "your run has" not in near
    far = said(monkeypatch, capsys, "--method", "auto", "--size", "large", "--steps", "5000")
    assert "progressive-stacking 6-12-24" in far
    assert "your run has 24 layers of width 1024 and 0.54 tokens per weight, so the choice is a guess." in far
    init = ["--set", "model.init=fan-in"]
    assert "model.init bert" in said(monkeypatch, capsys, "--method", "auto", *MEASURED, *init, "--steps", "5000")
    kind = said(monkeypatch, capsys, "--method", "auto", "--family", "decoder", "--size", "mini", "--steps", "5000")
    assert "decoder with causal" in kind


@pytest.mark.parametrize(
    ("optimizer", "chosen"), [("adamw", "msg mlp=1-2-4"), ("muon", "stacking"), ("adafactor", "stacking")]
)
def test_auto_leaves_out_what_an_optimizer_cannot_train(
    optimizer: str, chosen: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (row(plain("msg", parts="1-2-4"), -0.05), row(GRADUAL, -0.02))
    monkeypatch.setattr(advice, "table", lambda: rows)
    given = "--set", f"optimizer.name={optimizer}"
    assert f"auto chose {chosen}" in said(monkeypatch, capsys, "--method", "auto", *MEASURED, "--steps", "5000", *given)


def test_auto_says_where_only_reduced_training_is_beaten_or_nothing_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--method", "auto", *MEASURED, "--steps", "5800"]
    monkeypatch.setattr(advice, "table", lambda: (row(GRADUAL, 0.03, seeds=1),))
    some = said(monkeypatch, capsys, *asked)
    for word in ("stacking 6-8-10-12", "0.030 above", "0.070 below", "one seed, preliminary"):
        assert word in some
    monkeypatch.setattr(advice, "table", lambda: (row(GRADUAL, 0.2),))
    none = said(monkeypatch, capsys, *asked)
    assert "auto chose full" in none
    assert str(PLACE) in none


def test_another_choice_gets_a_note_where_it_was_measured_to_be_worse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (row(DOUBLING, -0.05), row(GRADUAL, 0.02))
    monkeypatch.setattr(advice, "table", lambda: rows)
    near = [*MEASURED, "--steps", "5800"]
    for method, word in (("full", "0.050 ± 0.010 below"), ("stacking", "0.080 ± 0.010 below")):
        note = said(monkeypatch, capsys, "--method", method, *near)
        assert "progressive-stacking" in note
        assert word in note
    for method in ("progressive-stacking", "pld"):  # the best, and one that was not measured
        assert said(monkeypatch, capsys, "--method", method, *near) == ""
    assert said(monkeypatch, capsys, "--method", "stacking", *near[2:], "--size", "base") == ""  # far from all
    rows = (row(DOUBLING, 0.01), row(GRADUAL, 0.02))
    assert said(monkeypatch, capsys, "--method", "stacking", *near) == ""  # intervals overlap
    assert said(monkeypatch, capsys, "--method", "full", *near) == ""


def config(store: TokenStore, method: dict[str, Any], **model: Any) -> Config:
    return Config.read(
        {
            "model": {"size": "tiny", "layers": 4, "width": 16, "heads": 4, "head_size": 4, "mlp": 16, **model},
            "method": method,
            "data": {"source": str(store.path), "length": 24},
            "optimizer": {"peak": 0.01},
            "train": {"steps": 6, "batch": 4, "eval_samples": 4, "device": "cpu", "checkpoint_every": 2},
        }
    )


def test_a_run_holds_the_choice_and_keeps_it(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto, run = config(store, {"name": "auto"}), tmp_path / "run"
    monkeypatch.setattr(advice, "table", lambda: (row(DOUBLING, -0.05),))
    spoken = StringIO()
    pretrain(auto, run, until=3, console=Console(file=spoken, width=400))
    assert "auto chose progressive-stacking 1-2-4" in spoken.getvalue()
    begun = yaml.safe_load((run / "config.yaml").read_text())["method"]
    assert (begun["name"], begun["schedule"]) == ("progressive-stacking", "1-2-4")
    monkeypatch.setattr(advice, "table", lambda: (row(GRADUAL, -0.05),))  # a later version knows something better
    spoken = StringIO()
    assert pretrain(auto, run, console=Console(file=spoken, width=400)).step == 6
    assert "began with progressive-stacking 1-2-4" in spoken.getvalue()
    assert RunFolder(run).read().method["schedule"] == "1-2-4"
    assert yaml.safe_load((run / "config.yaml").read_text())["method"] == begun
    pretrain(auto, run, console=Console(file=spoken, width=400), fresh=True)
    assert "chose stacking 2-3-3-4" in spoken.getvalue()
    assert RunFolder(run).read().method["name"] == "stacking"


def test_a_comparison_names_its_methods_and_gets_no_advice(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken, full = {"pretrain": StringIO(), "compare": StringIO()}, config(store, {"name": "full"})
    here = advice.place_of(full)
    monkeypatch.setattr(advice, "table", lambda: (row(DOUBLING, -0.05, place=here),))
    pretrain(full, tmp_path / "run", console=Console(file=spoken["pretrain"], width=400))
    settings = {key: value for key, value in full.mapping().items() if key not in ("method", "objective")}
    settings["train"] = {key: value for key, value in settings["train"].items() if key != "seed"}
    asked = {"settings": settings, "entries": {"full": {"name": "full"}}}
    compare(asked, tmp_path / "compared", console=Console(file=spoken["compare"], width=400))
    assert {kind: "Note: " in text.getvalue() for kind, text in spoken.items()} == {"pretrain": True, "compare": False}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["6-8-10-12"], None),
        (["6-8-10-12", "--steps", "5801"], None),  # stages and decay are rounded to steps
        (["6-8-10-12", "--steps", "50"], None),
        (["6-9-12"], None),
        (["--method", "pld"], None),  # no stage is the last one
        (["--method", "full"], None),
        (["3-6-12", "--method", "progressive-stacking", "--average", "5"], "from step 750 on, .* at step 933"),
        (["6-8-10-12", "--full-start", "100"], "from step 750 on, .* at step 850.*optimizer.decay=0.15"),
        (["6-8-10-12", "--full-start", "100", "--set", "optimizer.decay=0.15"], None),
    ],
)
def test_a_decay_that_begins_before_the_last_stage_is_named(
    options: list[str], said: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [] if "--steps" in options else ["--steps", "1000"]
    assert call(monkeypatch, "plan", *options, *steps, "--set", "optimizer.warmup=10") == 0
    shown = capsys.readouterr().out
    assert ("Note: the learning rate falls" in shown) == (said is not None)
    assert re.search(said or "", shown)


def test_a_model_that_cannot_be_exported_is_named_before_it_is_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = ["--set", "model.width=384"]
    for sizes, said in ((narrow, True), ([*narrow, "--set", "model.head_size=32"], False)):
        assert call(monkeypatch, "plan", *sizes) == 0
        assert ("Note: model.head_size is 64 with 12 heads" in capsys.readouterr().out) == said


def test_auto_needs_no_settings_and_a_new_model(store: TokenStore) -> None:
    with pytest.raises(ValueError, match=r"method\.name is 'stackin'.*'stacking'.*auto"):
        config(store, {"name": "stackin"})
    with pytest.raises(ValueError, match=r"auto.*method\.schedule"):
        config(store, {"name": "auto", "schedule": "2-4"})
    assert config(store, {"name": "auto", "schedule": None}).mapping()["method"]["name"] in METHODS
    with pytest.raises(ValueError, match=r"auto.*model\.start"):
        replace(config(store, {"name": "auto"}), model=replace(config(store, {"name": "full"}).model, start="folder"))


def test_auto_in_a_file_is_decided_before_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(advice, "table", lambda: (row(DOUBLING, -0.05),))
    file = tmp_path / "run.yaml"
    file.write_text("method: {name: auto}")
    assert call(monkeypatch, "pretrain", "--config", str(file), "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "name: progressive-stacking" in shown
    assert "schedule: 2-3-6" in shown
    assert "name: auto" not in shown
    assert "auto chose progressive-stacking 2-3-6" in shown
    file.write_text("method: {name: auto, schedule: 3-6}")
    assert call(monkeypatch, "pretrain", "--config", str(file), "--dry-run") == 2
    assert "method.schedule" in capsys.readouterr().err


def test_pretrain_says_what_auto_chose(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    tiny = ["layers=4", "width=16", "heads=4", "head_size=4", "mlp=16"]
    sets = [part for setting in tiny for part in ("--set", f"model.{setting}")]
    options = ["--method", "auto", "--data", str(store.path), "--length", "24", "--steps", "6", "--batch", "4"]
    options += ["--set", "optimizer.warmup=1", "--set", "train.eval_samples=4", "--device", "cpu", *sets]
    arguments = ["pretrain", *options, "--run", str(tmp_path / "run"), "--until"]
    for until, word in (("1", "auto chose"), ("2", "began with")):
        assert call(monkeypatch, *arguments, until) == 0
        assert word in capsys.readouterr().err
