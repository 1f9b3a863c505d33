"""Checksums of a prepared folder, not computed anew at every start: 200 GB take minutes to read.

`.verified.json` in the folder remembers of each file that was read and found whole its checksum, size, inode and
times of change. A file that is still the same by these is not read again; one that was written to, replaced or copied
is. It is no part of the data: without it, or where it cannot be written, everything is read. What changes bytes
and leaves all of these alone (a failing disk) is only found by reading everything, `anew`.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raptr.files import sha256_of, write_json

REMEMBERED = ".verified.json"


def first_damaged(folder: Path, expected: Mapping[str, str], *, anew: bool) -> tuple[str, str] | None:
    """The first file that has not the expected SHA-256, with what it has; None where every file is whole."""
    before = {} if anew else _remembered(folder)
    whole: dict[str, dict[str, Any]] = {}
    try:
        for name, digest in expected.items():
            if not (folder / name).is_file():
                return name, "no file"
            facts = _facts(folder / name, digest)  # taken first: a change while the file is read is seen next time
            if before.get(name) != facts and (found := sha256_of(folder / name)) != digest:
                return name, found
            whole[name] = facts
    finally:  # what was read counts, even where a later file is damaged or the reading was stopped
        known = {**before, **whole}
        if known != before or anew:
            with contextlib.suppress(OSError):  # a folder that is only read from
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
