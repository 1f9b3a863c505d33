"""Shared by all tests: one thread a worker, since two workers share two cores and would wait for each other.

Many also share a small corpus.
"""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined

from raptr.data import TokenStore
from raptr.data.prepare import Document, prepare
from raptr.objectives import SPECIALS

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the commands that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job; its children would ignore Ctrl-C too
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["RAPTR_TRACEBACK"] = "1"  # a failing test shows what the command line would write to a file


def _small_corpus() -> list[Document]:
    words = [f"{a}{b}" for a in ("to", "be", "or", "not", "that", "is") for b in ("", "s", "ing", "ed")]
    texts = [" ".join(words[(7 * i * j + j * j) % len(words)] for j in range(120)) for i in range(60)]
    return [Document(f"{i}.txt", text) for i, text in enumerate(texts)]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Sixty documents of invented words, with a vocabulary of 600; to be read, not changed."""
    return prepare(tmp_path_factory.mktemp("corpus") / "store", _small_corpus, 600)


@pytest.fixture(scope="session")
def stores(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenStore]:
    """The same documents for each family of models, prepared for what it learns."""
    causal = prepare(tmp_path_factory.mktemp("causal") / "store", _small_corpus, 600, specials=SPECIALS["causal"])
    return {"bert": store, "decoder": causal}


@pytest.fixture
def float64() -> Iterator[None]:
    """Computes in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
