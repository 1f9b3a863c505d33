"""Every token is predicted from those before it, and with isolated documents from its own document alone."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raptr.data import EvalData, TokenStore, TrainData, Vocabulary, Windows
from raptr.data.batch import Batch
from raptr.data.prepare import Document, prepare
from raptr.objectives import SPECIALS
from raptr.objectives.causal import CausalLM

END = 1
VOCABULARY = Vocabulary({"[PAD]": 0, "[EOS]": END} | {f"word{i}": i for i in range(2, 100)})
# A window that begins inside a document, and one that begins with an end token; documents of 3, 1, 4 and more tokens.
DOCUMENTS = [[5, 6, END, END, 7, 8, 9, END, 10], [END, 20, 21, 22, END, 30, END, 31, 32]]
SEGMENTS = [[0, 0, 0, 1, 2, 2, 2, 2, 3], [0, 1, 1, 1, 1, 2, 2, 3, 3]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    documents = [Document(f"{i}", f"text number {i} says {i * i} and no more. " * (1 + i % 5)) for i in range(120)]
    return prepare(tmp_path_factory.mktemp("text") / "store", lambda: documents, 400, specials=SPECIALS["causal"])


def batch_of(documents: list[list[int]], segments: list[list[int]] | None = None) -> Batch:
    numbers = np.arange(len(documents), dtype=np.uint64)
    windows = Windows(np.array(documents), numbers, None if segments is None else np.array(segments))
    return CausalLM(VOCABULARY).training(windows, seed=0)


def sees(batch: Batch) -> torch.Tensor:
    """Which input positions a causal model may use at each position: itself and before, in its segment; (B, S, S)."""
    length = batch.tokens_BS.shape[1]
    seen = torch.ones(len(batch.tokens_BS), length, length).tril().bool()
    if batch.segments_BS is not None:
        seen &= batch.segments_BS.unsqueeze(2) == batch.segments_BS.unsqueeze(1)
    return seen


def test_labels_are_the_input_one_token_later(text: TokenStore) -> None:
    objective = CausalLM(text.vocabulary)
    windows = TrainData(text, objective.window(32), 8, seed=0).windows(2)
    batch = objective.training(windows, seed=0)
    assert windows.tokens_BW.shape == (8, 33)
    assert torch.equal(batch.tokens_BS[:, 1:], batch.labels_BM[:, :-1])
    assert torch.equal(torch.cat([batch.tokens_BS, batch.labels_BM[:, -1:]], 1), torch.from_numpy(windows.tokens_BW))
    assert batch.positions_BM is None
    assert batch.segments_BS is None
    assert torch.equal(batch.labels_BS(), batch.labels_BM)
    assert all(tensor.is_contiguous() for tensor in (batch.tokens_BS, batch.labels_BM))


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["packed", "isolated"])
def test_no_label_can_be_seen_where_it_is_predicted(segments: list[list[int]] | None) -> None:
    batch = batch_of(DOCUMENTS, segments)
    width = len(DOCUMENTS[0])
    for place in range(width):
        changed = [[99 if at == place else token for at, token in enumerate(row)] for row in DOCUMENTS]
        other = batch_of(changed, segments)
        inputs, labels = (other.tokens_BS != batch.tokens_BS), (other.labels_BM != batch.labels_BM)
        # A token is the input at its place and the label of the one before, and nothing else changes.
        assert all(row.nonzero().flatten().tolist() == ([place] if place < width - 1 else []) for row in inputs)
        assert all(row.nonzero().flatten().tolist() == ([place - 1] if place else []) for row in labels)
        assert not (sees(batch) & inputs.unsqueeze(1) & labels.unsqueeze(2)).any()


def test_an_end_token_starts_the_next_document_where_documents_are_isolated() -> None:
    batch = batch_of(DOCUMENTS, SEGMENTS)
    assert batch.segments_BS is not None
    # A position belongs to the document of its label.
    assert batch.segments_BS.tolist() == [row[1:] for row in SEGMENTS]
    for row, (tokens, document_of) in enumerate(zip(DOCUMENTS, SEGMENTS, strict=True)):
        for place, seen in enumerate(sees(batch)[row]):
            label = document_of[place + 1]
            used = [at for at in range(place + 1) if seen[at]]
            assert place in used
            # Nothing of another document but the end token right before this one.
            strangers = [at for at in used if document_of[at] != label]
            assert all(tokens[at] == END and document_of[at + 1] == label for at in strangers)
            if document_of[place] != label:
                assert used == [place]


def stock() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.train(False)
    return model


@torch.no_grad()
def test_the_loss_is_that_of_a_stock_decoder() -> None:
    model, batch = stock(), batch_of(DOCUMENTS)
    logits = model(input_ids=batch.tokens_BS).logits
    ours = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BM.flatten())
    windows = torch.tensor(DOCUMENTS)
    torch.testing.assert_close(ours, model(input_ids=windows, labels=windows).loss)  # it shifts the labels itself


@torch.no_grad()
def test_isolated_documents_are_predicted_as_if_they_stood_alone() -> None:
    model, batch = stock(), batch_of(DOCUMENTS, SEGMENTS)
    logits = model(input_ids=batch.tokens_BS, attention_mask=sees(batch).unsqueeze(1)).logits
    # The third document of the second window, behind the end token before it.
    alone = model(input_ids=torch.tensor([[END, 30]])).logits
    torch.testing.assert_close(logits[1, 4:6], alone[0], atol=1e-5, rtol=0)
    assert batch.labels_BM[1, 4:6].tolist() == [30, END]


def test_every_position_counts_so_micro_batches_have_the_same_number_of_targets(text: TokenStore) -> None:
    objective = CausalLM(text.vocabulary)
    data = TrainData(text, objective.window(24), 8, seed=0, isolate=True)
    whole = objective.training(data.windows(1), seed=0)
    parts = [objective.training(data.windows(1, micro, 4), seed=0) for micro in range(4)]
    assert whole.labels_BM.shape == (8, objective.targets(24))
    assert (whole.labels_BM >= 0).all()
    assert torch.equal(torch.cat([part.labels_BM for part in parts]), whole.labels_BM)


def test_held_out_windows_are_the_same_in_training_and_evaluation(text: TokenStore) -> None:
    objective = CausalLM(text.vocabulary)
    (windows,) = EvalData(text, objective.window(16), 4).windows("text", 4)
    assert torch.equal(objective.evaluation(windows).labels_BM, objective.training(windows, seed=9).labels_BM)


def test_a_vocabulary_needs_an_end_token() -> None:
    with pytest.raises(ValueError, match=r"lacks .*\[EOS\].*causal"):
        CausalLM(Vocabulary({"[PAD]": 0, "the": 1}))
