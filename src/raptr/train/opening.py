"""The prepared text of a run: found and checked."""

from pathlib import Path

from rich.console import Console

from raptr.data import TokenStore
from raptr.data.prepare import prepare_builtin
from raptr.train.config import BUILTIN, Config


def open_data(config: Config, run: Path, console: Console, *, verify: bool = False) -> TokenStore:
    """The prepared tokens, checked; the built-in corpus is made beside the run on first use.

    Files that were found whole before and have not changed since are only read again to `verify` them.
    """
    source = config.data.source
    if source is None:
        raise ValueError(
            "data.source is missing. Give --data FOLDER, made by `raptr prepare`, or --data builtin for the text of "
            "the Python standard library."
        )
    if source == BUILTIN:
        with console.status("preparing the built-in text (the Python standard library) …"):
            specials = config.objective.kind.specials
            return prepare_builtin(run.parent / ".data", config.data.vocabulary, specials=specials)
    store = config.prepared(source)
    with console.status("checking the token shards …"):
        store.verify(anew=verify)
    return store
