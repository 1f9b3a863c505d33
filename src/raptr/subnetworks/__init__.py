"""Which part of the model runs in a step: the subnetwork, its schedule, sampling and scaling. No torch here."""

from raptr.subnetworks.schedule import Schedule, Stage
from raptr.subnetworks.value import Shape, Subnetwork

__all__ = ["Schedule", "Shape", "Stage", "Subnetwork"]
