"""The extras: packages that commands, `raptr.pretrain`, few-shot tasks and callbacks need besides torch and numpy."""

from importlib.util import find_spec

TRAIN = ("matplotlib", "rich", "safetensors", "tensorboard", "tokenizers", "transformers", "typer", "yaml")
TRAINER = ("accelerate", "transformers")
LIGHTNING = ("lightning",)
EVAL = ("lm_eval", "datasets")


class MissingExtra(ImportError):
    """A package of an extra is not installed."""


def require_train(user: str) -> None:
    """Raise MissingExtra now if a package of `train` is missing: some are imported only at the end of a run."""
    require(user, "train", TRAIN)


def require(user: str, extra: str, packages: tuple[str, ...]) -> None:
    """Raise MissingExtra if one of the packages is missing; `user` is the name of what needs them."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtra(
            f"{user} needs the extra {extra} (not installed: {', '.join(missing)}); {installed_by(extra)}"
        )


def installed_by(extra: str) -> str:
    """Return how an extra is installed, as the last part of a message; raptr is not on a package index."""
    return f"install it with pip install '.[{extra}]' in the folder of raptr's sources"
