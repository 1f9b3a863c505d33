"""The list of all methods, and the one function that makes a method."""

from typing import Any

from raptr.methods.contract import Method
from raptr.methods.double_then_part import DoubleThenPart
from raptr.methods.full import Full
from raptr.methods.g_stack import GStack
from raptr.methods.layer_dropout import LayerDropout
from raptr.methods.lemon import LEMON
from raptr.methods.midas import MIDAS
from raptr.methods.msg import MSG, MSGInterpolation
from raptr.methods.one_layer import OneLayer
from raptr.methods.pld import PLD
from raptr.methods.progressive_stacking import ProgressiveStacking
from raptr.methods.raptr import RaPTr
from raptr.methods.stacking import Stacking
from raptr.methods.stochastic_depth import LayerDrop, StochasticDepth
from raptr.settings import check_choice, nearest, values
from raptr.subnetworks import Schedule, Shape

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Full,
        RaPTr,
        PLD,
        StochasticDepth,
        LayerDrop,
        LayerDropout,
        Stacking,
        ProgressiveStacking,
        DoubleThenPart,
        GStack,
        MIDAS,
        OneLayer,
        LEMON,
        MSG,
        MSGInterpolation,
    )
}


def make_method(
    name: str,
    *,
    shape: Shape,
    steps: int | None = None,
    schedule: Schedule | str | None = None,
    seed: int = 0,
    **settings: Any,
) -> Method:
    """Make the method `name` for a model of the given shape; `settings` are the fields of its class.

    `steps` may be left out if `schedule` is a `Schedule`, which knows it. Unknown names or settings raise a ValueError.
    """
    check_choice("method", name, METHODS)
    if steps is None:
        if not isinstance(schedule, Schedule):
            raise ValueError("steps is missing; the number of training steps is needed")
        steps = schedule.steps
    method = METHODS[name]
    allowed = method.own_settings()
    if schedule is not None:
        settings["schedule"] = schedule
    for setting in settings:
        if setting not in allowed:
            raise ValueError(
                f"method {name} has no setting {setting!r}; {nearest(setting, allowed)}"
                f"allowed: {', '.join(allowed) or 'none'}"
            )
    return method(target=shape, steps=steps, seed=seed, **values(method, settings))
