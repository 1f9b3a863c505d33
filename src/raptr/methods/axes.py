"""The axes along which a subnetwork can be smaller than the model, as users write them.

    6-8-10-12                              layers that run in each stage
    depth=6-8-10-12 mlp=2-3-4-4            several axes; an axis that is not named runs whole
    mlp=768-1536-3072                      as dimensions, like the paper: 1, 2 and 4 of 4 parts of 768

Each axis is one setting of the method. All axes share the stages: each gives one size for every stage.
"""

from collections.abc import Sequence

from raptr.methods.contract import Method
from raptr.settings import nearest
from raptr.subnetworks import Schedule
from raptr.subnetworks.schedule import parse_sizes
from raptr.subnetworks.value import WIDTHS, Width

AXES = {"depth": "schedule", "heads": "heads", "mlp": "parts"}  # name on the command line: the method's setting


def by_axis(schedules: Sequence[str]) -> dict[str, str | None]:
    """Turn schedules from the command line into the method's settings; None for an axis that runs whole."""
    settings: dict[str, str | None] = {}
    for text in schedules:
        axis, separator, sizes = text.rpartition("=")
        axis = axis if separator else "depth"
        if axis not in AXES:
            raise ValueError(
                f"--schedule is {text!r}; {nearest(axis, AXES)}SIZES or AXIS=SIZES is allowed, such as 6-8-10-12 or "
                f"mlp=1-2-4, with one of the axes {', '.join(AXES)}"
            )
        if AXES[axis] in settings:
            raise ValueError(f"--schedule has two schedules for {axis}, the last of them {sizes!r}. Give one.")
        settings[AXES[axis]] = sizes
    if set(settings) <= {AXES["depth"]}:
        return settings  # only depth, which every method with a schedule accepts
    return {setting: settings.get(setting) for setting in AXES.values()}


def narrowed(method: Method) -> list[Width]:
    """Return the axes (heads, parts) along which only a part of the model runs in some stage."""
    stages = [(phase, method.shape(phase.start)) for phase in method.phases()]
    return [axis for axis in WIDTHS if any(getattr(phase, axis) < getattr(shape, axis) for phase, shape in stages)]


def widened(method: Method) -> list[Width]:
    """Return the axes (heads, parts) along which the method enlarges existing tensors as the model grows."""
    shapes = [method.shape(phase.start) for phase in method.phases()]
    return [axis for axis in WIDTHS if any(getattr(s, axis) < getattr(method.target, axis) for s in shapes)]


def whole_depth(layers: int, heads: str | None, parts: str | None) -> str | None:
    """Return a depth schedule with all layers in each stage of `heads` or `parts`; None if neither has a schedule."""
    for name, text in (("heads", heads), ("parts", parts)):
        if text is not None:
            return "-".join([str(layers)] * len(parse_sizes(text, _as_written(name))))
    return None


def unit_counts(setting: str, text: str | None, total: int, stages: Schedule) -> tuple[int, ...]:
    """Return how many of `total` heads or MLP parts each stage has, a full-model start included; all if no `text`."""
    if text is None:
        return (total,) * len(stages.stages)
    counts, start = parse_sizes(text, _as_written(setting)), 1 if stages.full_start else 0
    named = len(stages.stages) - start
    if len(counts) != named or list(counts) != sorted(counts) or counts[0] < 1 or counts[-1] != total:
        raise ValueError(
            f"{_as_written(setting)} is {text!r}; one size for each of the {named} stages of schedule {stages.text}, "
            f"never falling and ending with all {total}, is allowed"
        )
    return (total,) * start + counts


def _as_written(setting: str) -> str:
    """Return an axis as the command line and the settings name it, such as `mlp (parts)`."""
    axis = next((axis for axis, name in AXES.items() if name == setting), setting)
    return axis if axis == setting else f"{axis} ({setting})"


def in_units(setting: str, text: object, units: int, size: int) -> object:
    """Turn dimensions into numbers of units: `768-1536-3072` into `1-2-4`, for 4 units of size 768.

    Sizes are dimensions if the last one is the whole dimension, `units` times `size`; others are returned unchanged.
    """
    if not isinstance(text, str):
        return text
    sizes = parse_sizes(text, _as_written(setting))
    if sizes[-1] != units * size:
        return text
    if any(number % size for number in sizes):
        raise ValueError(f"{_as_written(setting)} is {text!r}; multiples of {size}, up to {units * size}, are allowed")
    return "-".join(str(number // size) for number in sizes)
