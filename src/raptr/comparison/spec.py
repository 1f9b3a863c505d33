"""A comparison's YAML file: read it, check it, and turn budgets into numbers of steps.

    recipe: demo                      optional: the recipe whose settings are the defaults
    settings:                         sections as in any config.yaml
      train: {steps: 2000, batch: 64}
    seeds: [0, 1, 2]
    peaks: [5.0e-4, 1.0e-3, 2.0e-3]   optional: the learning rates of every entry that has no `peaks` itself
    tune: [0]                         optional: compare learning rates on these seeds; the other seeds run at the best
    widen: true                       optional: extend a grid by factors of two until its best rate lies inside
    flops: 0.75                       optional: every entry gets this fraction of full training's FLOPs
    evaluate: {...}                   optional: score the models on tasks; see tasks.py
    entries:                          one method each, as under `method` in config.yaml
      full: {name: full}
      raptr: {name: raptr, schedule: 6-8-10-12}
      zeros: {name: raptr, optimizer: {idle: zero}, peaks: [1.0e-3]}
      wide: {name: raptr, model: {init: fan-in}}

Without `flops` every entry trains for train.steps steps, whatever that costs. With `flops` every entry but full
training gets as many steps as the budget pays for. The cost of its whole plan is computed in closed form, with expected
FLOPs for methods that draw at random. A cheaper method must beat a shorter full training, so this is added as
`full (reduced)`: at the budget or, without one, at the mean FLOPs of the entries that cost less than full training. The
warm-up has the same number of steps in every run. The decay covers the same fraction of each run's own steps, so every
learning rate has decayed when its run ends.

With `tune` or `widen`, some runs depend on the results of others: see search.py.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from raptr.comparison.outcomes import FULL, REDUCED
from raptr.comparison.tasks import Evaluate, read_evaluate
from raptr.methods import METHODS
from raptr.recipes import RECIPES
from raptr.settings import check_choice, nearest, read
from raptr.strict_yaml import read_yaml
from raptr.train.advice import AUTO
from raptr.train.config import Config, Precision, merged
from raptr.train.flops import planned_flops
from raptr.train.resolve import check_vocabulary, with_warmup

SECTIONS = ("model", "data", "objective", "optimizer", "train")
OWN_MODEL = ("init", "residual_multiplier", "norm_scaling")  # the settings of the model in which entries may differ
LONGEST = 150  # bytes of a label in a run folder's name; file systems allow 255, and rate and seed are appended
TOLERANCE = 1e-9  # the relative error within which a budget counts as kept


@dataclass(frozen=True)
class Entry:
    """One line of the comparison: a configuration with its steps, the rates to try, and one run's planned FLOPs."""

    label: str
    config: Config
    peaks: tuple[float, ...]
    flops: float

    @property
    def steps(self) -> int:
        return self.config.train.steps


@dataclass(frozen=True)
class PlannedRun:
    """One run: an entry at a learning rate and a seed."""

    entry: Entry
    peak: float
    seed: int
    config: Config

    def __str__(self) -> str:
        return f"{self.entry.label}, peak {self.peak:g}, seed {self.seed}"

    @property
    def key(self) -> tuple[str, float, int]:
        """Label, learning rate and seed, which identify the run within its comparison."""
        return self.entry.label, self.peak, self.seed

    @property
    def terms(self) -> tuple[float, int, int]:
        """Learning rate, seed and steps. With the configuration they identify the same run in any comparison."""
        return self.peak, self.seed, self.entry.steps

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{slug(self.entry.label)}-peak{self.peak!r}-seed{self.seed}"


@dataclass(frozen=True)
class Comparison:
    """A checked comparison. `fraction` is the relative cost of reduced full training, None if that is left out."""

    given: Mapping[str, Any]
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...]
    tune: tuple[int, ...]
    widen: bool
    full_flops: float
    fraction: float | None
    evaluate: Evaluate = field(default_factory=Evaluate)

    @property
    def count(self) -> int:
        """The number of runs if no grid is widened."""
        others = len(self.seeds) - len(self.tune)
        return sum(len(entry.peaks) * len(self.tune) + others for entry in self.entries)

    @property
    def rounds(self) -> list[tuple[int, ...]]:
        """Groups of seeds, in the order in which models are scored: the tuning seeds together, then each other seed."""
        return [self.tune, *((seed,) for seed in self.seeds if seed not in self.tune)]

    @property
    def planned_flops(self) -> float:
        others = len(self.seeds) - len(self.tune)
        return sum(entry.flops * (len(entry.peaks) * len(self.tune) + others) for entry in self.entries)

    def table(self) -> Table:
        """Return a table of the entries for the terminal, shown before anything is trained."""
        title = f"{self.count} runs{', or more' if self.widen else ''}, with seeds {', '.join(map(str, self.seeds))}"
        table = Table(title=title, box=SIMPLE)
        for column in ("entry", "peaks", "steps", "FLOPs"):
            table.add_column(column, justify="left" if column == "entry" else "right", overflow="fold")
        for entry in self.entries:
            peaks, flops = ", ".join(f"{peak:g}" for peak in entry.peaks), f"{entry.flops / self.full_flops:.3f}"
            table.add_row(Text(entry.label), peaks, f"{entry.steps:,}", flops)
        table.caption = (
            f"FLOPs are the whole model's, relative to full; {self.planned_flops:.3g} in all, "
            f"{self.planned_flops / self.full_flops:.1f} times those of one full run"
        )
        if len(self.tune) < len(self.seeds):
            tuned = ", ".join(map(str, self.tune))
            table.caption += f". Learning rates are compared on seeds {tuned}; other seeds run at the best one."
        if self.widen:
            table.caption += " A best learning rate at the edge of its grid extends the grid by a factor of two."
        return table


@dataclass(frozen=True)
class _Spec:
    """The keys of the YAML file, with their defaults."""

    entries: Mapping[str, Any]
    recipe: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    peaks: tuple[float, ...] | None = None
    tune: tuple[int, ...] | None = None
    widen: bool = False
    flops: float | None = None
    evaluate: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError("entries is empty; at least one is needed")
        if self.recipe is not None:
            check_choice("recipe", self.recipe, RECIPES)
        if self.flops is not None and not 0 < self.flops <= 1:
            raise ValueError(f"flops is {self.flops!r}; a number above 0 to 1, full training's, is allowed")
        _check_list("seeds", self.seeds)
        _check_list("peaks", self.peaks)
        _check_list("tune", self.tune)
        if not set(self.tune or ()) <= set(self.seeds):
            raise ValueError(f"tune is {list(self.tune or ())}; seeds of the list under seeds are allowed")


@dataclass(frozen=True)
class _Own:
    """Keys that an entry may have besides its method's settings."""

    optimizer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)  # only OWN_MODEL: all entries share the model's dimensions
    precision: Precision | None = None
    peaks: tuple[float, ...] | None = None


def read_file(path: Path) -> dict[str, Any]:
    """Read a comparison's YAML file, which must hold a mapping."""
    content = read_yaml(path, "comparison")
    if content is None:
        raise ValueError(f"comparison {str(path)!r} is empty; a mapping with settings and entries is needed")
    if not isinstance(content, dict):
        raise ValueError(f"comparison {str(path)!r} is {content!r}; a mapping with settings and entries is allowed")
    return content


def read_comparison(given: Mapping[str, Any], *, device: str | None = None) -> Comparison:
    """Check a comparison, solve its budgets and build the configuration of every run. Unknown keys are ValueErrors."""
    spec = read(_Spec, given)
    base = _base(spec, device)
    vocabulary = base.vocabulary_size()
    entries = _entries(spec, base, vocabulary)
    full = entries[FULL]
    if spec.flops is not None:
        fraction = spec.flops
        budget = fraction * full.flops
        entries = {label: e if label == FULL else _solved(e, budget, vocabulary) for label, e in entries.items()}
    else:
        cheaper = [e.flops / full.flops for e in entries.values() if e.flops < full.flops * (1 - TOLERANCE)]
        fraction = sum(cheaper) / len(cheaper) if cheaper else 1.0
    reduced = _solved(replace(full, label=REDUCED), fraction * full.flops, vocabulary)
    shorter = reduced.steps < full.steps
    ordered = {FULL: full, **({REDUCED: reduced} if shorter else {}), **entries}
    comparison = Comparison(
        given=dict(given),
        entries=tuple(ordered.values()),
        seeds=spec.seeds,
        tune=spec.tune or spec.seeds,
        widen=spec.widen,
        full_flops=full.flops,
        fraction=fraction if shorter else None,
        evaluate=read_evaluate(spec.evaluate, base),
    )
    for entry in comparison.entries:  # a bad seed or learning rate is refused before anything runs
        if comparison.evaluate:
            _check_export(entry)
        for peak in entry.peaks:
            for seed in spec.seeds:
                at(entry.config, peak=peak, seed=seed)
    return comparison


def _check_export(entry: Entry) -> None:
    """Refuse an entry whose trained models cannot be exported, since tasks are scored on exports."""
    from raptr.train.exporting import judged  # imports transformers, which is slow

    try:
        judged(entry.config.make_method(), entry.steps)
    except ValueError as error:
        what = f"evaluate is given, but the models of entry {entry.label!r} cannot be evaluated"
        raise ValueError(f"{what}. {error}") from None


def affordable(cost: Callable[[int], float], budget: float, start: int) -> int:
    """Return the most steps that cost at most `budget`, searching from `start`; `cost` must increase with the steps."""
    budget *= 1 + TOLERANCE
    low, high = start, start + 1
    while cost(high) <= budget:
        low, high = high, 2 * high
    while low > 0 and cost(low) > budget:
        low, high = low // 2, low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return low


def cost(config: Config, vocabulary: int, steps: int) -> float:
    """Return the planned FLOPs of the whole model for a run of `steps` steps."""
    dimensions = config.model.build(vocabulary, config.data.length)
    # The learning rate does not change the cost, and a trial with few steps has no room for warm-up and decay.
    plain = replace(config, optimizer=replace(config.optimizer, warmup=0, decay=0.0))
    method = at(plain, steps=steps).make_method()
    return planned_flops(dimensions, method, **config.step_load).total


def at(config: Config, *, steps: int | None = None, peak: float | None = None, seed: int | None = None) -> Config:
    """Return a copy of the configuration with another number of steps, peak learning rate or seed; None: the same."""
    train = replace(
        config.train,
        steps=config.train.steps if steps is None else steps,
        seed=config.train.seed if seed is None else seed,
    )
    optimizer = replace(config.optimizer, peak=config.optimizer.peak if peak is None else peak)
    return replace(config, train=train, optimizer=optimizer)


def slug(label: str) -> str:
    """Return the label as part of a folder's name, with hyphens for all but letters, digits, `_` and `.`."""
    return re.sub(r"[^\w.]+", "-", label).strip("-.")


def _base(spec: _Spec, device: str | None) -> Config:
    """Return the configuration that all entries share, with full training as its method."""
    recipe = RECIPES[spec.recipe]() if spec.recipe else {}
    for section, given in spec.settings.items():
        if section not in SECTIONS:
            raise ValueError(
                f"Unknown section settings.{section}; {nearest(section, SECTIONS)}allowed: {', '.join(SECTIONS)}"
            )
        if not isinstance(given, Mapping):
            raise ValueError(f"settings.{section} is {given!r}; a mapping is allowed")
    shared = spec.settings.get("train", {})
    if "seed" in shared:
        raise ValueError(f"settings.train.seed is {shared['seed']!r}; a comparison names its seeds under seeds")
    if spec.peaks is not None and "peak" in spec.settings.get("optimizer", {}):
        raise ValueError("settings.optimizer.peak and peaks are both given; one of them is allowed")
    settings = merged({section: recipe.get(section, {}) for section in SECTIONS}, spec.settings)
    settings["train"] = {"keep": 1, **settings["train"], **({"device": device} if device else {})}
    settings = with_warmup(settings, spec.recipe, spec.settings)
    config = Config.read({**settings, "method": {"name": FULL}})
    check_vocabulary(config, spec.settings)
    return config


def _entries(spec: _Spec, base: Config, vocabulary: int) -> dict[str, Entry]:
    """Return every entry at train.steps steps; full training is added in front if it is not listed."""
    by_label = dict(spec.entries) if FULL in spec.entries else {FULL: {"name": FULL}, **spec.entries}
    entries = {label: _entry(label, values, spec, base, vocabulary) for label, values in by_label.items()}
    if entries[FULL].config.method["name"] != FULL:
        raise ValueError(f"entries.full is the method {by_label[FULL]['name']!r}; under this name only full is allowed")
    names = Counter(slug(label) for label in (*by_label, REDUCED))
    for label in by_label:
        if not slug(label) or names[slug(label)] > 1:
            raise ValueError(
                f"entries has {label!r}, whose folder {slug(label)!r} is taken or empty; "
                f"labels with letters or digits of their own are allowed, {REDUCED!r} not among them"
            )
        if len(slug(label).encode()) > LONGEST:
            raise ValueError(
                f"entries has {label!r}, which a folder is named after; at most {LONGEST} bytes are allowed"
            )
    return entries


def _entry(label: object, given: object, spec: _Spec, base: Config, vocabulary: int) -> Entry:
    if not isinstance(label, str):
        raise ValueError(f"entries has {label!r}; a text is allowed as an entry's label")
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ValueError(f"entries.{label} is {given!r}; a mapping with a method's name is allowed, as {{name: full}}")
    extra_keys = [entry.name for entry in fields(_Own)]
    if given["name"] == AUTO:
        raise ValueError(f"entries.{label}.name is auto; a comparison names its methods: {', '.join(METHODS)}")
    check_choice(f"entries.{label}.name", given["name"], METHODS)
    allowed = ["name", *sorted(METHODS[given["name"]].own_settings()), *extra_keys]
    for key in given:
        if key not in allowed:
            raise ValueError(
                f"Unknown setting entries.{label}.{key}; {nearest(key, allowed)}allowed: {', '.join(allowed)}"
            )
    own = read(_Own, {key: given[key] for key in extra_keys if key in given}, f"entries.{label}.")
    _check_list(f"entries.{label}.peaks", own.peaks)
    for key, place in (("peak", f"entries.{label}.peaks"), ("decay", "settings.optimizer.decay, for all entries")):
        if key in own.optimizer:
            raise ValueError(f"entries.{label}.optimizer.{key} is {own.optimizer[key]!r}; it is set by {place}")
    for key in own.model:
        if key not in OWN_MODEL:
            raise ValueError(
                f"entries.{label}.model.{key} is {own.model[key]!r}; only {', '.join(OWN_MODEL)} may differ "
                f"between entries. Set it for all of them, by settings.model.{key}."
            )
    method = {key: value for key, value in given.items() if key not in extra_keys}
    optimizer = {**asdict(base.optimizer), **own.optimizer}
    try:
        shared = base.mapping()
        model = {**shared["model"], **own.model}
        config = Config.read({**shared, "model": model, "method": method, "optimizer": optimizer})
        if own.precision is not None:
            config = replace(config, train=replace(config.train, precision=own.precision))
        flops = cost(config, vocabulary, config.train.steps)
    except ValueError as error:
        raise ValueError(f"entries.{label}: {error}") from error
    return Entry(label, config, own.peaks or spec.peaks or (base.optimizer.peak,), flops)


def _solved(entry: Entry, budget: float, vocabulary: int) -> Entry:
    """Return the entry with as many steps as the budget pays for."""
    priced = partial(cost, entry.config, vocabulary)
    try:
        steps = affordable(priced, budget, entry.steps)
        return replace(entry, config=at(entry.config, steps=steps), flops=priced(steps))
    except ValueError as error:
        raise ValueError(f"entries.{entry.label}, at {budget:.3g} FLOPs: {error}") from error


def _check_list(name: str, given: Iterable[float] | None) -> None:
    if given is None:
        return
    listed = list(given)
    if not listed or len(set(listed)) < len(listed):
        raise ValueError(f"{name} is {listed}; a list of one or more different numbers is allowed")
