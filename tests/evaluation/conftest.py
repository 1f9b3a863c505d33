"""A decoder that knows two tasks, and one that knows nothing, for all tests of few-shot evaluation."""

from pathlib import Path

import pytest

from tests.evaluation.small_decoder import capital_rows, capital_texts, make_decoder, review_texts, reviews
from tests.evaluation.tiny import write_jsonl


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [*review_texts(reviews(384, 0), 0), *(capital_texts() * 8)]
    return make_decoder(
        tmp_path_factory.mktemp("decoders") / "taught", [text for pair in _mixed(texts) for text in pair]
    )


def _mixed(texts: list[str]) -> list[tuple[str, ...]]:
    """Three of the first task, then one of the second."""
    first, second = texts[:384], texts[384:]
    return [(*first[3 * i : 3 * i + 3], second[i]) for i in range(128)]


@pytest.fixture(scope="session")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_decoder(tmp_path_factory.mktemp("decoders") / "untaught", seed=1)


@pytest.fixture(scope="session")
def ul2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_decoder(tmp_path_factory.mktemp("decoders") / "mixed", length=64, ul2=True)


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of two tasks: sentences to judge, and capitals."""
    folder = tmp_path_factory.mktemp("questions")
    write_jsonl(folder / "boolq.jsonl", reviews(120, 5))
    write_jsonl(folder / "boolq_exemplars.jsonl", reviews(20, 6))
    write_jsonl(folder / "nq_open.jsonl", capital_rows(40))
    return folder
