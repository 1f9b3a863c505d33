"""Chunks go on from any place, duplicates are found at 16 bytes each, and threads keep the order."""

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raptr.data.prepare import Document
from raptr.data.prepare.census import Count, Sample, Sides, sides_of
from raptr.data.prepare.reading import DocumentsInput
from raptr.data.prepare.stream import BEGINNING, Chunk, Position, Seen, ahead, chunks, digest_of, in_order

TEXTS = [[["a", "b", "", "a"], ["c", "b"], []], [["d", "a", " "], ["e", "f", "c"]]]


def inputs(texts: list[list[list[str]]]) -> list[list[DocumentsInput]]:
    def one(documents: list[str]) -> DocumentsInput:
        return DocumentsInput(lambda: [Document("", text) for text in documents])

    return [[one(documents) for documents in domain] for domain in texts]


def read(start: Position = BEGINNING, deduplicate: bool = False) -> list[Chunk]:
    return list(chunks(inputs(TEXTS), start=start, deduplicate=deduplicate, skip_broken=False))


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_going_on_from_any_chunk_gives_the_rest(monkeypatch: pytest.MonkeyPatch, size: int, deduplicate: bool) -> None:
    monkeypatch.setattr("raptr.data.prepare.stream.CHUNK", size)
    whole = read(deduplicate=deduplicate)
    expected = "abcdef" if deduplicate else "abacbdaefc"
    assert "".join(text for chunk in whole for text in chunk.texts) == expected
    assert sum(chunk.duplicates for chunk in whole) == (4 if deduplicate else 0)
    assert sum(chunk.empty for chunk in whole) == 2
    assert [chunk.last for chunk in whole].count(True) == 2
    assert whole[-1].position == Position(2)
    for i, chunk in enumerate(whole):
        assert [one.position for one in read(chunk.position, deduplicate)][-1:] == [Position(2)] * (i + 1 < len(whole))
        rest = read(chunk.position, deduplicate)
        assert [one.texts for one in rest] == [one.texts for one in whole[i + 1 :]]
        assert [one.duplicates for one in rest] == [one.duplicates for one in whole[i + 1 :]]


@given(st.lists(st.lists(st.binary(min_size=16, max_size=16).map(lambda b: bytes(x % 2 for x in b)), min_size=1)))
@settings(max_examples=100, deadline=None)
def test_seen_is_a_set(batches: list[list[bytes]]) -> None:
    # Digests of zeros and ones: many of them equal, and many with zeros at the end, which numpy's strings drop.
    seen, expected = Seen(), set[bytes]()
    for batch in batches:
        new = []
        for digest in batch:
            new.append(digest not in expected)
            expected.add(digest)
        assert seen.add(batch) == new


def test_seen_takes_16_bytes_a_document() -> None:
    seen = Seen()
    for i in range(200):
        assert all(seen.add([digest_of(f"{i} {j}") for j in range(100)]))
    assert sum(run.nbytes for run in seen._runs) == 16 * 20_000
    assert len(seen._runs) < 16


@given(st.lists(st.text(min_size=1, max_size=20), unique=True), st.integers(1, 100))
@settings(max_examples=100, deadline=None)
def test_the_sample_does_not_depend_on_the_order(texts: list[str], limit: int) -> None:
    nobody = Sides(0)
    once, again = Sample(limit), Sample(limit)
    for text in texts:
        once.add(digest_of(text), text)
    for text in sorted(texts) * 2:
        again.add(digest_of(text), text)
    kept = list(once.texts(nobody))
    assert list(again.texts(nobody)) == kept
    sizes = [len(text.encode()) for text in kept]
    assert sum(sizes) == once.size == min(once.size, sum(len(text.encode()) for text in texts))
    assert once.size >= min(limit, sum(len(text.encode()) for text in texts))
    assert not sizes or sum(sizes) - sizes[0] < limit


def test_a_long_document_gives_a_piece_to_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raptr.data.prepare.census.PIECE", 10)
    sample = Sample(1000)
    sample.add(digest_of("x" * 500), "x" * 500)
    assert list(sample.texts(Sides(0))) == ["x" * 10]


def test_held_out_text_never_reaches_the_tokenizer() -> None:
    sample = Sample()
    texts = [f"text {i}" for i in range(100)]
    for text in texts:
        sample.add(digest_of(text), text)
    sides = Sides(2**63)
    assert sorted(sample.texts(sides)) == sorted(text for text in texts if not sides.holds_out(digest_of(text)))


def test_no_side_is_left_empty() -> None:
    low, middle, high = 5, 2**60, 2**63
    assert sides_of([Count(2, lowest=low, highest=high)], 2**62) == Sides(2**62)
    assert sides_of([Count(2, lowest=middle, highest=high)], 100) == Sides(100, held_out=frozenset({middle}))
    assert sides_of([Count(2, lowest=low, highest=middle)], 2**62) == Sides(2**62, trained=frozenset({middle}))
    digest = middle.to_bytes(8, "little") + bytes(8)
    assert Sides(100, held_out=frozenset({middle})).holds_out(digest)
    assert Sides(2**62).holds_out(digest)
    assert not Sides(2**62, trained=frozenset({middle})).holds_out(digest)


def test_threads_keep_the_order() -> None:
    def slow(n: int) -> int:
        time.sleep(0.002 * (n % 3))
        return n * n

    assert list(in_order(slow, iter(range(50)), workers=4, depth=6)) == [(n * n, n) for n in range(50)]
    assert list(ahead(iter(range(1, 50)), depth=3)) == list(range(1, 50))


def test_reading_ahead_is_bounded_and_stops() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for n in range(1, 1000):
            taken.append(n)
            yield n

    stream = ahead(items(), depth=3)
    assert next(stream) == 1
    time.sleep(0.05)
    assert len(taken) <= 5
    before = threading.active_count()
    assert isinstance(stream, Iterator)
    del stream
    assert threading.active_count() < before


def test_an_error_in_another_thread_reaches_the_caller() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("here")

    stream = ahead(failing(), depth=5)
    assert next(stream) == 1
    with pytest.raises(ValueError, match="here"):
        next(stream)
