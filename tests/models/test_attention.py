"""Attention inside segments: what the GPU runs equals the dense mask that the CPU runs."""

import pytest
import torch

from raptr.models.attention import Segments, attend, make_segments


def tensors(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 200, 16, generator=generator).to(device).requires_grad_() for _ in range(3)]


def segments(device: str) -> torch.Tensor:
    return torch.tensor([[0] * 70 + [1] * 1 + [2] * 129, [0] * 200]).to(device)


def test_no_segments_is_plain_attention() -> None:
    assert make_segments(None) is None
    q, k, v = tensors("cpu")
    whole = make_segments(torch.zeros(2, 200, dtype=torch.long))
    torch.testing.assert_close(attend(q, k, v, whole), attend(q, k, v, None))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, from its compiler
def test_block_masks_equal_dense_masks() -> None:
    results = []
    for dense in (True, False):
        q, k, v = tensors("cuda")
        ids = segments("cuda")
        mask = Segments(dense_B1SS=(ids[:, :, None] == ids[:, None, :])[:, None]) if dense else make_segments(ids)
        out = attend(q, k, v, mask)
        torch.autograd.backward((out * torch.arange(16, device="cuda")).sum())
        results.append([out.detach(), q.grad, k.grad, v.grad])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)
