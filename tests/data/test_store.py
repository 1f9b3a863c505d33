"""A prepared folder is whole, gives back what was written, and reports every kind of damage."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from raptr.data import TokenStore, open_store
from raptr.data.prepare import Document, Progress, prepare
from raptr.data.prepare.stream import digest_of
from raptr.data.store import SPLITS, dtype_for

HELD_OUT = 2**64 // 50


def documents() -> Iterator[Document]:
    for i in range(200):
        yield Document(f"document-{i}", f"Text number {i} says {i * i} and [SEP] no more. " * (1 + i % 7))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return prepare(tmp_path_factory.mktemp("made") / "store", documents, 300)


@pytest.fixture
def copy(made: TokenStore, tmp_path: Path) -> Path:
    """A folder that a test may damage."""
    return shutil.copytree(made.path, tmp_path / "copy")


def texts(store: TokenStore) -> dict[str, list[str]]:
    """What the store holds, decoded document by document."""
    tokenizer = store.tokenizer()
    found: dict[str, list[str]] = {split: [] for split in SPLITS}
    for split in SPLITS:
        for tokens, ends in zip(store.tokens(split, "text"), store.documents(split, "text"), strict=True):
            assert ends[-1] == len(tokens)
            for document in np.split(tokens, ends[:-1].astype(np.int64)):
                assert document[-1] == store.vocabulary["[SEP]"]
                found[split].append(tokenizer.decode(document[:-1].tolist(), skip_special_tokens=False))
    return found


def test_every_document_comes_back_on_its_side(made: TokenStore) -> None:
    expected: dict[str, list[str]] = {"train": [], "valid": []}
    for document in documents():
        low = int.from_bytes(digest_of(document.text)[:8], "little") < HELD_OUT
        expected["valid" if low else "train"].append(document.text)
    assert texts(made) == expected
    assert 1 <= len(expected["valid"]) <= 12
    assert made.manifest.dtype == "uint16"
    made.verify()


def test_the_files_are_as_documented(made: TokenStore) -> None:
    made.verify()
    names = ["data.json", "tokenizer.json", ".verified.json"]
    names += [f"text-{split}-00000.{kind}" for split in SPLITS for kind in ("documents", "tokens")]
    assert sorted(path.name for path in made.path.iterdir()) == sorted(names)
    facts = json.loads((made.path / "data.json").read_text(encoding="utf-8"))
    assert (facts["format"], facts["vocabulary"], facts["fingerprint"]) == (2, 300, made.fingerprint)
    raw = (made.path / "text-train-00000.tokens").read_bytes()
    assert int.from_bytes(raw[:2], "little") == made.tokens("train", "text")[0][0]
    assert len(raw) == 2 * facts["domains"][0]["train"][0]["tokens"]


def test_bytes_of_text_are_counted_but_are_no_part_of_the_fingerprint(made: TokenStore, copy: Path) -> None:
    sizes = {split: sum(len(text.encode()) for text in some) for split, some in texts(made).items()}
    (part,) = made.domains
    assert (part.train_bytes, part.valid_bytes) == (sizes["train"], sizes["valid"])
    for split in SPLITS:
        assert made.bytes_per_token(split) == {"text": sizes[split] / part.total(split)}
    facts = json.loads((copy / "data.json").read_text(encoding="utf-8"))
    for name in ("train_bytes", "valid_bytes"):  # as in folders from before they were counted
        del facts["domains"][0][name]
    (copy / "data.json").write_text(json.dumps(facts), encoding="utf-8")
    older = open_store(copy)
    assert older.fingerprint == made.fingerprint
    assert older.bytes_per_token("valid") == {}


def test_the_same_text_gives_the_same_fingerprint(made: TokenStore, tmp_path: Path) -> None:
    again = prepare(tmp_path / "again", documents, 300, shard_tokens=10**9)
    assert again.fingerprint == made.fingerprint
    other = prepare(tmp_path / "other", lambda: list(documents())[:-1], 300)
    assert other.fingerprint != made.fingerprint


def test_several_shards_hold_the_same_documents(made: TokenStore, tmp_path: Path) -> None:
    store = prepare(tmp_path / "store", documents, 300, shard_tokens=500)
    assert len(store.tokens("train", "text")) > 5
    assert texts(store) == texts(made)
    assert all(len(tokens) <= 500 for tokens in store.tokens("train", "text"))
    store.verify()
    # A document that is longer than the limit gets a shard of its own.
    tiny = prepare(tmp_path / "tiny", documents, 300, shard_tokens=1)
    assert all(len(ends) == 1 for ends in tiny.documents("train", "text"))
    assert texts(tiny) == texts(made)


def test_chunks_do_not_matter(made: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raptr.data.prepare.stream.CHUNK", 100)
    calls: list[Progress] = []
    store = prepare(tmp_path / "store", documents, 300, progress=calls.append)
    assert store.fingerprint == made.fingerprint
    for stage in ("reading", "encoding"):
        counted = [call.documents for call in calls if call.stage == stage]
        assert len(counted) > 100
        assert counted == sorted(counted)
        assert counted[-1] == 200
    assert calls[-1].tokens == sum(part.total(split) for part in store.domains for split in SPLITS)


def test_both_sides_get_a_document_however_few_there_are(tmp_path: Path) -> None:
    for seed in range(5):
        few = [Document(f"{i}", f"some text {seed}{i}") for i in range(2)] + [Document("empty", " ")]
        store = prepare(tmp_path / f"{seed}", few.copy, 300)
        assert [store.manifest.domains[0].count(split) for split in SPLITS] == [1, 1]
        assert store.manifest.domains[0].empty == 1
    names = (f"text {i}" for i in range(2000))
    low = [name for name in names if int.from_bytes(digest_of(name)[:8], "little") < HELD_OUT][:3]
    store = prepare(tmp_path / "low", lambda: [Document(name, name) for name in low], 300)
    assert [store.manifest.domains[0].count(split) for split in SPLITS] == [1, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"text\b.*no document"),
        ([Document("a", "text")], r"text\b.*one document"),
        ([Document("a", ""), Document("b", "")], r"text\b.*no document"),
        ([Document("a", "text"), Document("b", "text")], r"text\b.*2 documents.*same"),
    ],
)
def test_too_little_text_gets_a_sentence_and_leaves_nothing(
    tmp_path: Path, given: list[Document], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "store", lambda: given, 300)
    assert list(tmp_path.iterdir()) == []


def test_other_bad_input(made: TokenStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shard_tokens.* 0\b"):
        prepare(tmp_path / "store", documents, 300, shard_tokens=0)
    with pytest.raises(ValueError, match=str(made.path)):
        prepare(made.path, documents, 300)
    with pytest.raises(ValueError, match=r"vocabulary.* 5\b"):
        prepare(tmp_path / "store", documents, 5)
    once = documents()
    with pytest.raises(ValueError, match=r"text\b.*200 documents.* 0\b"):
        prepare(tmp_path / "store", lambda: once, 300)
    assert list(tmp_path.iterdir()) == []


def test_a_crash_leaves_no_folder(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "store", documents, 300, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_two_writers_at_once_end_with_one_folder(tmp_path: Path) -> None:
    def other(progress: Progress) -> None:
        if not (tmp_path / "store").exists():
            prepare(tmp_path / "store", documents, 300)

    store = prepare(tmp_path / "store", documents, 300, progress=other)
    store.verify()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_the_token_type_fits_the_vocabulary() -> None:
    assert [dtype_for(size) for size in (300, 65536, 65537)] == ["uint16", "uint16", "uint32"]


FILES = [f"text-{split}-00000.{kind}" for split in SPLITS for kind in ("tokens", "documents")]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_torn_file_is_named(copy: Path, name: str) -> None:
    size = (copy / name).stat().st_size
    (copy / name).write_bytes((copy / name).read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{name}: .*\b{size} bytes.*\b{size - 1}\b"):
        open_store(copy)
    (copy / name).unlink()
    with pytest.raises(ValueError, match=rf"{name}: .*\b{size} bytes.*no file"):
        open_store(copy)


@pytest.mark.parametrize("name", FILES)
def test_verify_finds_one_changed_byte(copy: Path, name: str) -> None:
    raw = bytearray((copy / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (copy / name).write_bytes(raw)
    store = open_store(copy)
    with pytest.raises(ValueError, match=f"{name}: .*SHA-256 [0-9a-f]+.* [0-9a-f]+"):
        store.verify()


def test_damage_to_the_tokenizer(copy: Path) -> None:
    path = copy / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text + " ", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*SHA-256"):
        open_store(copy).verify()
    path.write_text(text[:100], encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*tokenizer"):
        open_store(copy)


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        ('"format": 2', '"format": 99', r"data\.json: .*version 2.* 99"),
        ('"dtype": "uint16"', '"dtype": "uint32"', r"data\.json: .*fingerprint"),
        ('"weight": 1.0', '"weight": 2.0', r"data\.json: .*fingerprint"),
        (r'"tokens": \d+', '"tokens": 7', r"data\.json: .*fingerprint"),
        ('"vocabulary"', '"vocabulry"', r"data\.json: .*fields.*vocabulry"),
        (r"\}\s*$", "", r"data\.json: .*JSON"),
        (r"(?s)^.*$", "[]", r"data\.json: .*version 2.*None"),
    ],
)
def test_a_changed_manifest_is_refused(copy: Path, pattern: str, replacement: str, message: str) -> None:
    path = copy / "data.json"
    text, count = re.subn(pattern, replacement, path.read_text(encoding="utf-8"), count=1)
    assert count == 1
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        open_store(copy)


def test_a_domain_that_is_not_there(made: TokenStore) -> None:
    with pytest.raises(ValueError, match=r"domain.*'wiki'.*text"):
        made.tokens("train", "wiki")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.*data\.json.*raptr prepare --data TEXT --out .*/nowhere$"):
        open_store(tmp_path / "nowhere")


def test_a_folder_of_text_that_is_not_prepared(tmp_path: Path) -> None:
    text = tmp_path / "pytext"
    text.mkdir()
    command = f"raptr prepare --data {text} --objective causal --out data/pytext-prepared"
    with pytest.raises(ValueError, match=rf"{text} holds no prepared data.* Make it with: {command}$"):
        open_store(text, ["--objective", "causal"])
