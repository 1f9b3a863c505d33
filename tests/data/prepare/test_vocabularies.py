"""Vocabularies hold the special tokens of an objective; masked language modelling's are what they always were."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from typer.testing import CliRunner

from raptr.cli import app
from raptr.data import open_store
from raptr.data.prepare import DomainSource, prepare, prepare_builtin, prepare_corpus
from raptr.data.prepare.corpus import Document
from raptr.data.prepare.request import difference
from raptr.data.prepare.tokenizer import train
from raptr.data.store import SPLITS
from raptr.objectives import SPECIALS
from raptr.objectives.registry import OBJECTIVES
from tests.vocabularies import vocabulary_of

TEXTS = [f"Text number {i} says {i * i}, [SEP] and no more.\n" * (1 + i % 7) for i in range(100)]
every_objective = pytest.mark.parametrize("objective", SPECIALS)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return file


def by_hand() -> Tokenizer:
    """What was trained before there was more than one objective."""
    tokenizer = Tokenizer(BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = BpeTrainer(
        vocab_size=300,
        min_frequency=2,
        special_tokens=specials,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def test_masked_language_modelling_gives_the_bytes_it_always_gave(tmp_path: Path) -> None:
    assert train(TEXTS, 300).to_str() == by_hand().to_str()
    documents = [Document(f"{i}", text) for i, text in enumerate(TEXTS)]
    store = prepare(tmp_path / "store", lambda: documents, 300)
    # Without the tokenizer's checksum, since other versions of its package may write the same one differently.
    fingerprint = replace(store.manifest, tokenizer_sha256="").fingerprint
    assert fingerprint == "efc4f4678916b443e47424d7c2d6d13b7fd6a9569e85335767d76dce6ef0dbf6"
    assert set(store.manifest.request) == {
        "deduplicate",
        "documents",
        "domains",
        "field",
        "format",
        "held_out",
        "shard_tokens",
        "skip_broken",
        "tokenizer",
        "vocabulary",
    }


@every_objective
def test_the_command_prepares_for_an_objective(objective: str, corpus: Path, tmp_path: Path) -> None:
    arguments = ["prepare", "--data", str(corpus), "--out", str(tmp_path / "out"), "--vocabulary", "420"]
    done = CliRunner().invoke(app, [*arguments, "--objective", objective])
    assert done.exit_code == 0, done.output
    assert ("raptr pretrain" in done.output) == (objective in OBJECTIVES)
    store, specials = open_store(tmp_path / "out"), SPECIALS[objective]
    store.verify()
    tokenizer = store.tokenizer()
    assert [tokenizer.id_to_token(number) for number in range(len(specials.tokens))] == list(specials.tokens)
    ordinary = np.flatnonzero(store.vocabulary.ordinary(specials)).tolist()
    assert ordinary == list(range(len(specials.tokens), store.vocabulary.size))
    found = []
    for split in SPLITS:
        (tokens,), (ends,) = store.tokens(split, "corpus"), store.documents(split, "corpus")
        for document in np.split(tokens, ends[:-1].astype(np.int64)):
            assert document[-1] == store.vocabulary[specials.end]
            assert document[:-1].min() >= len(specials.tokens)
            found.append(tokenizer.decode(document[:-1].tolist(), skip_special_tokens=False))
    assert sorted(found) == sorted(TEXTS)


def test_decoders_add_nothing_to_a_text_and_know_no_unknown_token() -> None:
    for objective in ("causal", "ul2"):
        tokenizer = train(TEXTS, 420, SPECIALS[objective])
        for text in ("[EOS] <extra_id_0> 日本語", TEXTS[3]):
            ids = tokenizer.encode(text).ids
            assert min(ids) >= len(SPECIALS[objective].tokens)
            assert tokenizer.decode(ids) == text


def test_a_vocabulary_for_ul2_serves_causal_training_but_not_the_other_way_round() -> None:
    vocabularies = {name: vocabulary_of(train(TEXTS, 420, SPECIALS[name])) for name in ("causal", "ul2")}
    assert not vocabularies["ul2"].ordinary(SPECIALS["causal"])[:2].any()
    with pytest.raises(ValueError, match=r"lacks \[NLU\] \[S2S\] \[NLG\] <extra_id_0>.*raptr prepare --objective ul2"):
        vocabularies["causal"].ordinary(SPECIALS["ul2"])


@every_objective
def test_a_given_tokenizer_must_have_the_special_tokens(objective: str, corpus: Path, tmp_path: Path) -> None:
    other = "causal" if objective == "mlm" else "mlm"
    train(TEXTS, 420, SPECIALS[other]).save(str(tmp_path / "tokenizer.json"))
    domains, file = [DomainSource("corpus", (str(corpus),))], tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=rf"tokenizer.json.* lacks .*\[.*raptr prepare --objective {objective}\b"):
        prepare_corpus(domains, tmp_path / "out", tokenizer=file, specials=SPECIALS[objective])
    store = prepare_corpus(domains, tmp_path / "out", tokenizer=file, specials=SPECIALS[other])
    assert store.vocabulary.ordinary(SPECIALS[other]).any()


def test_another_objective_is_another_request(corpus: Path, tmp_path: Path) -> None:
    domains = [DomainSource("corpus", (str(corpus),))]
    requests: dict[str, dict[str, Any]] = {}
    for objective in ("mlm", "causal"):
        store = prepare_corpus(domains, tmp_path / objective, vocabulary=420, specials=SPECIALS[objective])
        requests[objective] = store.manifest.request
    for made, asked in (("mlm", "causal"), ("causal", "mlm")):
        with pytest.raises(ValueError, match=f"objective was {made}, is {asked}"):
            prepare_corpus(domains, tmp_path / made, vocabulary=420, specials=SPECIALS[asked])
        assert difference(requests[made], requests[made]) == ""


def test_a_vocabulary_has_room_for_special_tokens_and_bytes() -> None:
    smallest = len(SPECIALS["ul2"].tokens) + 256
    with pytest.raises(ValueError, match=rf"vocabulary is {smallest - 1}.*{smallest}"):
        train(TEXTS, smallest - 1, SPECIALS["ul2"])
    assert train(TEXTS, smallest, SPECIALS["ul2"]).get_vocab_size() == smallest


def test_the_built_in_text_of_another_objective_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [Document(f"library/{i}.py", text) for i, text in enumerate(TEXTS)]
    monkeypatch.setattr("raptr.data.prepare.preparation.builtin", lambda: documents)
    stores = [prepare_builtin(tmp_path, 420, specials=specials) for specials in SPECIALS.values()]
    assert len({store.path for store in stores}) == len({store.fingerprint for store in stores}) == len(SPECIALS)


def test_an_unknown_objective_is_refused(corpus: Path, tmp_path: Path) -> None:
    arguments = ["prepare", "--data", str(corpus), "--out", str(tmp_path / "out"), "--objective", "ul3"]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ValueError)
    assert all(word in str(done.exception) for word in ("objective", "'ul3'", *SPECIALS))
    assert not (tmp_path / "out").exists()
