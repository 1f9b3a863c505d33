"""Opening and checking the prepared text of a run."""

from pathlib import Path

from rich.console import Console

from raptr.data import TokenStore
from raptr.data.prepare import prepare_builtin
from raptr.train.config import BUILTIN, Config


def open_data(config: Config, run: Path, console: Console, *, verify: bool = False) -> TokenStore:
    """Return the prepared tokens after checking them; the built-in text is prepared beside the run on first use.

    Files that were checked before and have not changed since are read again only if `verify` is set. Raises ValueError
    if data.source is missing.
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
