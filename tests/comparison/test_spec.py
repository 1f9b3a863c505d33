"""A comparison as written: every budget solved, every mistake named, before anything runs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from raptr.comparison.spec import FULL, REDUCED, Comparison, affordable, cost, read_comparison, read_file
from raptr.methods import METHODS

STEPS = 400
EVERY_METHOD = {name: {"name": name} for name in METHODS}


def given(**keys: Any) -> dict[str, Any]:
    return {
        "settings": {
            "model": {"size": "tiny"},
            "data": {"vocabulary": 2048, "length": 64},
            "optimizer": {"warmup": 20, "decay": 100},
            "train": {"steps": STEPS, "batch": 16},
        },
        "entries": {"raptr": {"name": "raptr", "schedule": "3-4-5-6"}},
        **keys,
    }


def steps_of(comparison: Comparison) -> dict[str, int]:
    return {entry.label: entry.steps for entry in comparison.entries}


@pytest.mark.parametrize("flops", [0.6, 0.75, 0.8137, 1.0])
def test_every_entry_spends_what_the_budget_pays_for_and_no_more(flops: float) -> None:
    comparison = read_comparison(given(flops=flops, entries=EVERY_METHOD))
    budget = flops * comparison.full_flops
    for entry in comparison.entries:
        if entry.label == FULL:
            assert entry.steps == STEPS
            assert entry.flops == pytest.approx(comparison.full_flops)
        else:
            assert entry.flops <= budget * (1 + 1e-9)
            assert cost(entry.config, 2048, entry.steps + 1) > budget
            assert entry.flops == cost(entry.config, 2048, entry.steps)
            assert entry.config.make_method(entry.config.model.build(2048, 64)).steps == entry.steps
    assert {entry.label for entry in comparison.entries} == {FULL, *METHODS} | ({REDUCED} if flops < 1 else set())


def test_full_training_at_a_fraction_of_the_flops_takes_that_fraction_of_the_steps() -> None:
    assert steps_of(read_comparison(given(flops=0.75)))[REDUCED] == 300
    assert steps_of(read_comparison(given(flops=0.57)))[REDUCED] == 228  # 0.57 · 400 is a little less in floating point


@pytest.mark.parametrize("start", [1, 7, 100, 5000])
def test_the_search_finds_the_last_affordable_step_from_anywhere(start: int) -> None:
    assert affordable(lambda steps: 3.0 * steps, 299.0, start) == 99
    assert affordable(lambda steps: 3.0 * steps, 300.0, start) == 100
    assert affordable(lambda steps: 1000.0 + steps, 1000.5, start) == 0
    assert affordable(lambda steps: steps + 50.0 * (steps > 20), 60.0, start) == 20


def test_with_equal_steps_reduced_full_costs_the_mean_of_what_costs_less() -> None:
    entries = {"half": {"name": "raptr", "schedule": "3-6"}, "most": {"name": "raptr", "schedule": "5-6"}}
    entries["dear"] = {"name": "raptr", "schedule": "6-6"}  # costs what full costs, so it does not count
    comparison = read_comparison(given(entries=entries))
    by_label = {entry.label: entry for entry in comparison.entries}
    assert steps_of(comparison) == {FULL: STEPS, REDUCED: by_label[REDUCED].steps, **dict.fromkeys(entries, STEPS)}
    relative = {label: entry.flops / comparison.full_flops for label, entry in by_label.items()}
    mean = (relative["half"] + relative["most"]) / 2
    assert comparison.fraction == pytest.approx(mean)
    assert by_label[REDUCED].steps == int(mean * STEPS)
    assert by_label[REDUCED].config.method["name"] == FULL


def test_no_reduced_full_where_nothing_costs_less() -> None:
    comparison = read_comparison(given(entries={"all": {"name": "raptr", "schedule": "6-6"}}))
    assert list(steps_of(comparison)) == [FULL, "all"]
    assert comparison.fraction is None


def test_warmup_and_decay_last_as_long_in_every_run_and_every_rate_has_decayed() -> None:
    without = given(flops=0.7, entries=EVERY_METHOD)
    del without["settings"]["optimizer"]["decay"]
    for asked, decay in ((given(flops=0.7, entries=EVERY_METHOD), 100), (without, STEPS // 4)):
        for run in read_comparison(asked).runs:
            optimizer, steps = run.config.optimizer, run.config.train.steps
            assert (optimizer.warmup, optimizer.decay) == (20, decay)
            assert optimizer.learning_rate(steps - 1, steps) == pytest.approx(optimizer.peak / decay)
            assert optimizer.learning_rate(steps - decay - 1, steps) == optimizer.peak


def test_runs_come_seed_by_seed_over_all_entries_and_learning_rates() -> None:
    entries = {"full": {"name": "full"}, "zeros": {"name": "raptr", "optimizer": {"idle": "zero"}, "peaks": [0.5]}}
    comparison = read_comparison(given(entries=entries, seeds=[3, 1], peaks=[0.1, 0.2]))
    once = [(FULL, 0.1), (FULL, 0.2), (REDUCED, 0.1), (REDUCED, 0.2), ("zeros", 0.5)]
    assert [(run.seed, run.entry.label, run.peak) for run in comparison.runs] == [(s, *r) for s in (3, 1) for r in once]
    for run in comparison.runs:
        assert run.config.train.seed == run.seed
        assert run.config.optimizer.peak == run.peak
        assert run.config.optimizer.idle == ("zero" if run.entry.label == "zeros" else "skip")
        assert run.config.train.keep == 1
    names = [run.name for run in comparison.runs]
    assert names[2] == "full-reduced-peak0.1-seed3"
    assert len(set(names)) == len(names)


def test_settings_start_from_a_recipe_and_the_method_does_not() -> None:
    comparison = read_comparison({"recipe": "bert-base", "entries": {"pld": {"name": "pld"}}})
    config = comparison.entries[-1].config
    assert (config.model.size, config.optimizer.idle, config.train.steps) == ("base", "zero", 675_000)
    assert config.method == {"name": "pld"}
    assert comparison.entries[-1].peaks == (1e-4,)


def test_a_device_given_on_the_command_line_is_every_runs() -> None:
    assert {run.config.train.device for run in read_comparison(given(), device="cpu").runs} == {"cpu"}


def test_a_number_that_yaml_takes_for_a_text() -> None:
    written = yaml.safe_load("peaks: [1e-3, 1.0e-3, 2e-3]")
    assert written["peaks"][0] == "1e-3"
    with pytest.raises(ValueError, match=r"peaks is \[0.001, 0.001, 0.002\]; a list of one or more different"):
        read_comparison(given(**written))


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("budget", 3, "Unknown setting budget; allowed: entries, recipe, settings, seeds, peaks, flops"),
        ("seed", [1], "Unknown setting seed; did you mean 'seeds'?"),
        ("entries", {}, "entries is empty; at least one is needed"),
        ("entries", None, "entries is None; a mapping is allowed"),
        ("recipe", "dmo", "recipe is 'dmo'; did you mean 'demo'? allowed: demo"),
        ("seeds", [], "seeds is []; a list of one or more different numbers is allowed"),
        ("seeds", [1, 1], "seeds is [1, 1]; a list of one or more different numbers is allowed"),
        ("seeds", [-1], "train.seed is -1; a whole number from 0 on is allowed"),
        ("seeds", 3, "seeds is 3; a list with each entry a whole number is allowed"),
        ("peaks", ["high"], "peaks is ['high']; a list with each entry a number is allowed"),
        ("peaks", [0], "optimizer.peak is 0.0; a number above 0 is allowed"),
        ("flops", 1.5, "flops is 1.5; a number above 0 to 1, full training's, is allowed"),
        ("flops", 0, "flops is 0.0; a number above 0 to 1"),
        ("flops", 0.2, "entries.raptr, at "),
        ("flops", 0.2, "optimizer.warmup is 20 and optimizer.decay 100; together up to train.steps"),
        ("flops", 0.001, "entries.raptr, at 3.25e+09 FLOPs: schedule 3-4-5-6: a stage of size 5 would be empty"),
        ("settings.modl", {}, "settings.modl is no section of a comparison; did you mean 'model'? allowed: model"),
        ("settings.method", {"name": "pld"}, "settings.method is no section of a comparison"),
        ("settings.model", 3, "settings.model is 3; a mapping is allowed"),
        ("settings.train.stps", 3, "Unknown setting train.stps; did you mean 'steps'?"),
        ("settings.train.seed", 3, "settings.train.seed is 3; a comparison names its seeds under seeds"),
        ("settings.data.source", "nowhere", "nowhere"),
        ("entries.raptr", None, "entries.raptr is None; a mapping with a method's name is allowed"),
        ("entries.raptr", {"schedule": "3-6"}, "a mapping with a method's name is allowed, as {name: full}"),
        ("entries.raptr.name", "rapter", "entries.raptr: method is 'rapter'; did you mean 'raptr'?"),
        ("entries.raptr.schedul", "3-6", "entries.raptr.schedul is no setting; did you mean 'schedule'?"),
        ("entries.raptr.peak", [0.1], "entries.raptr.peak is no setting; did you mean 'peaks'? allowed: name, "),
        ("entries.raptr.peaks", 0.1, "entries.raptr.peaks is 0.1; a list with each entry a number is allowed"),
        ("entries.raptr.peaks", [], "entries.raptr.peaks is []; a list of one or more different numbers is allowed"),
        ("entries.raptr.schedule", "3-9", "entries.raptr: schedule 3-9: size 9 is out of range"),
        ("entries.raptr.optimizer", 3, "entries.raptr.optimizer is 3; a mapping is allowed"),
        ("entries.raptr.optimizer", {"idl": 3}, "entries.raptr: Unknown setting optimizer.idl; did you mean 'idle'?"),
        ("entries.raptr.optimizer", {"decay": 3}, "it is set by settings.optimizer.decay, for all entries"),
        ("entries.raptr.optimizer", {"peak": 3}, "it is set by entries.raptr.peaks"),
        ("entries.full", {"name": "pld"}, "entries.full is the method 'pld'; under this name only full is allowed"),
        ("entries.full (reduced)", {"name": "full"}, "whose folder 'full-reduced' is taken or empty"),
        ("entries.raptr!", {"name": "raptr"}, "entries has 'raptr', whose folder 'raptr' is taken or empty"),
        ("entries.!", {"name": "raptr"}, "entries has '!', whose folder '' is taken or empty"),
    ],
)
def test_mistakes_get_a_sentence(path: str, value: Any, sentence: str) -> None:
    asked = copy.deepcopy(given())
    *sections, key = path.split(".")
    place = asked
    for section in sections:
        place = place[section]
    place[key] = value
    with pytest.raises((ValueError, OSError)) as refused:
        read_comparison(asked)
    assert sentence in str(refused.value)


def test_a_budget_below_one_step() -> None:
    with pytest.raises(ValueError, match=r"entries.layerdrop, at .* FLOPs: train.steps is 0; a whole number from 1 on"):
        read_comparison(given(flops=1e-6, entries={"layerdrop": {"name": "layerdrop"}}))


def test_two_ways_to_name_one_learning_rate_are_refused() -> None:
    asked = given(peaks=[0.1])
    asked["settings"]["optimizer"]["peak"] = 0.2
    with pytest.raises(ValueError, match=r"settings.optimizer.peak and peaks are both given; one of them is allowed"):
        read_comparison(asked)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("entries: [", "is no YAML"),
        ("- 1", "a mapping with settings and"),
        ("entries:\n  a: {name: full}\n  a: {name: pld}", "'a' appears twice"),
    ],
)
def test_a_bad_file(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_file(tmp_path / "file.yaml")


def test_the_comparison_of_all_methods_names_every_method_of_the_paper() -> None:
    asked = read_file(Path(__file__).parents[2] / "examples" / "methods.yaml")
    asked["settings"]["data"]["source"] = "builtin"
    comparison = read_comparison(asked)
    assert len(comparison.runs) == 72
    paper = {"full", "raptr", "pld", "stacking", "progressive-stacking", "lemon", "msg", "msg-interpolation"}
    assert {entry.config.method["name"] for entry in comparison.entries} == paper


def test_the_example_is_a_comparison() -> None:
    example = Path(__file__).parents[2] / "examples" / "compare.yaml"
    comparison = read_comparison(read_file(example))
    assert set(steps_of(comparison)) == {FULL, REDUCED, "raptr"}
    assert len(comparison.seeds) == 2
