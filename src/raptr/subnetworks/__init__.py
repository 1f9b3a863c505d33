"""What runs in a step: the value, the schedule, the sampling, the scaling. No torch here."""

from raptr.subnetworks.schedule import Schedule, Stage
from raptr.subnetworks.value import Shape, Subnetwork

__all__ = ["Schedule", "Shape", "Stage", "Subnetwork"]
