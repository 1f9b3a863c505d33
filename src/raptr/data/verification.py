"""Checksums of a prepared folder, remembered between starts, since reading 200 GB takes minutes.

`.verified.json` in the folder records the checksum, size, inode and times of change of each file that was read and
found intact. A file for which all of these still hold is not read again; a file that was written to, replaced or
copied is. `.verified.json` is not part of the data: if it is missing or cannot be written, everything is read. Damage
that changes bytes but none of these facts (a failing disk) is found only by reading everything, with `anew`.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raptr.files import sha256_of, write_json

REMEMBERED = ".verified.json"


def first_damaged(folder: Path, expected: Mapping[str, str], *, anew: bool) -> tuple[str, str] | None:
    """Return the first file without the expected SHA-256, and its actual one; None if all files are intact."""
    before = {} if anew else _remembered(folder)
    whole: dict[str, dict[str, Any]] = {}
    try:
        for name, digest in expected.items():
            if not (folder / name).is_file():
                return name, "no file"
            facts = _facts(folder / name, digest)  # before reading, so that a change meanwhile is noticed next time
            if before.get(name) != facts and (actual := sha256_of(folder / name)) != digest:
                return name, actual
            whole[name] = facts
    finally:  # remember what was verified, even if a later file is damaged or reading was interrupted
        known = {**before, **whole}
        if known != before or anew:
            with contextlib.suppress(OSError):  # the folder may be read-only
                write_json(folder / REMEMBERED, known)
    return None


def _facts(path: Path, digest: str) -> dict[str, Any]:
    stat = path.stat()
    times = {"modified": stat.st_mtime_ns, "changed": stat.st_ctime_ns}
    return {"sha256": digest, "size": stat.st_size, "inode": stat.st_ino, **times}


def _remembered(folder: Path) -> dict[str, Any]:
    try:
        known = json.loads((folder / REMEMBERED).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}
