"""Progressive subnetwork training: pretrain Transformers with less compute.

schedule = Schedule.recommended(layers=12, steps=100_000)
method = make_method("raptr", shape=Shape(layers=12), schedule=schedule)
routed = attach(model)
with running(routed, method.subnetwork(step)):
    loss = model(**batch).loss

Names are imported on first use, so that `import raptr` alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from raptr.extras import require_train

if TYPE_CHECKING:
    from raptr.comparison import compare
    from raptr.integrations.steps import stepwise
    from raptr.methods import METHODS, Method, make_method
    from raptr.models.attach import attach, running
    from raptr.subnetworks import Schedule, Shape, Subnetwork
    from raptr.train.config import Config
    from raptr.train.flops import flops
    from raptr.train.idle import idle
    from raptr.train.loop import pretrain
    from raptr.train.plan import plan

__all__ = [
    "METHODS",
    "Config",
    "Method",
    "Schedule",
    "Shape",
    "Subnetwork",
    "attach",
    "compare",
    "flops",
    "idle",
    "make_method",
    "plan",
    "pretrain",
    "running",
    "stepwise",
]

_MODULES = {
    "METHODS": "raptr.methods",
    "Config": "raptr.train.config",
    "Method": "raptr.methods",
    "Schedule": "raptr.subnetworks",
    "Shape": "raptr.subnetworks",
    "Subnetwork": "raptr.subnetworks",
    "attach": "raptr.models.attach",
    "compare": "raptr.comparison",
    "flops": "raptr.train.flops",
    "idle": "raptr.train.idle",
    "make_method": "raptr.methods",
    "plan": "raptr.train.plan",
    "pretrain": "raptr.train.loop",
    "running": "raptr.models.attach",
    "stepwise": "raptr.integrations.steps",
}
_TRAIN = {"Config", "compare", "pretrain"}  # the names that need the extra `train`


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'raptr' has no attribute {name!r}")
        if name in _TRAIN:
            require_train(f"raptr.{name}")
        value: object = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value  # later lookups find it without this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
