"""The trackers by name. A new one is one file here and one entry below."""

from importlib.util import find_spec

from raptr.extras import installed_by
from raptr.train.trackers.contract import Tracker
from raptr.train.trackers.tensorboard import TensorBoard
from raptr.train.trackers.wandb import WandB

NONE = "none"
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}
NAMES = (*TRACKERS, NONE)


def check_installed(name: str) -> None:
    """Refuse a tracker whose package is not installed, before anything is computed."""
    kind = TRACKERS.get(name)
    if kind is not None and find_spec(kind.package) is None:
        raise ValueError(
            f"train.tracker is {name}, but the package {kind.package} is not installed. "
            f"Use {NONE}, or {installed_by(kind.extra)}."
        )
