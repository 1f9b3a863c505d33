"""The loss of chunks of rows, and its gradients, are those of all rows at once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raptr.models.chunked_loss import chunked_loss

ROWS, WIDTH, VOCABULARY = 11, 6, 20


def rowwise(scores_RV: Tensor, bias_V: Tensor | None, labels_R: Tensor, share: float, z_loss: float) -> Tensor:
    """What a kernel does, by automatic differentiation; it must never see more rows than allowed."""
    scores = scores_RV.clone().requires_grad_()
    with torch.enable_grad():
        biased = scores if bias_V is None else scores + bias_V
        losses = F.cross_entropy(biased, labels_R, reduction="none") + z_loss * biased.logsumexp(-1).square()
        torch.autograd.backward(share * losses.sum())
    assert scores.grad is not None
    scores_RV.copy_(scores.grad)
    return losses.detach()


def given(*, biased: bool) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(ROWS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)][: 3 if biased else 2]
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    return tensors, torch.randint(0, VOCABULARY, (ROWS,), generator=generator)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [0.5, 1, 3, 4, 11, 100])
def test_chunks_add_up_to_the_whole(rows: float, biased: bool, z_loss: float) -> None:
    tensors, labels = given(biased=biased)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    scores = F.linear(*leaves)
    expected = F.cross_entropy(scores, labels) + z_loss * scores.logsumexp(-1).square().mean()
    torch.autograd.backward(expected)
    x, weight, bias = (*tensors, None)[:3]
    assert x is not None
    assert weight is not None
    most = int(rows * VOCABULARY)
    loss, *gradients = chunked_loss(x, weight, bias, labels, z_loss, rowwise, scores=most)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for mine, leaf in zip(gradients, leaves, strict=False):
        torch.testing.assert_close(mine, leaf.grad, rtol=1e-12, atol=1e-12)
    alone, *none = chunked_loss(x, weight, bias, labels, z_loss, rowwise, gradients=False, scores=most)
    assert alone == loss
    assert [tensor.numel() for tensor in none] == [0, 0, 0]


def test_no_more_scores_than_allowed_exist_at_a_time() -> None:
    (x, weight), labels = given(biased=False)
    seen: list[int] = []

    def watched(scores_RV: Tensor, *rest: object) -> Tensor:
        seen.append(scores_RV.numel())
        return rowwise(scores_RV, *rest)  # type: ignore[arg-type]

    chunked_loss(x, weight, None, labels, 0.0, watched, scores=4 * VOCABULARY + 1)
    assert sum(seen) == ROWS * VOCABULARY
    assert max(seen) <= 4 * VOCABULARY


def test_weights_in_half_precision_have_gradients_summed_in_float32() -> None:
    (x, weight), labels = given(biased=False)
    x, weight = x.bfloat16(), weight.bfloat16()
    exact = chunked_loss(x.double(), weight.double(), None, labels, 0.0, rowwise)[2]
    found = chunked_loss(x, weight, None, labels, 0.0, rowwise, scores=VOCABULARY)[2]
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() < 0.01 * exact.norm()
