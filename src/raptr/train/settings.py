"""Reading settings: a mapping, checked key by key, becomes a frozen dataclass.

Unknown keys and values of the wrong kind are refused with the full name of the setting, what was given and
what is allowed. Each dataclass checks the meaning of its values itself.
"""

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from raptr.methods.registry import nearest

T = TypeVar("T")

KINDS: dict[type, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def read(kind: type[T], given: object, section: str = "") -> T:
    """Make the dataclass `kind` from a mapping; `section` prefixes the names in messages."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{section.rstrip('.') or 'the configuration'} is {given!r}; a mapping is allowed")
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    for key in given:
        if key not in known:
            raise ValueError(f"{section}{key} is no setting; {nearest(key, known)}allowed: {', '.join(known)}")
    for name, field in known.items():
        if name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{section}{name} is missing; {_allowed(hints[name])} is needed")
    return kind(**{key: _value(hints[key], value, f"{section}{key}") for key, value in given.items()})


def _value(hint: Any, value: Any, name: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        inner = [option for option in get_args(hint) if option is not type(None)]
        assert len(inner) == 1, "settings are of one kind, or none"
        return _value(inner[0], value, name)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_value(get_args(hint)[0], entry, name) for entry in value)
    if origin is Literal and value in get_args(hint):
        return value
    if hint is float and type(value) is int:
        return float(value)
    if origin is Mapping and isinstance(value, Mapping):
        return dict(value)
    if origin is None and type(value) is hint:
        return value
    raise ValueError(f"{name} is {value!r}; {_allowed(hint)} is allowed")


def _allowed(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _allowed(next(option for option in get_args(hint) if option is not type(None)))
    if origin is tuple:
        return f"a list, each entry {_allowed(get_args(hint)[0])},"
    if origin is Literal:
        return " or ".join(map(str, get_args(hint)))
    return KINDS.get(hint, "a mapping")
