"""YAML without repeated keys, from files and from settings on the command line."""

from io import StringIO
from pathlib import Path
from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Refuses repeated keys, of which YAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # A merge key (`<<: *base`) is no key of its own: what the mapping itself says replaces what is merged into it.
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != MERGE]
        for key in keys:
            if keys.count(key) > 1:
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"{key!r} appears twice in the mapping that begins in line {line}")
        return super().construct_mapping(node, deep)


def load_yaml(text: str, name: str) -> Any:
    """Parse a YAML text. A key that appears twice in a mapping is an error, and every error is a YAMLError.

    `name` says in error messages where the text comes from.
    """
    stream = StringIO(text)
    stream.name = name
    try:
        return yaml.load(stream, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # values such as 2026-13-01 or !!int ''
        raise yaml.YAMLError(f"a value cannot be read ({error})") from error


def read_yaml(path: Path, kind: str) -> Any:
    """Parse a YAML file, or raise a ValueError; `kind` says in messages what sort of file it is."""
    try:
        return load_yaml(path.read_text(encoding="utf-8"), str(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{kind} {str(path)!r} is not valid YAML: {' '.join(str(error).split())}") from error


def parse_setting(text: str) -> tuple[str, Any]:
    """Return name and value of a setting written as `section.key=value`, as on the command line."""
    name, separator, written = text.partition("=")
    if not separator or name.count(".") != 1:
        raise ValueError(f"--set is {text!r}; SECTION.KEY=VALUE is allowed, such as method.scaling=sqrt")
    try:
        value = load_yaml(written, "--set")
    except yaml.YAMLError as error:
        raise ValueError(
            f"--set {name} is {written!r}, which is not valid YAML: {' '.join(str(error).split())}"
        ) from error
    if value is None and written.strip().lower() not in ("null", "~"):
        raise ValueError(f"--set {name} is {written!r}, which is not a value; write null for none")
    return name, value
