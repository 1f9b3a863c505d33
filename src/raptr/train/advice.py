"""The choice of a method from measurements: what `method.name: auto` means.

`measured.json` holds the results of each method at each model size and length of training, compared with full training.
`make results` derives it from the records of the comparisons (docs/results/), so a new record changes the choice
without a change here.

The number of steps of a run stays as the user set it. So methods are ranked by their measured held-out loss as follows,
for the reasons in docs/results/which-method.md:

1. below full training on three seeds or more, with no more steps than full training
2. the same with more steps
3. below full training on fewer seeds
4. below full training with the same FLOPs, on three seeds or more
5. the same on fewer seeds
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

if TYPE_CHECKING:  # a circular import otherwise
    from raptr.train.config import Config

AUTO = "auto"  # method.name: take the method that was best in the nearest measurement
TABLE = Path(__file__).with_name("measured.json")
SEEDS = 3  # results on fewer seeds are preliminary
NEAR = 2.0  # a measurement is far if depth, width or tokens per weight differ by a larger factor
REACH = 4.0  # methods that were measured within this factor of a run are compared with each other
SAME = 1.005  # up to this ratio, two numbers of steps count as the same
OF_STEPS = ("full_start", "mask_steps")  # settings in steps, which scale with the length of the run
OF_STAGES = ("schedule", "lengths", "average")  # settings that define the sizes and lengths of the stages
OF_DEPTH = ("fixed", "groups")  # settings that make sense for one number of layers only


@dataclass(frozen=True)
class Difference:
    """A mean difference in held-out loss over seeds, and the half-width of its 95% interval (None with one seed)."""

    mean: float
    interval: float | None
    seeds: int

    @property
    def low(self) -> float:
        """The lower end of the interval; with one seed, the difference itself."""
        return self.mean - (self.interval or 0.0)

    @property
    def high(self) -> float:
        """The upper end of the interval; with one seed, the difference itself."""
        return self.mean + (self.interval or 0.0)

    @property
    def below(self) -> bool:
        """Whether the whole interval is below 0."""
        return self.high < 0

    def __str__(self) -> str:
        interval = "" if self.interval is None else f" ± {self.interval:.3f}"
        return f"{abs(self.mean):.3f}{interval} {'below' if self.mean < 0 else 'above'}"


@dataclass(frozen=True)
class Place:
    """What a choice depends on: the kind of model, its size and the length of its training."""

    family: str
    objective: str
    init: str
    layers: int
    width: int
    heads: int
    parts: int
    tokens_per_weight: float  # training tokens per weight of the layers, in full training

    def factor(self, other: "Place") -> float:
        """Return the largest of the factors by which depth, width and tokens per weight differ."""
        return max(max(a / b, b / a) for a, b in zip(self._sizes, other._sizes, strict=True))

    def distance(self, other: "Place") -> float:
        """Return the Euclidean distance between two places, in doublings of depth, width and tokens per weight."""
        return math.dist(*([math.log2(size) for size in place._sizes] for place in (self, other)))

    def learns_as(self, other: "Place") -> bool:
        """Return whether both have the same family of models and the same objective."""
        return (self.family, self.objective) == (other.family, other.objective)

    def near(self, other: "Place") -> bool:
        """Return whether a measurement at one place holds for the other, as far as we know."""
        return self.learns_as(other) and round(self.factor(other), 3) <= NEAR

    @property
    def _sizes(self) -> tuple[float, float, float]:
        return self.layers, self.width, self.tokens_per_weight

    def __str__(self) -> str:
        size = f"{self.layers} layers of width {self.width}"
        return f"{size} and {_short(self.tokens_per_weight)} tokens per weight"


@dataclass(frozen=True)
class Measured:
    """The result of a comparison's entry at its best learning rate, against full training of `full_steps` steps."""

    record: str
    entry: str
    place: Place
    method: Mapping[str, Any]  # its name, and the settings that differ from its defaults
    steps: int
    full_steps: int
    flops: float  # relative to full training
    loss: float
    to_full: Difference
    to_reduced: Difference  # to full training with the same FLOPs
    older: bool = False  # its learning rate decayed over as many steps as full training's, not over the same fraction

    @property
    def longer(self) -> float:
        """The number of its steps relative to full training."""
        return self.steps / self.full_steps

    def settings(self, place: Place, steps: int) -> dict[str, Any] | None:
        """Return the method, scaled to the model at `place` and a run of `steps` steps; None if it cannot be scaled."""
        units = {axis: getattr(place, axis) for axis in WIDTHS}
        return scaled(self.method, place.layers / self.place.layers, steps / self.steps, units)


def scaled(
    method: Mapping[str, Any], depth: float, length: float, units: Mapping[Width, int] | None = None
) -> dict[str, Any] | None:
    """Return a method scaled to a model `depth` times as deep and a run `length` times as long.

    `units` are that model's numbers of heads and MLP parts, to which the method's schedules for them are scaled. Return
    None if a setting cannot be scaled, or if there are fewer heads or parts than different sizes in a schedule.
    """
    settings = dict(method)
    if depth != 1 and any(key in settings for key in OF_DEPTH):
        return None
    if "schedule" in settings:
        least = 2 if settings["name"] == "raptr" else 1  # RaPTr always runs the first and the last layer
        settings["schedule"] = _resized(settings["schedule"], depth, least)
        if "average" in settings:
            smallest = parse_sizes(settings["schedule"])[0]  # larger than the average if the model has a single layer
            settings["average"] = max(settings["average"] * depth, smallest)
    for axis, count in (units or {}).items():
        if axis in settings:
            sizes = parse_sizes(settings[axis])
            settings[axis] = _resized(settings[axis], count / sizes[-1], 1)
            # Rounding may have given every stage all of the units, which would be full training.
            if count < len(set(sizes)) or parse_sizes(settings[axis])[0] == count:
                return None
    return settings | {key: _rounded(settings[key] * length) for key in OF_STEPS if key in settings}


def _resized(text: str, factor: float, least: int) -> str:
    sizes = [_rounded(size * factor) for size in parse_sizes(text)]
    return "-".join(str(max(min(sizes[-1], least), size)) for size in sizes)


@cache
def table() -> tuple[Measured, ...]:
    """Return the measurements that come with the package."""
    return tuple(from_json(json.loads(TABLE.read_text(encoding="utf-8"))))


def from_json(rows: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """Return the measurements in a JSON list."""
    kinds: dict[str, type] = {"place": Place, "to_full": Difference, "to_reduced": Difference}
    return [read(Measured, {**row, **{key: read(kind, row[key]) for key, kind in kinds.items()}}) for row in rows]


def check(config: "Config") -> None:
    """Refuse an unknown method, and `auto` together with settings of a method or with `model.start`."""
    check_choice("method.name", config.method["name"], (*METHODS, AUTO))
    others = [f"method.{key}" for key, value in config.method.items() if key != "name" and value is not None]
    others += ["model.start"] if config.model.start is not None else []
    if config.method["name"] == AUTO and others:
        raise ValueError(
            f"method.name is auto with {others[0]}; auto is for new models and chooses every setting of "
            "the method. Name a method instead."
        )


def decided(config: "Config") -> Mapping[str, Any]:
    """Return the name and the settings of a configuration's method, chosen from the measurements if it says `auto`."""
    if config.method["name"] != AUTO:
        return config.method
    measured = best_for(config)
    settings = None if measured is None else measured.settings(place_of(config), config.train.steps)
    return settings or {"name": "full"}


def best_for(config: "Config") -> Measured | None:
    """Return the measurement whose method a run should take; None means full training."""
    measured = table()
    if config.optimizer.name != "adamw":  # muon refuses idle heads and parts, adafactor new ones
        measured = tuple(row for row in measured if not any(axis in row.method for axis in WIDTHS))
    return best(place_of(config), measured)


def place_of(config: "Config") -> Place:
    """Return the place of a run: what the choice of its method depends on."""
    dimensions = config.dimensions
    weights = dimensions.layers * dimensions.layer_weights(dimensions.shape.heads, dimensions.shape.parts)
    tokens = config.train.steps * config.train.batch * config.data.length
    shape = dimensions.shape
    size = dimensions.init, dimensions.layers, dimensions.width, shape.heads, shape.parts
    return Place(config.model.family, config.objective.name, *size, tokens / weights)


def named(method: Mapping[str, Any]) -> str:
    """Return a method with its schedules and other settings as a person would write it."""
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
    """Return the lengths of the stages of a schedule with an average, such as `20, 20 and 60%`."""
    text, steps, lengths = method["schedule"], 100_000, method.get("lengths")
    layers = parse_sizes(text)[-1]
    fitted = Schedule.parse(text, layers=layers, steps=steps, lengths=lengths, average=method["average"], fixed=())
    *others, last = (f"{(stage.stop - stage.start) / steps * 100:.0f}" for stage in fitted.stages)
    return f"{', '.join(others)} and {last}%"


def best(place: Place, measured: Sequence[Measured]) -> Measured | None:
    """Return the measurement whose method should be taken at a place; None means full training.

    Each method is judged by its nearest measurement. Those within a factor of REACH are compared; if there are none,
    those at the nearest place.
    """
    alike = [row for row in measured if row.place.learns_as(place)]
    alike = alike or [row for row in measured if row.place.family == place.family] or list(measured)
    reached = [row for row in nearest(place, alike) if row.settings(place, row.steps) is not None]
    least = min((row.place.distance(place) for row in reached), default=0.0)
    pool = [row for row in reached if row.place.factor(place) <= REACH]
    pool = pool or [row for row in reached if row.place.distance(place) == least]
    return min((row for row in pool if row.to_reduced.below), key=lambda row: _worth(place, row), default=None)


def nearest(place: Place, measured: Sequence[Measured]) -> list[Measured]:
    """Return the measurements of each method at the place nearest to this one, one for each of its schedules there."""
    by_method: dict[str, list[Measured]] = {}
    for row in sorted(measured, key=lambda row: _order(place, row)):
        rest = {key: value for key, value in row.method.items() if key not in OF_STAGES}
        by_method.setdefault(json.dumps(rest, sort_keys=True), []).append(row)
    by_schedule: dict[str, Measured] = {}
    for first, *others in by_method.values():
        for row in (first, *(row for row in others if row.place == first.place)):
            by_schedule.setdefault(json.dumps(row.method, sort_keys=True), row)
    return list(by_schedule.values())


def matching(place: Place, method: Mapping[str, Any], steps: int, measured: Sequence[Measured]) -> Measured | None:
    """Return the nearest measurement of a method with these settings; None if it was not measured near this place."""
    rows = [row for row in measured if row.place.near(place) and _same(row.settings(place, steps), method)]
    return min(rows, key=lambda row: _order(place, row), default=None)


def plain_settings(method: Method) -> dict[str, Any]:
    """Return a method's name with those of its settings that differ from its defaults."""
    settings = {key: listed(value) for key, value in method.settings().items()}
    if settings.get("lengths") == "equal" and settings.get("average") is None and "growth_at" not in settings:
        settings["lengths"] = None  # None means equal lengths, unless another setting says when the model grows
    narrower = any(settings.get(axis) is not None for axis in WIDTHS)
    if narrower and settings.get("average") is None and len(set(parse_sizes(settings["schedule"]))) == 1:
        settings["schedule"] = None  # None means all layers if heads or parts have sizes
    defaults = {key: listed(getattr(type(method), key, None)) for key in settings}
    for key in OF_STEPS:
        default: dict[str, Any] = {key: defaults.get(key)}
        if key in settings and replace(method, **default).settings()[key] == settings[key]:
            settings[key] = None  # the method computes the same value from its number of steps
    changed = {key: value for key, value in settings.items() if value is not None and value != defaults[key]}
    return {"name": method.name, **changed}


def _worth(place: Place, row: Measured) -> tuple[int, float, float]:
    """Return a sort key, the smaller the better: the rank of the evidence, the distance, the loss."""
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
    """Return the distance rounded, so that a slightly longer or shorter run does not decide between two places."""
    return round(row.place.distance(place), 1)


def _same(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    """Return whether two methods have the same settings, up to rounding to whole steps."""
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
