"""Shared by all tests: one thread a worker, since two workers share two cores and would wait for each other.

Many also share a small corpus.
"""

import os

import pytest
import torch

from raptr.data import TokenStore
from raptr.data.prepare import Document, prepare

torch.set_num_threads(1)
os.environ["RAPTR_TRACEBACK"] = "1"  # a failing test shows what the command line would write to a file


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Sixty documents of invented words, with a vocabulary of 600; to be read, not changed."""
    words = [f"{a}{b}" for a in ("to", "be", "or", "not", "that", "is") for b in ("", "s", "ing", "ed")]
    texts = [" ".join(words[(7 * i * j + j * j) % len(words)] for j in range(120)) for i in range(60)]
    documents = [Document(f"{i}.txt", text) for i, text in enumerate(texts)]
    return prepare(tmp_path_factory.mktemp("corpus") / "store", lambda: documents, 600)
