"""Reading settings: checks that keys are known and values have the right type.

A refusal names the setting, what was given and what is allowed. What a value means is checked by the dataclass that
it belongs to.
"""

import difflib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")

KINDS: dict[type, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


class _Loader(yaml.SafeLoader):
    """YAML that refuses repeated keys: the first of two would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys are all different."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"{key!r} appears twice in the mapping that begins in line {line}")
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """What a YAML text says; a key that stands twice in a mapping is an error, and every error is a YAMLError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # values such as 2026-13-01 or !!int ''
        raise yaml.YAMLError(f"a value cannot be read ({error})") from error


def parse_setting(text: str) -> tuple[str, Any]:
    """The name and the value of a setting given as `section.key=value`, as on the command line."""
    name, separator, written = text.partition("=")
    if not separator or name.count(".") != 1:
        raise ValueError(f"--set is {text!r}; SECTION.KEY=VALUE is allowed, such as method.scaling=sqrt")
    try:
        value = load_yaml(written)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {name} is {written!r}, which is no YAML: {' '.join(str(error).split())}") from error
    if value is None and written.strip().lower() not in ("null", "~"):
        raise ValueError(f"--set {name} is {written!r}, which is no value; write null for none")
    return name, value


def nested(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings named `section.key`, as a mapping for each section."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    return sections


def read(kind: type[T], given: object, section: str = "") -> T:
    """Make the dataclass `kind` from a mapping; `section` prefixes the names in messages."""
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
    """The given values of a dataclass's fields, each of the type of its field."""
    hints = get_type_hints(kind)
    return {key: _value(hints[key], value, f"{section}{key}") for key, value in given.items()}


def nearest(word: object, allowed: Iterable[str]) -> str:
    """`did you mean 'x'? `, or nothing where no allowed word is near."""
    close = difflib.get_close_matches(str(word), list(allowed), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


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
