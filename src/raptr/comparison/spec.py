"""A comparison as it is written in YAML, checked and solved: which runs there are, and how long each one is.

    recipe: demo                      optional: settings start from a recipe's
    settings:                         sections as in any config.yaml
      train: {steps: 2000, batch: 64}
    seeds: [0, 1, 2]
    peaks: [5.0e-4, 1.0e-3, 2.0e-3]   optional: the learning rates of every entry that names none
    tune: [0]                         optional: the seeds on which learning rates are compared; others run at the best
    widen: true                       optional: extend a grid by factors of two until its best rate lies inside
    flops: 0.75                       optional: every entry gets this fraction of full training's FLOPs
    evaluate: {...}                   optional: judge the models by tasks; see tasks.py
    entries:                          a method each, as under `method` in config.yaml
      full: {name: full}
      raptr: {name: raptr, schedule: 6-8-10-12}
      zeros: {name: raptr, optimizer: {idle: zero}, peaks: [1.0e-3]}
      wide: {name: raptr, model: {init: fan-in}}

Without `flops` every entry takes train.steps steps and spends what it spends. With it, every entry takes as many steps
as its budget pays for, by the closed form of its whole plan, expected FLOPs where it draws at random. A shorter full
training is always there too, `full (reduced)`, since that is what a cheaper method must beat: at the budget, or,
without one, at the mean FLOPs of the entries that cost less than full training. The warm-up lasts as many steps in
every run; the decay lasts the same fraction of each run's own steps, and every learning rate has decayed at its end.

Which runs there are can depend on what others came to (`tune`, `widen`): see search.py.
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
OWN_MODEL = ("init", "residual_multiplier", "norm_scaling")  # settings of the model that an entry may have of its own
LONGEST = 150  # bytes of a label in the name of a run's folder; with rate and seed, file systems allow 255
TOLERANCE = 1e-9  # a budget counts as kept within this relative error


@dataclass(frozen=True)
class Entry:
    """One line of the comparison: a configuration at its number of steps, the rates to try, a run's planned FLOPs."""

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
        """What tells the runs of a comparison apart: label, learning rate, seed."""
        return self.entry.label, self.peak, self.seed

    @property
    def terms(self) -> tuple[float, int, int]:
        """What the same run has in every comparison, beside its configuration: learning rate, seed, steps."""
        return self.peak, self.seed, self.entry.steps

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{slug(self.entry.label)}-peak{self.peak!r}-seed{self.seed}"


@dataclass(frozen=True)
class Comparison:
    """A whole comparison; `fraction` is the cost of the reduced full run, None where there is none."""

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
        """How many runs there are if no grid is widened."""
        others = len(self.seeds) - len(self.tune)
        return sum(len(entry.peaks) * len(self.tune) + others for entry in self.entries)

    @property
    def rounds(self) -> list[tuple[int, ...]]:
        """The seeds in the order in which models are judged: those on which learning rates are compared, then each."""
        return [self.tune, *((seed,) for seed in self.seeds if seed not in self.tune)]

    @property
    def planned_flops(self) -> float:
        others = len(self.seeds) - len(self.tune)
        return sum(entry.flops * (len(entry.peaks) * len(self.tune) + others) for entry in self.entries)

    def table(self) -> Table:
        """The entries for a terminal, before anything is trained."""
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
    """The keys of the file."""

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
    """What an entry may have beside its method's settings."""

    optimizer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)  # of OWN_MODEL alone: entries share the dimensions
    precision: Precision | None = None
    peaks: tuple[float, ...] | None = None


def read_file(path: Path) -> dict[str, Any]:
    """A comparison's YAML file as it stands there."""
    given = read_yaml(path, "comparison")
    if given is None:
        raise ValueError(f"comparison {str(path)!r} is empty; a mapping with settings and entries is needed")
    if not isinstance(given, dict):
        raise ValueError(f"comparison {str(path)!r} is {given!r}; a mapping with settings and entries is allowed")
    return given


def read_comparison(given: Mapping[str, Any], *, device: str | None = None) -> Comparison:
    """Check a comparison, solve its budgets and build the configuration of every run; unknown keys are errors."""
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
    """Refuse an entry whose trained models no evaluation can load."""
    from raptr.train.exporting import judged  # imports transformers, which is slow

    try:
        judged(entry.config.make_method(), entry.steps)
    except ValueError as error:
        what = f"evaluate is given, but the models of entry {entry.label!r} cannot be evaluated"
        raise ValueError(f"{what}. {error}") from None


def affordable(cost: Callable[[int], float], budget: float, start: int) -> int:
    """The largest number of steps that costs no more than `budget`, searched from `start`; more steps cost more."""
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
    """The whole model's FLOPs of a run of `steps` steps, planned."""
    dimensions = config.model.build(vocabulary, config.data.length)
    # The learning rate costs nothing, and a trial of few steps has no room for its warm-up and decay.
    plain = replace(config, optimizer=replace(config.optimizer, warmup=0, decay=0.0))
    method = at(plain, steps=steps).make_method()
    return planned_flops(dimensions, method, **config.step_load).total


def at(config: Config, *, steps: int | None = None, peak: float | None = None, seed: int | None = None) -> Config:
    """The same configuration with another number of steps, learning rate or seed."""
    train = replace(
        config.train,
        steps=config.train.steps if steps is None else steps,
        seed=config.train.seed if seed is None else seed,
    )
    optimizer = replace(config.optimizer, peak=config.optimizer.peak if peak is None else peak)
    return replace(config, train=train, optimizer=optimizer)


def slug(label: str) -> str:
    """The label as part of a folder's name."""
    return re.sub(r"[^\w.]+", "-", label).strip("-.")


def _base(spec: _Spec, device: str | None) -> Config:
    """The settings that all entries share."""
    recipe = RECIPES[spec.recipe]() if spec.recipe else {}
    for section, given in spec.settings.items():
        if section not in SECTIONS:
            raise ValueError(
                f"settings.{section} is no section of a comparison; {nearest(section, SECTIONS)}"
                f"allowed: {', '.join(SECTIONS)}"
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
    """Every entry at train.steps steps, full training first where it is not given."""
    given = dict(spec.entries) if FULL in spec.entries else {FULL: {"name": FULL}, **spec.entries}
    entries = {label: _entry(label, values, spec, base, vocabulary) for label, values in given.items()}
    if entries[FULL].config.method["name"] != FULL:
        raise ValueError(f"entries.full is the method {given[FULL]['name']!r}; under this name only full is allowed")
    names = Counter(slug(label) for label in (*given, REDUCED))
    for label in given:
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
    owned = [entry.name for entry in fields(_Own)]
    if given["name"] == AUTO:
        raise ValueError(f"entries.{label}.name is auto; a comparison names its methods: {', '.join(METHODS)}")
    check_choice(f"entries.{label}.name", given["name"], METHODS)
    allowed = ["name", *sorted(METHODS[given["name"]].own_settings()), *owned]
    for key in given:
        if key not in allowed:
            raise ValueError(
                f"entries.{label}.{key} is no setting; {nearest(key, allowed)}allowed: {', '.join(allowed)}"
            )
    own = read(_Own, {key: given[key] for key in owned if key in given}, f"entries.{label}.")
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
    method = {key: value for key, value in given.items() if key not in owned}
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
    """The entry with as many steps as the budget pays for."""
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
