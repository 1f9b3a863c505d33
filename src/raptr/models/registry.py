"""The families of models that can be trained, by name; the first is the default. No torch."""

from raptr.models.bert.config import BERT
from raptr.models.contract import Family
from raptr.models.decoder.config import DECODER

FAMILIES: dict[str, Family] = {BERT.name: BERT, DECODER.name: DECODER}


def register(family: Family) -> None:
    """Add a family to `FAMILIES`; raise ValueError if its name is taken."""
    if family.name in FAMILIES:
        raise ValueError(f"family is {family.name!r}, which is taken. Choose a name other than: {', '.join(FAMILIES)}.")
    FAMILIES[family.name] = family


def planned_size(family: object) -> str | None:
    """Return the size of a plan that names none, for a family (None: the default family).

    Return None if there is no such family, or if its plans use its first size.
    """
    known = FAMILIES.get(next(iter(FAMILIES)) if family is None else str(family))
    return None if known is None else known.planned


def sizes_help() -> str:
    """Return a text that lists each family's sizes, for an option's help."""
    return "; ".join(f"{name}: {', '.join(family.sizes)}" for name, family in FAMILIES.items())
