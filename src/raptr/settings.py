"""Reading settings: checks that keys are known and values have the right type.

An error names the setting, its value and what is allowed. The dataclass of a section checks what its values mean.
"""

import difflib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

KINDS: dict[type, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def nested(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Turn settings named `section.key` into one mapping for each section."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    return sections


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn settings nested to any depth into one mapping with names such as `section.key`, and tuples into lists."""
    named: dict[str, Any] = {}
    for key, value in settings.items():
        named |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": listed(value)}
    return named


def refuse_changed(
    folder: Path, earlier: Mapping[str, Any], now: Mapping[str, Any], *, free: Sequence[str] = ()
) -> None:
    """Raise a ValueError if settings differ from those of the jobs in a folder, except for those in `free`."""
    before, after = flat(earlier), flat(now)
    changed = [key for key in before | after if before.get(key) != after.get(key) and key not in free]
    if changed:
        diff = "; ".join(f"{key}: was {_short(before.get(key))}, now {_short(after.get(key))}" for key in changed[:3])
        raise ValueError(f"{folder} has jobs with other settings ({diff}); name another folder with --out")


def _short(value: Any) -> str:
    """Return a value as text for a message, shortened if it is long."""
    text = str(value)
    return text if len(text) <= 70 else f"{text[:67]}..."


def listed(value: Any) -> Any:
    """Return a value with lists in place of tuples, as in YAML and JSON."""
    return [listed(entry) for entry in value] if isinstance(value, list | tuple) else value


def read(kind: type[T], given: object, section: str = "") -> T:
    """Make the dataclass `kind` from a mapping, or raise a ValueError; `section` prefixes names in messages."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{section.rstrip('.')} is {given!r}; a mapping is allowed")
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise ValueError(f"Unknown setting {section}{key}; {nearest(key, known)}allowed: {', '.join(known)}")
    for name, field in known.items():
        if name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{section}{name} is missing; {_allowed(get_type_hints(kind)[name])} is needed")
    return kind(**values(kind, given, section))


def values(kind: type, given: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return the given values of a dataclass's fields, each checked and converted to the type of its field."""
    hints = get_type_hints(kind)
    return {key: _value(hints[key], value, f"{section}{key}") for key, value in given.items()}


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise a ValueError for a value that is not allowed, with the nearest allowed one."""
    if value not in (choices := list(allowed)):
        raise ValueError(f"{name} is {value!r}; {nearest(value, choices)}allowed: {', '.join(choices)}")


def nearest(word: object, allowed: Iterable[str]) -> str:
    """Return `did you mean 'x'? ` with the nearest allowed word; empty if none is similar."""
    words = {allowed_word.lower(): allowed_word for allowed_word in allowed}
    close = difflib.get_close_matches(str(word).lower(), words, n=1)
    return f"did you mean {words[close[0]]!r}? " if close else ""


def _value(hint: Any, value: Any, name: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for option in inner:
            try:
                return _value(option, value, name)
            except ValueError:
                continue
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(_value(inner[0], entry, name) for entry in value)
    elif origin is Sequence and isinstance(value, list | tuple):
        return [_value(inner[0], entry, name) for entry in value]
    elif origin is Literal:
        if isinstance(value, str) and value in inner:
            return value
    elif hint is float and type(value) is int and abs(value) < 2**63:
        return float(value)
    elif hint is float and isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+[eE][-+]?[0-9]{1,3}", value):
        return float(value)  # YAML reads 1e-3 as a text, only 1.0e-3 as a number
    elif origin is Mapping and isinstance(value, Mapping):
        return dict(value)
    elif origin is None and type(value) is hint:
        return value
    raise ValueError(f"{name} is {value!r}; {_allowed(hint)} is allowed")


def _allowed(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_allowed(option) for option in inner if option is not type(None)))
    if origin in (tuple, Sequence):
        return f"a list with each entry {_allowed(inner[0])}"
    if origin is Literal:
        return " or ".join(map(str, inner))
    return KINDS.get(hint, "a mapping" if origin is Mapping else f"a {getattr(hint, '__name__', hint)}")
