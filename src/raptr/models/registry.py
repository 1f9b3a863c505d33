"""The families of models that can be trained, by name; the first is the default. No torch."""

from raptr.models.bert.config import BERT
from raptr.models.contract import Family
from raptr.models.decoder.config import DECODER

FAMILIES: dict[str, Family] = {BERT.name: BERT, DECODER.name: DECODER}


def register(family: Family) -> None:
    """Make a family of one's own known under its name."""
    if family.name in FAMILIES:
        raise ValueError(f"family is {family.name!r}, which is taken. Choose a name other than: {', '.join(FAMILIES)}.")
    FAMILIES[family.name] = family


def planned_size(family: object) -> str | None:
    """The size of a plan that names none; `family` is as given, None for the default. None: there is no such family."""
    known = FAMILIES.get(next(iter(FAMILIES)) if family is None else str(family))
    return None if known is None else known.planned


def sizes_help() -> str:
    """The families' sizes, for the help of an option."""
    return "; ".join(f"{name}: {', '.join(family.sizes)}" for name, family in FAMILIES.items())
