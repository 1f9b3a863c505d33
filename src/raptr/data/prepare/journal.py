"""The journal of a preparation: how far it has come, so that it can continue after a kill.

It is a small file in the work folder, replaced atomically after everything that it lists is on disk. Whatever was
written later is cut off or overwritten with the same bytes, since everything is a function of the request. The first
journal is written when the first reading is done and the tokenizer exists.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raptr.data.prepare.census import Sides
from raptr.data.prepare.stream import BEGINNING, Position
from raptr.data.prepare.writer import Written
from raptr.data.store import SPLITS, DomainShards, Shard, Split
from raptr.files import write_text

JOURNAL = "journal.json"


@dataclass(frozen=True)
class Journal:
    """The request, what the first reading decided, and what has been written."""

    request: dict[str, Any]
    version: str
    """The version of the package `tokenizers`; another version may give other tokens."""
    documents: tuple[int, ...]
    held_out: tuple[int, ...]
    trained: tuple[int, ...]
    domains: tuple[DomainShards, ...] = ()
    """The finished domains."""
    position: Position = BEGINNING
    written: tuple[Written, ...] = (Written(), Written())
    """How far the training and the held-out split of the current domain are written."""
    counts: tuple[int, ...] = (0, 0, 0, 0, 0)
    """In the current domain: duplicates, broken and empty documents, bytes of training and of held-out text."""

    def sides(self, limit: int) -> Sides:
        """Return the split that the first reading decided on."""
        return Sides(limit, frozenset(self.held_out), frozenset(self.trained))

    def start(self, split: Split) -> Written:
        """Return how far a split of the current domain is written."""
        return self.written[SPLITS.index(split)]

    def write(self, folder: Path) -> None:
        write_text(folder / JOURNAL, json.dumps(asdict(self), indent=2) + "\n")


def read_journal(folder: Path) -> Journal | None:
    """Return the journal in a work folder; None if there is none or it cannot be read."""
    try:
        facts = json.loads((folder / JOURNAL).read_text(encoding="utf-8"))
        return Journal(
            **{
                **facts,
                "documents": tuple(facts["documents"]),
                "held_out": tuple(facts["held_out"]),
                "trained": tuple(facts["trained"]),
                "domains": tuple(
                    DomainShards(**{**domain, "train": _shards(domain["train"]), "valid": _shards(domain["valid"])})
                    for domain in facts["domains"]
                ),
                "position": Position(*facts["position"]),
                "written": tuple(Written(**{**one, "shards": _shards(one["shards"])}) for one in facts["written"]),
                "counts": tuple(facts["counts"]),
            }
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _shards(facts: list[dict[str, Any]]) -> tuple[Shard, ...]:
    return tuple(Shard(**shard) for shard in facts)
