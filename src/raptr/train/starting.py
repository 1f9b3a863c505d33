"""Starting a run from an existing model in a folder of `transformers` (`model.start`) instead of random weights.

The dimensions come from the folder when the settings are read, with a checksum of its weights, `model.start_sha256`.
The weights are read at step 0 only: a resumed run reads its checkpoint, and no longer needs the folder.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raptr.data.store import TOKENIZER, TokenStore
from raptr.data.tokenizer import read_vocabulary
from raptr.files import sha256_of
from raptr.models.contract import Family, ModelConfig
from raptr.models.model import Model
from raptr.models.registry import FAMILIES
from raptr.models.stock import StockFolder
from raptr.settings import values

if TYPE_CHECKING:  # the exporter imports transformers, which is slow
    from raptr.models.export import Exporter


def with_start(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section `model` with family, dimensions and checksum from the folder; refuse different ones.

    If there is a checksum, the folder was read before and is not read again.
    """
    start, checksum = settings.get("start"), settings.get("start_sha256")
    if not isinstance(start, str) or checksum is not None:
        return settings
    folder = StockFolder(Path(start))
    if not folder.path.is_dir():
        raise ValueError(f"model.start is {start!r}, which is not a folder. Name the folder of a model (--init).")
    family, exporter = _known(folder)
    if (named := settings.get("family")) not in (None, family.name):
        raise ValueError(f"model.family is {named!r}; model.start is {start!r}, whose family is {family.name!r}")
    dimensions, known = exporter.dimensions(folder), [field.name for field in fields(family.config)]
    given = {key: settings[key] for key in known if settings.get(key) is not None}
    given, size = values(family.config, given, "model."), settings.get("size")
    base = family.sizes.get(str(size))
    theirs = replace(base or next(iter(family.sizes.values())), **{**given, **dimensions})
    ours = replace(base or theirs, **given)
    of_size = {key: f"model.size is {size!r}, whose {key}" for key in dimensions if key not in given}
    _check_dimensions(folder, ours, theirs, of_size)
    return {**settings, "family": family.name, **dimensions, "start_sha256": _checksum(folder)}


def start_vocabulary(start: str) -> int | None:
    """Return the vocabulary size of the model in the folder; None if the folder is gone or does not say."""
    folder = StockFolder(Path(start))
    size = folder.facts.get("vocab_size") if folder.path.is_dir() else None
    return size if type(size) is int and size > 0 else None


def load_start(start: str, checksum: str | None, model: Model, store: TokenStore) -> None:
    """Load the weights in the folder into a model; refuse weights with another checksum, and data with other tokens."""
    folder = StockFolder(Path(start))
    if not folder.path.is_dir():
        raise ValueError(f"model.start is {start!r}, which is gone. Put it back, since no checkpoint has its weights.")
    if (actual := _checksum(folder)) != checksum:
        raise ValueError(
            f"model.start is {start!r}, whose weights have changed (sha256 {actual}, in the settings {checksum}). "
            "Put the old ones back, or remove model.start_sha256 from the settings."
        )
    _check_vocabulary(folder, store)
    _, exporter = _known(folder)
    _check_dimensions(folder, model.config, replace(model.config, **exporter.dimensions(folder)))
    exporter.load(model, folder)


def _check_dimensions(
    folder: StockFolder, ours: ModelConfig, theirs: ModelConfig, named: Mapping[str, str] | None = None
) -> None:
    """Refuse dimensions that differ from the folder's; `named` says where ours come from if not from their setting."""
    for key, value in asdict(ours).items():
        if value != (expected := getattr(theirs, key)):
            name = (named or {}).get(key, f"model.{key}")
            raise ValueError(f"{name} is {value!r}; model.start is {str(folder.path)!r}, whose {key} is {expected!r}")


def _known(folder: StockFolder) -> tuple[Family, "Exporter"]:
    """Return the family whose stock class the folder's model has, and its exporter; a ValueError if there is none."""
    allowed: dict[str, str] = {}
    for family in FAMILIES.values():
        exporter = next(iter(family.sizes.values())).exporter()
        if exporter is not None:
            if exporter.stock == folder.architecture:
                return family, exporter
            allowed[exporter.stock] = family.name
    listed = ", ".join(f"{stock} ({name})" for stock, name in allowed.items())
    raise ValueError(
        f"model.start is {str(folder.path)!r}, whose architectures in config.json is {folder.architecture}; "
        f"allowed: {listed}"
    )


def _check_vocabulary(folder: StockFolder, store: TokenStore) -> None:
    """Refuse data whose tokens differ from the model's."""
    size, ours = folder.facts.get("vocab_size"), store.vocabulary
    remedy = f"Prepare the data with --tokenizer {folder.path}."
    if size != ours.size:
        raise ValueError(
            f"model.start is {str(folder.path)!r}, whose vocab_size is {size}; the data's tokenizer has {ours.size} "
            f"tokens. {remedy}"
        )
    file = folder.path / TOKENIZER
    theirs = read_vocabulary(file).ids if file.is_file() else ours.ids
    for token in {**theirs, **ours.ids}:
        if (their_id := theirs.get(token)) != (our_id := ours.ids.get(token)):
            raise ValueError(
                f"model.start is {str(folder.path)!r}, whose tokenizer is not the data's: the id of {token!r} is "
                f"{their_id} there and {our_id} in the data. {remedy}"
            )


def _checksum(folder: StockFolder) -> str:
    """Return the sha256 of the file of weights; for several files, the sha256 of their checksums."""
    sums = [sha256_of(file) for file in folder.files]
    return sums[0] if len(sums) == 1 else hashlib.sha256("\n".join(sums).encode()).hexdigest()
