"""Which method to take, by what was measured: the choice of `method.name: auto`.

`measured.json` has what each method came to at each size and length, against full training. `make results` writes it
from the records of the comparisons (docs/results/), so a new record changes the choice without a change here.

The steps of a run stay as they are given. So a method comes first that in three seeds ended below full training with no
more steps than that had; then one that did with more steps; then one that did on fewer seeds; then one that ended below
full training with the same FLOPs, in three seeds before fewer. docs/results/which-method.md has the reasons.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raptr.methods import METHODS, Method
from raptr.methods.axes import AXES
from raptr.settings import check_choice, listed, read
from raptr.subnetworks.schedule import Schedule, parse_sizes
from raptr.subnetworks.value import WIDTHS, Width

if TYPE_CHECKING:  # it imports this module
    from raptr.train.config import Config

AUTO = "auto"  # method.name: take what was best in the nearest measurement
TABLE = Path(__file__).with_name("measured.json")
SEEDS = 3  # what rests on fewer is preliminary
NEAR = 2.0  # a measurement is far where depth, width or tokens per weight differ by a larger factor
REACH = 4.0  # methods that were measured within this factor are compared with each other
SAME = 1.005  # relative steps that count as the same
OF_STEPS = ("full_start", "mask_steps")  # settings that are a part of the run, in steps
OF_STAGES = ("schedule", "lengths", "average")  # settings that say how large the stages are, and how long
OF_DEPTH = ("fixed", "groups")  # settings that hold for one number of layers only


@dataclass(frozen=True)
class Difference:
    """A mean difference in held-out loss over some seeds, and the half-width of its 95% interval."""

    mean: float
    interval: float | None
    seeds: int

    @property
    def low(self) -> float:
        """The lower end of the interval; with one seed, the difference."""
        return self.mean - (self.interval or 0.0)

    @property
    def high(self) -> float:
        """The upper end of the interval; with one seed, the difference."""
        return self.mean + (self.interval or 0.0)

    @property
    def below(self) -> bool:
        """Whether it is below 0 with its whole interval."""
        return self.high < 0

    def __str__(self) -> str:
        interval = "" if self.interval is None else f" ± {self.interval:.3f}"
        return f"{abs(self.mean):.3f}{interval} {'below' if self.mean < 0 else 'above'}"


@dataclass(frozen=True)
class Place:
    """A kind of model, its size and the length of its training: what a choice depends on."""

    family: str
    objective: str
    init: str
    layers: int
    width: int
    heads: int
    parts: int
    tokens_per_weight: float  # of the layers' weights, in full training

    def factor(self, other: "Place") -> float:
        """The largest factor between depths, widths or lengths."""
        return max(max(a / b, b / a) for a, b in zip(self._sizes, other._sizes, strict=True))

    def distance(self, other: "Place") -> float:
        """How far apart two places are, in doublings."""
        return math.dist(*([math.log2(size) for size in place._sizes] for place in (self, other)))

    def learns_as(self, other: "Place") -> bool:
        """Whether both are the same kind of model with the same objective."""
        return (self.family, self.objective) == (other.family, other.objective)

    def near(self, other: "Place") -> bool:
        """Whether what was measured at one holds for the other, as far as we know."""
        return self.learns_as(other) and round(self.factor(other), 3) <= NEAR

    @property
    def _sizes(self) -> tuple[float, float, float]:
        return self.layers, self.width, self.tokens_per_weight

    def __str__(self) -> str:
        size = f"{self.layers} layers of width {self.width}"
        return f"{size} and {_short(self.tokens_per_weight)} tokens per weight"


@dataclass(frozen=True)
class Measured:
    """What an entry of a comparison came to at its best learning rate, against full training of `full_steps` steps."""

    record: str
    entry: str
    place: Place
    method: Mapping[str, Any]  # its name, and the settings that are not its defaults
    steps: int
    full_steps: int
    flops: float  # relative to full training
    loss: float
    to_full: Difference
    to_reduced: Difference  # to full training with the same FLOPs
    older: bool = False  # decayed over as many steps as full training, not over the same fraction of its own

    @property
    def longer(self) -> float:
        """How many times the steps of full training it had."""
        return self.steps / self.full_steps

    def settings(self, place: Place, steps: int) -> dict[str, Any] | None:
        """The method for the model of a place and a run of this length; None where it cannot be carried over."""
        units = {axis: getattr(place, axis) for axis in WIDTHS}
        return scaled(self.method, place.layers / self.place.layers, steps / self.steps, units)


def scaled(
    method: Mapping[str, Any], depth: float, length: float, units: Mapping[Width, int] | None = None
) -> dict[str, Any] | None:
    """A method for a model `depth` times as deep and a run `length` times as long; None where that has no meaning.

    `units` are the model's numbers of heads and MLP parts, where they differ from the method's.
    """
    made = dict(method)
    if depth != 1 and any(key in made for key in OF_DEPTH):
        return None
    if "schedule" in made:
        least = 2 if made["name"] == "raptr" else 1  # of RaPTr two layers are fixed
        made["schedule"] = _resized(made["schedule"], depth, least)
        if "average" in made:
            made["average"] = made["average"] * depth
    for axis, count in (units or {}).items():
        if axis in made:
            sizes = parse_sizes(made[axis])
            if count < len(set(sizes)):
                return None
            made[axis] = _resized(made[axis], count / sizes[-1], 1)
    return made | {key: _rounded(made[key] * length) for key in OF_STEPS if key in made}


def _resized(text: str, factor: float, least: int) -> str:
    sizes = [_rounded(size * factor) for size in parse_sizes(text)]
    return "-".join(str(max(min(sizes[-1], least), size)) for size in sizes)


@cache
def table() -> tuple[Measured, ...]:
    """What was measured, as it is packaged."""
    return tuple(from_json(json.loads(TABLE.read_text(encoding="utf-8"))))


def from_json(rows: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """The measurements of a JSON list."""
    kinds: dict[str, type] = {"place": Place, "to_full": Difference, "to_reduced": Difference}
    return [read(Measured, {**row, **{key: read(kind, row[key]) for key, kind in kinds.items()}}) for row in rows]


def check(config: "Config") -> None:
    """Refuse an unknown method, and `auto` together with what it would have to know."""
    check_choice("method.name", config.method["name"], (*METHODS, AUTO))
    others = [f"method.{key}" for key, value in config.method.items() if key != "name" and value is not None]
    others += ["model.start"] if config.model.start is not None else []
    if config.method["name"] == AUTO and others:
        raise ValueError(
            f"method.name is auto with {others[0]}; auto is for new models and chooses every setting of "
            "the method. Name a method instead."
        )


def decided(config: "Config") -> Mapping[str, Any]:
    """The method of a configuration and its settings, chosen where that says `auto`."""
    if config.method["name"] != AUTO:
        return config.method
    found = best_for(config)
    settings = None if found is None else found.settings(place_of(config), config.train.steps)
    return settings or {"name": "full"}


def best_for(config: "Config") -> Measured | None:
    """The measurement whose method is to be taken for a run; None: full training."""
    measured = table()
    if config.optimizer.name != "adamw":  # muon cannot run some of the heads or parts, adafactor not add to them
        measured = tuple(row for row in measured if not any(axis in row.method for axis in WIDTHS))
    return best(place_of(config), measured)


def place_of(config: "Config") -> Place:
    """What the choice for a run depends on."""
    dimensions = config.dimensions
    weights = dimensions.layers * dimensions.layer_weights(dimensions.shape.heads, dimensions.shape.parts)
    tokens = config.train.steps * config.train.batch * config.data.length
    shape = dimensions.shape
    size = dimensions.init, dimensions.layers, dimensions.width, shape.heads, shape.parts
    return Place(config.model.family, config.objective.name, *size, tokens / weights)


def named(method: Mapping[str, Any]) -> str:
    """A method with its schedules and its other settings, as a person writes it."""
    others = [] if method.get("average") is None else [f"stages of {_shares(method)}"]
    sizes = {axis: method[setting] for axis, setting in AXES.items() if method.get(setting) is not None}
    schedules = [text if sizes.keys() == {"depth"} else f"{axis}={text}" for axis, text in sizes.items()]
    shown = ("name", *AXES.values(), *(("lengths", "average") if others else ()))
    others += [
        key if value is True else f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in method.items()
        if key not in shown
    ]
    listed = f"({', '.join(others)})" if others else ""
    return " ".join(filter(None, (method["name"], *schedules, listed)))


def _shares(method: Mapping[str, Any]) -> str:
    """The lengths of the stages of a schedule with an average: 20, 20 and 60%."""
    text, steps, lengths = method["schedule"], 100_000, method.get("lengths")
    layers = parse_sizes(text)[-1]
    fitted = Schedule.parse(text, layers=layers, steps=steps, lengths=lengths, average=method["average"], fixed=())
    *others, last = (f"{(stage.stop - stage.start) / steps * 100:.0f}" for stage in fitted.stages)
    return f"{', '.join(others)} and {last}%"


def best(place: Place, measured: Sequence[Measured]) -> Measured | None:
    """The measurement whose method is to be taken at a place; None: full training.

    Each method is judged where it was measured nearest. Those within a factor of REACH are compared; where there are
    none, those at the nearest place.
    """
    alike = [row for row in measured if row.place.learns_as(place)]
    alike = alike or [row for row in measured if row.place.family == place.family] or list(measured)
    reached = [row for row in nearest(place, alike) if row.settings(place, row.steps) is not None]
    least = min((row.place.distance(place) for row in reached), default=0.0)
    pool = [row for row in reached if row.place.factor(place) <= REACH]
    pool = pool or [row for row in reached if row.place.distance(place) == least]
    return min((row for row in pool if row.to_reduced.below), key=lambda row: _worth(place, row), default=None)


def nearest(place: Place, measured: Sequence[Measured]) -> list[Measured]:
    """Of each method what was measured nearest to a place, once for each schedule that it had there."""
    by_method: dict[str, list[Measured]] = {}
    for row in sorted(measured, key=lambda row: _order(place, row)):
        rest = {key: value for key, value in row.method.items() if key not in OF_STAGES}
        by_method.setdefault(json.dumps(rest, sort_keys=True), []).append(row)
    found: dict[str, Measured] = {}
    for first, *others in by_method.values():
        for row in (first, *(row for row in others if row.place == first.place)):
            found.setdefault(json.dumps(row.method, sort_keys=True), row)
    return list(found.values())


def matching(place: Place, method: Mapping[str, Any], steps: int, measured: Sequence[Measured]) -> Measured | None:
    """The nearest measurement of a method with these settings; None where it was not measured near this place."""
    rows = [row for row in measured if row.place.near(place) and _same(row.settings(place, steps), method)]
    return min(rows, key=lambda row: _order(place, row), default=None)


def plain_settings(method: Method) -> dict[str, Any]:
    """A method's name with those of its settings that are not its defaults."""
    given = {key: listed(value) for key, value in method.settings().items()}
    if given.get("lengths") == "equal" and given.get("average") is None:
        given["lengths"] = None  # which is what none means
    narrower = any(given.get(axis) is not None for axis in WIDTHS)
    if narrower and given.get("average") is None and len(set(parse_sizes(given["schedule"]))) == 1:
        given["schedule"] = None  # all layers, which is what none means beside heads or parts
    defaults = {key: listed(getattr(type(method), key, None)) for key in given}
    for key in OF_STEPS:
        default: dict[str, Any] = {key: defaults.get(key)}
        if key in given and replace(method, **default).settings()[key] == given[key]:
            given[key] = None  # what the method takes for this many steps by itself
    changed = {key: value for key, value in given.items() if value is not None and value != defaults[key]}
    return {"name": method.name, **changed}


def _worth(place: Place, row: Measured) -> tuple[int, float, float]:
    """The smaller, the better: what is known of the method, then how near that was measured, then the loss."""
    as_good, sure = row.to_full.below, row.to_full.seeds >= SEEDS
    if as_good and sure:
        rank = 0 if row.longer <= SAME else 1
    elif as_good:
        rank = 2
    else:
        rank = 3 if sure else 4
    return rank, _apart(place, row), row.to_full.mean


def _order(place: Place, row: Measured) -> tuple[float, bool, bool, int]:
    other_init = row.place.init != place.init
    return _apart(place, row), other_init, row.older, -row.to_full.seeds


def _apart(place: Place, row: Measured) -> float:
    """The distance as far as it counts: a few steps more or less in a run do not decide between two places."""
    return round(row.place.distance(place), 1)


def _same(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    """Whether two methods have the same settings, up to what rounding to whole steps changes."""
    if one is None or one.keys() != other.keys():
        return False
    pairs = [(one[key], other[key]) for key in one]
    return all(a == b or (_number(a) and _number(b) and math.isclose(a, b, rel_tol=0.01)) for a, b in pairs)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rounded(value: float) -> int:
    return math.floor(value + 0.5)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
