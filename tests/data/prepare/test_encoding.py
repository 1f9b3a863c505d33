"""Long documents are encoded piece by piece: to the same tokens, in bounded memory."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from raptr.data.prepare import Document, prepare
from raptr.data.prepare.census import Sides
from raptr.data.prepare.encoding import Encoder, pieces
from raptr.data.prepare.stream import Chunk, Position, digest_of
from raptr.data.prepare.tokenizer import train
from raptr.data.store import SPLITS

WORDS = [
    "the",
    "naïve",
    "users'll",
    "don't",
    "3.14",
    "x=[1,2]",
    "第三",
    "🐍🐍",
    "--",
    "end.",
    "\t",
    "\n",
    "\r\n",
    "   ",
]
TEXTS = st.lists(st.sampled_from([*WORDS, " ", "\n\n", "\u3000"]), max_size=300).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train([" ".join(WORDS[i:] + WORDS[:i]) * 5 for i in range(len(WORDS))], 400)


@given(TEXTS, st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_pieces_are_the_text_and_are_short(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raptr.data.prepare.encoding.PIECE", size)
        found = list(pieces(text))
    assert "".join(found) == text
    assert all(0 < len(piece) <= size for piece in found[:-1])
    for before, after in pairwise(found):
        # Cut before white space, unless none follows a word within the piece.
        places = [i for i in range(1, len(before)) if before[i] in " \t\r\n" and not before[i - 1].isspace()]
        assert not places or (after[0].isspace() and not before[-1].isspace())


@given(TEXTS, st.integers(30, 90))
@settings(max_examples=200, deadline=None)
def test_the_tokens_are_those_of_the_whole(tokenizer: Tokenizer, text: str, size: int) -> None:
    text = " and ".join(text[i : i + 20] for i in range(0, len(text), 20)) or "text"  # with a space here and there
    expected = [*tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.token_to_id("[SEP]")]
    short = "some text"
    texts = [short, text, short]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raptr.data.prepare.encoding.PIECE", size)
        chunk = Chunk(Position(), texts=texts, digests=[digest_of(one) for one in texts])
        found = Encoder(tokenizer, Sides(0), np.dtype("<u2"), "[SEP]")(chunk)
    other = [*tokenizer.encode(short, add_special_tokens=False).ids, tokenizer.token_to_id("[SEP]")]
    tokens, lengths, size = found["train"]
    assert size == sum(len(one.encode()) for one in (short, text, short))
    assert tokens.tolist() == other + expected + other
    assert lengths.tolist() == [len(other), len(expected), len(other)]
    assert [len(found["valid"].tokens), len(found["valid"].lengths), found["valid"].bytes] == [0, 0, 0]


def test_a_long_document_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document(f"{i}", f"document {i} says many things. " * (1 + 400 * (i % 3 == 0))) for i in range(20)]
    whole = prepare(tmp_path / "whole", lambda: documents, 300)
    monkeypatch.setattr("raptr.data.prepare.encoding.PIECE", 100)
    cut = prepare(tmp_path / "cut", lambda: documents, 300)
    assert cut.fingerprint == whole.fingerprint
    assert sum(part.count(split) for part in cut.domains for split in SPLITS) == 20


PROGRAM = """
import resource, sys
from pathlib import Path
from raptr.data.prepare import Document, prepare

long = "".join(f"Line {i} of a long text, {i * i % 997} words from its end.\\n" for i in range(60_000))
documents = [Document(f"{i}", long[i:]) for i in range(2)]
prepare(Path(sys.argv[1]) / "small", lambda: [Document("a", long[:1000]), Document("b", long[1000:2000])], 300)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(Path(sys.argv[1]) / "long", lambda: documents, 300)
print(len(long), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in units of its own")
def test_memory_does_not_grow_with_100_bytes_a_character(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    characters, peak = map(int, ended.stdout.split())
    assert characters > 2_000_000
    assert peak < 100 * characters
