"""The extra `train`: what the commands and `raptr.pretrain` need besides torch and numpy."""

from importlib.util import find_spec

TRAIN = ("matplotlib", "rich", "safetensors", "tensorboard", "tokenizers", "transformers", "typer", "yaml")


class MissingExtra(ImportError):
    """A package of an extra is not installed."""


def require_train(user: str) -> None:
    """Refuse `user` at once where a package of the extra is missing: some are imported only at the end of a run."""
    missing = [module for module in TRAIN if find_spec(module) is None]
    if missing:
        raise MissingExtra(
            f"{user} needs the extra train (not installed: {', '.join(missing)}); "
            "install it with pip install 'raptr[train]'"
        )
