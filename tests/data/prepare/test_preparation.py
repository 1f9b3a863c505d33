"""From files to a store: domains, weights, duplicates, broken lines, tokenizers, and what is refused."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from raptr.data import TokenStore, TrainData
from raptr.data.prepare import DomainSource, Progress, parse_domain, prepare, prepare_corpus
from raptr.data.prepare.corpus import Document
from raptr.data.prepare.domains import with_valid
from raptr.data.prepare.tokenizer import train
from raptr.data.store import SPLITS, Split


def text(domain: str, i: int) -> str:
    return f"In {domain}, text {i} says {i * i}. " * (1 + i % 5)


def write(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for domain, count in (("wiki", 120), ("web", 60)):
        texts = [text(domain, i) for i in range(count)]
        write(tmp_path / "corpus" / domain / "0.jsonl", texts[: count // 2])
        write(tmp_path / "corpus" / domain / "1.jsonl", texts[count // 2 :])
    return tmp_path / "corpus"


def domains(corpus: Path, *weights: float | None) -> list[DomainSource]:
    both = zip(("wiki", "web"), weights or (None, None), strict=True)
    return [DomainSource(name, (str(corpus / name),), weight) for name, weight in both]


def decoded(store: TokenStore, split: Split, domain: str) -> Iterator[str]:
    tokenizer = store.tokenizer()
    for tokens, ends in zip(store.tokens(split, domain), store.documents(split, domain), strict=True):
        for document in np.split(tokens, ends[:-1].astype(np.int64)):
            assert document[-1] == store.vocabulary["[SEP]"]
            yield tokenizer.decode(document[:-1].tolist(), skip_special_tokens=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_domains(corpus: Path, tmp_path: Path) -> None:
    store = prepare_corpus(domains(corpus, 17, 57), tmp_path / "out", vocabulary=400)
    store.verify()
    assert [(domain.name, domain.weight) for domain in store.domains] == [("wiki", 17.0), ("web", 57.0)]
    for name, count in (("wiki", 120), ("web", 60)):
        found = {split: list(decoded(store, split, name)) for split in SPLITS}
        assert sorted(found["train"] + found["valid"]) == sorted(text(name, i) for i in range(count))
        order = [text(name, i) for i in range(count)]
        assert found["train"] == [one for one in order if one in found["train"]]
        part = store.manifest.domain(name)
        assert [part.count(split) for split in SPLITS] == [len(found[split]) for split in SPLITS]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]


def test_weights_by_default(corpus: Path, tmp_path: Path) -> None:
    store = prepare_corpus(domains(corpus), tmp_path / "out", vocabulary=400)
    tokens = [part.total("train") for part in store.domains]
    assert [domain.weight for domain in store.domains] == pytest.approx([one / sum(tokens) for one in tokens])
    alone = prepare_corpus([parse_domain(str(corpus / "wiki"))], tmp_path / "alone", vocabulary=400)
    assert [(domain.name, domain.weight) for domain in alone.domains] == [("wiki", 1.0)]


def test_the_number_of_workers_and_chunks_does_not_matter(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for workers, chunk in ((1, 2**18), (2, 100), (5, 1), (None, 1000)):
        monkeypatch.setattr("raptr.data.prepare.stream.CHUNK", chunk)
        out = tmp_path / "out"
        prepare_corpus(domains(corpus), out, vocabulary=400, workers=workers, shard_tokens=700, deduplicate=True)
        made.append(contents(out))
        shutil.rmtree(out)
    assert all(one == made[0] for one in made)
    assert len(made[0]) > 20


def test_documents_in_memory_go_the_same_way(corpus: Path, tmp_path: Path) -> None:
    given = [Document(f"{i}", text("wiki", i)) for i in range(120)]
    one = prepare(tmp_path / "one", lambda: given, 400, domain="wiki")
    other = prepare_corpus([parse_domain(f"wiki={corpus / 'wiki'}:1")], tmp_path / "other", vocabulary=400)
    assert one.fingerprint == other.fingerprint


def test_duplicates_are_dropped_across_domains(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [text("a", i % 50) for i in range(120)])
    b = write(tmp_path / "b.jsonl", [text("a", i) for i in range(20)] + [text("b", i) for i in range(30)])
    sources = [parse_domain(str(a)), parse_domain(str(b))]
    store = prepare_corpus(sources, tmp_path / "out", vocabulary=400, deduplicate=True)
    assert [part.duplicates for part in store.domains] == [70, 20]
    found = [one for name in ("a", "b") for split in SPLITS for one in decoded(store, split, name)]
    assert len(found) == len(set(found)) == 80
    assert set(decoded(store, "train", "b")) | set(decoded(store, "valid", "b")) == {text("b", i) for i in range(30)}
    whole = prepare_corpus(sources, tmp_path / "whole", vocabulary=400)
    assert [part.duplicates for part in whole.domains] == [0, 0]
    assert [part.count("train") + part.count("valid") for part in whole.domains] == [120, 50]
    # A domain that holds nothing new is refused by name.
    with pytest.raises(ValueError, match=r"domain b\b.*no document"):
        prepare_corpus([parse_domain(f"a={a}"), parse_domain(f"b={a}")], tmp_path / "no", deduplicate=True)


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=4, max_size=40), min_size=1, max_size=3),
    st.sampled_from([0.001, 0.1, 0.5, 0.9]),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_no_text_is_on_both_sides(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[list[int]], held_out: float, deduplicate: bool
) -> None:
    folder = tmp_path_factory.mktemp("sides")
    for i, some in enumerate(numbers):
        # The second and third texts of each domain are its own, so that no domain is empty without duplicates.
        write(folder / f"d{i}.jsonl", [f"text {n}" for n in some] + [f"own {i} {n}" for n in range(2)])
    sources = [parse_domain(str(path)) for path in sorted(folder.glob("*.jsonl"))]
    try:
        store = prepare_corpus(
            sources, folder / "out", vocabulary=300, held_out=held_out, deduplicate=deduplicate, workers=1
        )
    except ValueError as error:
        # Forced to one side by one domain, a text can leave another domain without it: said, never hidden.
        assert re.search(r"domain d\d\b.*no (training|held-out) document", str(error))  # noqa: PT017
        return
    sides = {split: {one for d in store.domains for one in decoded(store, split, d.name)} for split in SPLITS}
    assert sides["train"]
    assert sides["valid"]
    assert not sides["train"] & sides["valid"]


def test_how_much_is_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [f"text {i}" for i in range(3000)])
    for held_out in (0.02, 0.25):
        store = prepare_corpus([parse_domain(str(path))], tmp_path / f"{held_out}", held_out=held_out, vocabulary=300)
        assert store.domains[0].count("valid") / 3000 == pytest.approx(held_out, rel=0.25)


def test_held_out_documents_with_few_tokens_are_mentioned(tmp_path: Path) -> None:
    short, said = [f"text {i}" for i in range(400)], list[str]()
    for name, texts in (("even", short), ("uneven", [*short, "a long document " * 20_000])):
        path = write(tmp_path / f"{name}.jsonl", texts)
        prepare_corpus([parse_domain(str(path))], tmp_path / name, vocabulary=300, say=said.append)
    (mentioned,) = (line for line in said if "held" in line)
    assert re.search(r"uneven: \d+ of 401 documents.*0\.\d+% of the tokens.*--held-out.* 0\.02", mentioned)
    given = with_valid([parse_domain(str(path))], [str(write(tmp_path / "valid.jsonl", ["a text of its own"]))])
    prepare_corpus(given, tmp_path / "given", vocabulary=300, say=said.append)
    assert [line for line in said if "held" in line] == [mentioned]


def test_broken_lines_stop_or_are_counted(corpus: Path, tmp_path: Path) -> None:
    path = corpus / "wiki" / "1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"{broken\n", b"\n", b'{"text": 5}\n', *lines[3:]]))
    (corpus / "web" / "torn.jsonl.gz").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(ValueError, match=r"wiki/1\.jsonl, line 4: .*JSON"):
        prepare_corpus(domains(corpus), tmp_path / "out", vocabulary=400)
    assert [one.name for one in tmp_path.iterdir()] == ["corpus"]
    said: list[str] = []
    store = prepare_corpus(domains(corpus), tmp_path / "out", vocabulary=400, skip_broken=True, say=said.append)
    assert [(part.broken, part.empty) for part in store.domains] == [(2, 1), (1, 0)]
    assert [part.count("train") + part.count("valid") for part in store.domains] == [120, 60]
    broken = [sentence for sentence in said if "broken" in sentence]
    assert re.search(r"wiki\b.* 2 .*wiki/1\.jsonl, line 4: .*JSON", broken[0])
    assert re.search(r"web\b.* 1 .*torn\.jsonl\.gz, line 1: ", broken[1])


def test_too_little_text(tmp_path: Path) -> None:
    for texts, message in (
        ([], r"domain a\b.*no document.*: \S+a\.jsonl\. .*--data"),
        (["one"], r"domain a\b.*one document"),
        (["one", "one", " "], r"domain a\b.*2 documents.*same"),
    ):
        path = write(tmp_path / "a.jsonl", texts)
        with pytest.raises(ValueError, match=message):
            prepare_corpus([parse_domain(str(path))], tmp_path / "far" / "out")
    path.write_text("broken\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"domain a\b.*1 .*broken.*a\.jsonl, line 1: "):
        prepare_corpus([parse_domain(str(path))], tmp_path / "far" / "out", skip_broken=True)
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_book_is_taken_by_paragraph(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {i} tells\nof {i * i} things." for i in range(80)]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "book.txt").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    for path in ("texts/book.txt", "texts"):  # the only file of a folder is the only file, too
        said: list[str] = []
        out = tmp_path / f"out-{Path(path).stem}"
        store = prepare_corpus([parse_domain(f"a={tmp_path / path}")], out, vocabulary=300, say=said.append)
        assert sorted(one for split in SPLITS for one in decoded(store, split, "a")) == sorted(paragraphs)
        assert re.search(r"\ba\b.*80 documents.*paragraph", said[0])


@pytest.mark.parametrize(("documents", "count"), [(None, 2), ("file", 2), ("blank-line", 6), ("line", 8)])
def test_what_a_document_is_can_be_said(tmp_path: Path, documents: str | None, count: int) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"One {name}.\n\nTwo {name}.\n2 {name}\n\nThree {name}.\n")
    source, out = [parse_domain(f"a={tmp_path}/?.txt")], tmp_path / "out"
    store = prepare_corpus(source, out, vocabulary=300, documents=documents)
    (part,) = store.domains
    assert part.count("train") + part.count("valid") == count
    # The same request is reused; another is not.
    assert prepare_corpus(source, out, vocabulary=300, documents=documents).fingerprint == store.fingerprint
    with pytest.raises(ValueError, match=f"{out}.*documents.*{documents}"):
        prepare_corpus(source, out, vocabulary=300, documents="line" if documents != "line" else None)


def test_a_single_file_that_cannot_be_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n", encoding="utf-8")
    source = [parse_domain(str(tmp_path / "a.txt"))]
    for documents in (None, "file", "blank-line"):
        with pytest.raises(ValueError, match=r"domain a\b.*one document.*--documents line"):
            prepare_corpus(source, tmp_path / "out", vocabulary=300, documents=documents)
    assert prepare_corpus(source, tmp_path / "out", vocabulary=300, documents="line")
    (tmp_path / "held-out.txt").write_text("four", encoding="utf-8")
    given = with_valid(source, [str(tmp_path / "held-out.txt")])
    (part,) = prepare_corpus(given, tmp_path / "given", vocabulary=300).domains
    assert [part.count(split) for split in SPLITS] == [1, 1]


def test_a_small_domain_can_be_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "big.jsonl", [text("big", i) * 20 for i in range(300)])
    write(tmp_path / "small.jsonl", [text("small", i) for i in range(8)])
    said: list[str] = []
    sources = [parse_domain(str(tmp_path / f"{name}.jsonl")) for name in ("big", "small")]
    store = prepare_corpus(sources, tmp_path / "out", vocabulary=300, say=said.append)
    tokens = [part.total("train") for part in store.domains]
    assert tokens[1] / sum(tokens) < 0.005
    assert store.domains[1].weight == 0.01
    assert any("small" in sentence and "1/100" in sentence for sentence in said)
    assert TrainData(store, 16, 4, seed=0).samples


def test_bad_settings(corpus: Path, tmp_path: Path) -> None:
    given = domains(corpus)
    for held_out in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"held_out.* {held_out}"):
            prepare_corpus(given, tmp_path / "out", held_out=held_out)
    with pytest.raises(ValueError, match=r"workers.* 0\b"):
        prepare_corpus(given, tmp_path / "out", workers=0)
    with pytest.raises(ValueError, match=r"shard_tokens.* 0\b"):
        prepare_corpus(given, tmp_path / "out", shard_tokens=0)
    with pytest.raises(ValueError, match=r"vocabulary.* 7\b"):
        prepare_corpus(given, tmp_path / "out", vocabulary=7)
    with pytest.raises(ValueError, match=r"documents.*'word'.*line"):
        prepare_corpus(given, tmp_path / "out", documents="word")
    with pytest.raises(ValueError, match=r"wiki.*wiki.*NAME=PATH"):
        prepare_corpus([given[0], given[0]], tmp_path / "out")
    for nameless in (".", "..", "/"):
        with pytest.raises(ValueError, match=rf"out.* {re.escape(nameless)}"):
            prepare_corpus(given, Path(nameless))
    for out in (corpus / "web", corpus / "web" / "new"):
        with pytest.raises(ValueError, match=f"out.*{out}.*{corpus / 'web'}.*web"):
            prepare_corpus(given, out)
    assert [one.name for one in tmp_path.iterdir()] == ["corpus"]


def test_an_existing_tokenizer(corpus: Path, tmp_path: Path) -> None:
    made = train(["some other text, another text"] * 9, 280)
    made.enable_truncation(4)
    made.enable_padding(length=64)
    (tmp_path / "given").mkdir()
    made.save(str(tmp_path / "given" / "tokenizer.json"))
    by_file = prepare_corpus(domains(corpus), tmp_path / "a", tokenizer=tmp_path / "given" / "tokenizer.json")
    calls: list[Progress] = []
    by_folder = prepare_corpus(domains(corpus), tmp_path / "b", tokenizer=tmp_path / "given", progress=calls.append)
    assert {call.stage for call in calls} == {"reading", "encoding"}  # none is trained
    assert by_file.fingerprint == by_folder.fingerprint
    assert by_file.vocabulary.size == made.get_vocab_size()
    # Neither cut nor filled up, whatever the file says.
    found = [one for split in SPLITS for one in decoded(by_file, split, "web")]
    assert sorted(found) == sorted(text("web", i) for i in range(60))


def test_a_tokenizer_that_does_not_fit(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*no such file"):
        prepare_corpus(domains(corpus), tmp_path / "out", tokenizer=path)
    facts = json.loads(train(["some text"], 300).to_str())
    for token in facts["added_tokens"]:
        token["content"] = token["content"].replace("[MASK]", "<mask>")
    facts["model"]["vocab"]["<mask>"] = facts["model"]["vocab"].pop("[MASK]")
    path.write_text(json.dumps(facts), encoding="utf-8")
    assert Tokenizer.from_file(str(path)).token_to_id("<mask>") == 4
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*lacks \[MASK\],"):
        prepare_corpus(domains(corpus), tmp_path / "out", tokenizer=path)


def test_progress(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raptr.data.prepare.stream.CHUNK", 300)
    calls: list[Progress] = []
    store = prepare_corpus(domains(corpus), tmp_path / "out", vocabulary=400, progress=calls.append)
    total = sum(path.stat().st_size for path in corpus.rglob("*.jsonl"))
    assert {call.total for call in calls} == {total}
    assert [stage for i, stage in enumerate(c.stage for c in calls) if not i or calls[i - 1].stage != stage] == [
        "reading",
        "training",
        "encoding",
    ]
    for stage in ("reading", "encoding"):
        mine = [call for call in calls if call.stage == stage]
        assert [call.read for call in mine] == sorted(call.read for call in mine)
        assert (mine[-1].read, mine[-1].documents) == (total, 180)
    assert calls[-1].tokens == sum(part.total(split) for part in store.domains for split in SPLITS)
    assert calls[-1].rate > 0


def test_held_out_text_can_be_given(tmp_path: Path) -> None:
    lines = {name: [f"{name} says number {i} of many things." for i in range(40)] for name in ("a", "b")}
    for name, texts in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        held = [texts[3], f"only {name} is held out"]  # one of them is in the training text too
        (tmp_path / f"{name}-valid.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in held))
    domains = with_valid(
        [parse_domain(f"{name}={tmp_path}/{name}.jsonl:1") for name in "ab"],
        [f"{name}={tmp_path}/{name}-valid.jsonl" for name in "ab"],
    )
    store = prepare_corpus(domains, tmp_path / "out", vocabulary=300)
    tokenizer = store.tokenizer()
    for part in store.domains:
        assert (part.count("train"), part.count("valid")) == (39, 3)  # the copy is held out as well
        (tokens,), (ends,) = store.tokens("valid", part.name), store.documents("valid", part.name)
        starts = [0, *ends[:-1].tolist()]
        texts = [tokenizer.decode(tokens[a : b - 1].tolist()).strip() for a, b in zip(starts, ends, strict=True)]
        assert sorted(texts) == sorted([lines[part.name][3]] * 2 + [f"only {part.name} is held out"])
    with pytest.raises(ValueError, match=r"valid.*'c=x'.*a, b"):
        with_valid(domains, ["c=x"])
    with pytest.raises(ValueError, match=r"domain b\b.*held-out"):
        prepare_corpus([domains[0], parse_domain(f"b={tmp_path}/b.jsonl:1")], tmp_path / "other", vocabulary=300)
    (single,) = with_valid([parse_domain(f"{tmp_path}/a.jsonl")], [f"{tmp_path}/a-valid.jsonl"])
    assert single.valid == (f"{tmp_path}/a-valid.jsonl",)


def test_held_out_text_that_leaves_a_side_empty_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    a, b = (write(tmp_path / f"{name}.jsonl", [text(name, i) for i in range(40)]) for name in "ab")
    empty, held = write(tmp_path / "empty.jsonl", [" "]), write(tmp_path / "held.jsonl", [text("c", 1)])
    broken = tmp_path / "broken.jsonl"
    broken.write_text("broken\n", encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    both = [parse_domain(str(a)), parse_domain(str(b))]
    for domains, valid, message in (
        (both[:1], [str(empty)], r"domain a: .*hold out, \S+empty\.jsonl, has no document.*--valid.*--held-out"),
        (both, [f"a={held}", f"b={empty}"], r"domain b: .*hold out, \S+empty\.jsonl, has no document"),
        (both[:1], [str(broken)], r"domain a: .*1 broken.*broken\.jsonl, line 1"),
        (both[:1], [str(a)], r"domain a has no document to train on: .*hold out"),
        (both, [f"a={held}", f"b={held}"], r"domain b has no document to hold out: .*held\.jsonl.*--deduplicate"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_corpus(
                with_valid(domains, valid), tmp_path / "far" / "out", vocabulary=300, deduplicate=True, skip_broken=True
            )
        assert sorted(tmp_path.iterdir()) == before
