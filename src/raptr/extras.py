"""The extras: what commands, `raptr.pretrain`, few-shot tasks and callbacks need besides torch and numpy."""

from importlib.util import find_spec

TRAIN = ("matplotlib", "rich", "safetensors", "tensorboard", "tokenizers", "transformers", "typer", "yaml")
TRAINER = ("accelerate", "transformers")
LIGHTNING = ("lightning",)
EVAL = ("lm_eval", "datasets")


class MissingExtra(ImportError):
    """A package of an extra is not installed."""


def require_train(user: str) -> None:
    """Refuse `user` at once where a package of the extra is missing: some are imported only at the end of a run."""
    require(user, "train", TRAIN)


def require(user: str, extra: str, packages: tuple[str, ...]) -> None:
    """Refuse `user` where a package of the extra is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtra(
            f"{user} needs the extra {extra} (not installed: {', '.join(missing)}); "
            f"install it with pip install 'raptr[{extra}]'"
        )
