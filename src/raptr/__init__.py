"""Progressive subnetwork training: pretrain Transformers with less compute.

schedule = Schedule.recommended(layers=12, steps=100_000)
method = make_method("raptr", shape=Shape(layers=12), schedule=schedule)
routed = attach(model)
with running(routed, method.subnetwork(step)):
    loss = model(**batch).loss
"""

from raptr.comparison import compare
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
]
