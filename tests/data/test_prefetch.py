"""What is read ahead is what would be read; errors come when their batch is asked for."""

import pytest
import torch

from raptr.data import Batch, Prefetch

made: list[tuple[int, int]] = []


def make(step: int, micro: int) -> Batch:
    made.append((step, micro))
    if step == 3:
        raise ValueError("step 3 cannot be read")
    return Batch(*(torch.tensor([[10 * step + micro]]) for _ in range(3)))


def test_batches_come_as_asked_for_and_the_next_is_made_ahead() -> None:
    made.clear()
    ahead = Prefetch(make, micros=2)
    values = [ahead.get(step, micro).tokens_BS.item() for step, micro in [(0, 0), (0, 1), (1, 0), (7, 1), (0, 0)]]
    assert values == [0, 1, 10, 71, 0]
    assert made[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_an_error_comes_with_its_batch() -> None:
    ahead = Prefetch(make, micros=1)
    ahead.get(2, 0)
    with pytest.raises(ValueError, match="step 3 cannot be read"):
        ahead.get(3, 0)
