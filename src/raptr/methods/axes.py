"""The axes along which a subnetwork can be smaller than the model, as users write them.

    6-8-10-12                              layers run in each stage
    depth=6-8-10-12 mlp=2-3-4-4            several axes; those not named run whole
    mlp=768-1536-3072                      by dimension, as in the paper: 1, 2 and 4 of 4 parts of 768

Each axis is one setting of the method. All axes share the stages: one size for each stage.
"""

from collections.abc import Sequence

from raptr.methods.contract import Method
from raptr.settings import nearest
from raptr.subnetworks import Schedule
from raptr.subnetworks.schedule import parse_sizes
from raptr.subnetworks.value import WIDTHS, Width

AXES = {"depth": "schedule", "heads": "heads", "mlp": "parts"}  # the name on the command line: the method's setting


def by_axis(schedules: Sequence[str]) -> dict[str, str | None]:
    """The method's settings of the schedules given on the command line; None: the axis runs whole."""
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
        return settings  # any method with a schedule takes it
    return {setting: settings.get(setting) for setting in AXES.values()}


def narrowed(method: Method) -> list[Width]:
    """The axes, heads and parts, along which only a part of the model runs in some stage."""
    stages = [(phase, method.shape(phase.start)) for phase in method.phases()]
    return [axis for axis in WIDTHS if any(getattr(phase, axis) < getattr(shape, axis) for phase, shape in stages)]


def widened(method: Method) -> list[Width]:
    """The axes, heads and parts, along which the method adds to tensors that there are."""
    shapes = [method.shape(phase.start) for phase in method.phases()]
    return [axis for axis in WIDTHS if any(getattr(s, axis) < getattr(method.target, axis) for s in shapes)]


def whole_depth(layers: int, heads: str | None, parts: str | None) -> str | None:
    """All layers in every stage of another axis; None: no other axis has a schedule."""
    for name, text in (("heads", heads), ("parts", parts)):
        if text is not None:
            return "-".join([str(layers)] * len(parse_sizes(text, name)))
    return None


def unit_counts(setting: str, text: str | None, total: int, stages: Schedule) -> tuple[int, ...]:
    """How many of `total` heads or MLP parts there are in each stage, a full-model start among them; None: all."""
    if text is None:
        return (total,) * len(stages.stages)
    counts, start = parse_sizes(text, setting), 1 if stages.full_start else 0
    named = len(stages.stages) - start
    if len(counts) != named or list(counts) != sorted(counts) or counts[0] < 1 or counts[-1] != total:
        raise ValueError(
            f"{setting} is {text!r}; one size for each of the {named} stages of schedule {stages.text}, never falling "
            f"and ending with all {total}, is allowed"
        )
    return (total,) * start + counts


def in_units(setting: str, text: object, units: int, size: int) -> object:
    """Sizes by dimension as numbers of units: `768-1536-3072` is `1-2-4` where the 4 units are of size 768.

    Sizes that end with the whole dimension, `units` times `size`, are by dimension; all others stay as they are.
    """
    if not isinstance(text, str):
        return text
    sizes = parse_sizes(text, setting)
    if sizes[-1] != units * size:
        return text
    if any(number % size for number in sizes):
        raise ValueError(f"{setting} is {text!r}; multiples of {size}, up to {units * size}, are allowed")
    return "-".join(str(number // size) for number in sizes)
