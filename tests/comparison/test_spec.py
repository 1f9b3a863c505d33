"""A comparison as written: every budget solved, every mistake named, before anything runs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from raptr.comparison.outcomes import FULL, REDUCED
from raptr.comparison.search import wanted
from raptr.comparison.spec import Comparison, affordable, cost, read_comparison, read_file
from raptr.methods import METHODS

STEPS = 400
EVERY_METHOD = {name: {"name": name} for name in METHODS}


def given(**keys: Any) -> dict[str, Any]:
    return {
        "settings": {
            "model": {"size": "tiny"},
            "data": {"vocabulary": 2048, "length": 64},
            "optimizer": {"warmup": 20, "decay": 0.3},
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
            assert entry.config.make_method().steps == entry.steps
    assert {entry.label for entry in comparison.entries} == {FULL, *METHODS} | ({REDUCED} if flops < 1 else set())


def test_full_training_at_a_fraction_of_the_flops_takes_that_fraction_of_the_steps() -> None:
    assert steps_of(read_comparison(given(flops=0.75)))[REDUCED] == 300
    assert steps_of(read_comparison(given(flops=0.57)))[REDUCED] == 228  # 0.57 · 400 is a little less in floating point


def test_entries_may_have_optimizers_of_their_own() -> None:
    names = ("muon", "adafactor")
    entries = {name: {"name": "raptr", "optimizer": {"name": name}, "peaks": [0.01]} for name in names}
    optimizers = {"decay_shape": "inverse-sqrt", "decay": 0.9}
    spec = given(flops=0.75, entries=entries)
    spec["settings"]["optimizer"] = optimizers
    found = {entry.label: entry.config.optimizer for entry in read_comparison(spec).entries}
    assert {label: found[label].name for label in (FULL, REDUCED, *names)} == {
        FULL: "adamw",
        REDUCED: "adamw",
        "muon": "muon",
        "adafactor": "adafactor",
    }
    assert {settings.decay_shape for settings in found.values()} == {"inverse-sqrt"}
    spec["settings"]["optimizer"] = {"weight_decay": 0.1}
    with pytest.raises(ValueError, match=r"entries\.adafactor.*optimizer\.weight_decay.*0\.1"):
        read_comparison(spec)


def test_the_warm_up_of_a_recipe_fits_into_fewer_steps() -> None:
    spec = {"recipe": "demo", "settings": {"train": {"steps": 40}}, "entries": {"raptr": {"name": "raptr"}}}
    told = "the recipe demo's warm-up of 40 steps and a decay of 10 do not fit into 40 steps"
    with pytest.warns(UserWarning, match=rf"optimizer\.warmup is 2: {told}.* same share .* as in the recipe"):
        comparison = read_comparison(spec)
    assert {entry.config.optimizer.warmup for entry in comparison.entries} == {2}


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


def test_every_run_decays_over_the_same_fraction_of_its_own_steps() -> None:
    without = given(flops=0.7, entries=EVERY_METHOD)
    del without["settings"]["optimizer"]["decay"]
    for asked, fraction in ((given(flops=0.7, entries=EVERY_METHOD), 0.3), (without, 0.25)):
        runs = wanted(read_comparison(asked), [])
        assert len({run.entry.steps for run in runs}) > 2
        for run in runs:
            optimizer, steps = run.config.optimizer, run.config.train.steps
            decay = optimizer.decay_steps(steps)
            assert optimizer.warmup == 20
            assert fraction * steps <= decay < fraction * steps + 1
            assert optimizer.learning_rate(steps - 1, steps) == pytest.approx(optimizer.peak / decay)
            assert optimizer.learning_rate(steps - decay - 1, steps) == optimizer.peak


def test_runs_come_seed_by_seed_over_all_entries_and_learning_rates() -> None:
    entries = {"full": {"name": "full"}, "zeros": {"name": "raptr", "optimizer": {"idle": "zero"}, "peaks": [0.5]}}
    comparison = read_comparison(given(entries=entries, seeds=[3, 1], peaks=[0.1, 0.2]))
    once = [(FULL, 0.1), (FULL, 0.2), (REDUCED, 0.1), (REDUCED, 0.2), ("zeros", 0.5)]
    runs = wanted(comparison, [])
    assert [(run.seed, run.entry.label, run.peak) for run in runs] == [(s, *r) for s in (3, 1) for r in once]
    assert comparison.count == len(runs)
    for run in runs:
        assert run.config.train.seed == run.seed
        assert run.config.optimizer.peak == run.peak
        policy = run.config.mapping()["optimizer"]["idle"]
        assert policy == ("zero" if run.entry.label == "zeros" else "skip")
        assert run.config.train.keep == 1
    names = [run.name for run in runs]
    assert names[2] == "full-reduced-peak0.1-seed3"
    assert len(set(names)) == len(names)


def test_each_entry_has_the_idle_policy_that_its_method_needs() -> None:
    entries: dict[str, dict[str, Any]] = {"depth": {"name": "raptr"}, "mlp": {"name": "raptr", "parts": "1-2-4"}}
    found = {entry.label: entry.config.mapping() for entry in read_comparison(given(entries=entries)).entries}
    assert {label: found[label]["optimizer"]["idle"] for label in entries} == {"depth": "skip", "mlp": "zero"}
    entries["mlp"] |= {"optimizer": {"idle": "zero"}}  # what every entry with heads or parts once had to say
    explicit = {entry.label: entry.config.mapping() for entry in read_comparison(given(entries=entries)).entries}
    assert explicit == found


def test_settings_start_from_a_recipe_and_the_method_does_not() -> None:
    comparison = read_comparison({"recipe": "bert-base", "entries": {"pld": {"name": "pld"}}})
    config = comparison.entries[-1].config
    assert (config.model.size, config.optimizer.idle, config.train.steps) == ("base", "zero", 675_000)
    assert config.method == {"name": "pld"}
    assert comparison.entries[-1].peaks == (1e-4,)


def test_a_device_given_on_the_command_line_is_every_runs() -> None:
    assert {run.config.train.device for run in wanted(read_comparison(given(), device="cpu"), [])} == {"cpu"}


def test_a_number_that_yaml_takes_for_a_text() -> None:
    written = yaml.safe_load("peaks: [1e-3, 1.0e-3, 2e-3]")
    assert written["peaks"][0] == "1e-3"
    with pytest.raises(ValueError, match=r"peaks is \[0.001, 0.001, 0.002\]"):
        read_comparison(given(**written))


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("budget", 3, "budget.*entries, recipe, settings, seeds, peaks, tune, widen, flops"),
        ("seed", [1], "seed.*'seeds'"),
        ("entries", {}, "entries.*empty"),
        ("entries", None, "entries is None"),
        ("entries", {"best": {"name": "auto"}}, r"entries\.best\.name is auto"),
        ("recipe", "dmo", "recipe is 'dmo'.*'demo'"),
        ("seeds", [], r"seeds is \[\]"),
        ("seeds", [1, 1], r"seeds is \[1, 1\]"),
        ("seeds", [-1], "train.seed is -1.* 0 "),
        ("seeds", 3, "seeds is 3"),
        ("peaks", ["high"], r"peaks is \['high'\]"),
        ("peaks", [0], "optimizer.peak is 0.0"),
        ("tune", [7], r"tune is \[7\]"),
        ("tune", [], r"tune is \[\]"),
        ("widen", 3, "widen is 3"),
        ("flops", 1.5, "flops is 1.5.* 1"),
        ("flops", 0, "flops is 0.0"),
        ("flops", 0.001, r"entries.raptr.*3.25e\+09 FLOPs.*3-4-5-6.*size 5"),
        ("settings.modl", {}, "settings.modl.*'model'"),
        ("settings.method", {"name": "pld"}, "settings.method"),
        ("settings.model", 3, "settings.model is 3"),
        ("settings.objective", {"name": "ul2"}, "objective.name is ul2"),
        ("settings.train.stps", 3, "train.stps.*'steps'"),
        ("settings.train.seed", 3, "settings.train.seed is 3.*seeds"),
        ("entries", {"ü" * 76: {"name": "pld"}}, "üü.*at most 150 bytes"),
        ("settings.optimizer.decay", 0.97, "optimizer.warmup is 20.*optimizer.decay 0.97"),
        ("settings.data.source", "nowhere", "nowhere"),
        ("entries.raptr", None, "entries.raptr is None"),
        ("entries.raptr", {"schedule": "3-6"}, "entries.raptr.*name: full"),
        ("entries.raptr.name", "rapter", "entries.raptr.*'rapter'.*'raptr'(?!.*auto)"),
        ("entries.raptr.schedul", "3-6", "entries.raptr.schedul.*'schedule'"),
        ("entries.raptr.peak", [0.1], "entries.raptr.peak.*'peaks'"),
        ("entries.raptr.peaks", 0.1, "entries.raptr.peaks is 0.1"),
        ("entries.raptr.peaks", [], r"entries.raptr.peaks is \[\]"),
        ("entries.raptr.schedule", "3-9", "entries.raptr.*3-9.*size 9"),
        ("entries.raptr.optimizer", 3, "entries.raptr.optimizer is 3"),
        ("entries.raptr.optimizer", {"idl": 3}, "entries.raptr.*optimizer.idl.*'idle'"),
        ("entries.raptr.optimizer", {"decay": 0.5}, "entries.raptr.optimizer.decay is 0.5.*settings.optimizer.decay"),
        ("entries.raptr.optimizer", {"peak": 3}, "entries.raptr.optimizer.peak is 3.*entries.raptr.peaks"),
        ("entries.raptr.model", {"layers": 3}, "entries.raptr.model.layers is 3.*init.*settings.model.layers"),
        ("entries.raptr.model", {"init": "x"}, "entries.raptr.*model.init is 'x'.*fan-in"),
        ("settings.model", {"init": "x"}, "model.init is 'x'.*fan-in"),
        ("entries.full", {"name": "pld"}, "entries.full.*'pld'"),
        ("entries.full (reduced)", {"name": "full"}, "'full-reduced'"),
        ("entries.raptr!", {"name": "raptr"}, "'raptr'"),
        ("entries.!", {"name": "raptr"}, "entries has '!'"),
    ],
)
def test_mistakes_are_named(path: str, value: Any, told: str) -> None:
    asked = copy.deepcopy(given())
    *sections, key = path.split(".")
    place = asked
    for section in sections:
        place = place[section]
    place[key] = value
    with pytest.raises((ValueError, OSError), match=told):
        read_comparison(asked)


def test_initial_weights_are_set_for_all_entries_or_for_one() -> None:
    entries = {"raptr": {"name": "raptr"}, "own": {"name": "raptr", "model": {"init": "bert"}}}
    asked = given(entries=entries)
    asked["settings"]["model"]["init"] = "fan-in"
    made = {entry.label: entry.config.mapping()["model"] for entry in read_comparison(asked).entries}
    assert {label: model["init"] for label, model in made.items()} == {
        FULL: "fan-in",
        REDUCED: "fan-in",
        "raptr": "fan-in",
        "own": "bert",
    }
    assert len({model["layers"] for model in made.values()}) == 1


def test_a_budget_below_one_step() -> None:
    with pytest.raises(ValueError, match=r"entries.layerdrop, at .* FLOPs: train.steps is 0; a whole number from 1"):
        read_comparison(given(flops=1e-6, entries={"layerdrop": {"name": "layerdrop"}}))


def test_two_ways_to_name_one_learning_rate_are_refused() -> None:
    asked = given(peaks=[0.1])
    asked["settings"]["optimizer"]["peak"] = 0.2
    with pytest.raises(ValueError, match=r"settings.optimizer.peak and peaks"):
        read_comparison(asked)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("entries: [", r"file\.yaml.*YAML"),
        ("- 1", "a mapping with settings and"),
        ("", r"file\.yaml' is empty; a mapping with settings and entries is needed"),
        ("# entries:", r"is empty"),
        ("entries:\n  a: {name: full}\n  a: {name: pld}", "'a' appears twice"),
    ],
)
def test_a_bad_file(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_file(tmp_path / "file.yaml")


def test_entries_may_share_settings_by_merge_keys(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(
        "entries:\n  one: &one {name: raptr, schedule: 3-6}\n  other: {<<: *one, schedule: 4-6, scaling: sqrt}"
    )
    one = {"name": "raptr", "schedule": "3-6"}
    assert read_file(tmp_path / "file.yaml") == {
        "entries": {"one": one, "other": {**one, "schedule": "4-6", "scaling": "sqrt"}}
    }


def test_the_comparison_of_all_methods_names_every_method() -> None:
    asked = read_file(Path(__file__).parents[2] / "examples" / "methods.yaml")
    asked["settings"]["data"]["source"] = "builtin"
    comparison = read_comparison(asked)
    assert comparison.count == 93
    assert {entry.config.method["name"] for entry in comparison.entries} == set(METHODS)


def test_the_example_is_a_comparison() -> None:
    example = Path(__file__).parents[2] / "examples" / "compare.yaml"
    comparison = read_comparison(read_file(example))
    assert set(steps_of(comparison)) == {FULL, REDUCED, "raptr"}
    assert len(comparison.seeds) == 2


def test_the_long_comparison_has_twenty_tokens_per_weight_of_the_layers() -> None:
    asked = read_file(Path(__file__).parents[2] / "examples" / "long.yaml")
    asked["settings"]["data"] |= {"source": "builtin", "vocabulary": 8192}
    for entry in read_comparison(asked).entries:
        size = entry.config.model.build(8192, entry.config.data.length)
        weights = size.layers * size.width * (4 * size.heads * size.head_size + 2 * size.mlp)
        tokens = entry.steps * entry.config.train.batch * entry.config.data.length
        assert tokens >= 20 * weights * (0.76 if entry.label == REDUCED else 1)
