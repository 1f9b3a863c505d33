"""The Triton kernels compute what plain torch computes: compiled on a GPU, by Triton's interpreter elsewhere.

`conftest.py` turns the interpreter on where there is no GPU. It multiplies matrices of bfloat16 wrongly, so it is given
float16, which the kernels treat alike.
"""

from functools import partial
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raptr.models.chunked_loss import chunked_loss
from raptr.models.fused import KERNELS
from tests.interpreted import GPU, INTERPRETED

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or (GPU and KERNELS)), reason="needs Triton, and an NVIDIA GPU or torch 2.13"
)
DEVICE, HALF = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)
LARGE = [(256, 768, 768, 3072), (5000, 768, 64, 128)] if GPU else []


@pytest.mark.parametrize("length", [128, 100, 16])
def test_attention_kernel(length: int) -> None:
    from raptr.models import kernels

    torch.manual_seed(0)
    qkv = torch.randn(6, length, 3 * 4 * 64, device=DEVICE, dtype=HALF, requires_grad=True)
    bias = torch.randn(3 * 4 * 64, device=DEVICE, requires_grad=True)
    grad = torch.randn(6, length, 4 * 64, device=DEVICE, dtype=HALF)
    wide = [t.detach().double().requires_grad_() for t in (qkv, bias)]
    q, k, v = (wide[0] + wide[1]).view(6, length, 3, 4, 64).permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    expected.backward(grad.double())  # type: ignore[no-untyped-call]
    found = kernels.attention(qkv + bias.detach().to(HALF), bias, 4)
    found.backward(grad)
    for mine, right in ((found, expected), (qkv.grad, wide[0].grad), (bias.grad, wide[1].grad)):
        assert mine is not None
        assert right is not None
        assert (mine - right).norm() / right.norm() < 1e-2


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [(77, 48, 32, 300), *LARGE, (300, 192, 64, 1100)])
def test_residual_mlp_kernel(shape: tuple[int, int, int, int], scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from raptr.models import kernels

    if not GPU:  # the interpreter runs programs one after the other
        monkeypatch.setattr(import_module("raptr.models.kernels.residual_mlp"), "WARPS", 128)

    rows, width, inner, features = shape
    torch.manual_seed(0)
    sizes = [(width, inner), (features, width), (width, features)]
    s, t = (torch.tensor(1.4, device=DEVICE), torch.tensor(0.7, device=DEVICE)) if scaled else (None, None)
    norm = nn.LayerNorm(width).to(DEVICE)
    norm.weight.data += 0.3 * torch.randn(width, device=DEVICE)
    norm.bias.data += 0.3 * torch.randn(width, device=DEVICE)
    half = [torch.randn(rows, width), torch.randn(rows, inner), *(torch.randn(n, m) / m**0.5 for n, m in sizes)]
    half = [tensor.to(DEVICE).to(HALF).requires_grad_() for tensor in half]
    biases = [torch.randn(n, device=DEVICE, requires_grad=True) for n, _ in sizes]
    grad = torch.randn(rows, width, device=DEVICE, dtype=HALF)

    given = [*half, *biases, *norm.parameters()]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    x, o, project, mlp_in, mlp_out, project_bias, in_bias, out_bias, gain, shift = wide
    a = F.linear(o, project, project_bias)
    activated = F.gelu(F.linear(F.layer_norm(x + a, (width,), gain, shift, norm.eps), mlp_in, in_bias))
    expected = x + (1 if s is None else s) * a + F.linear((1 if t is None else t) * activated, mlp_out, out_bias)
    expected.backward(grad.double())

    products = list(zip(half[2:], biases, strict=True))
    found = kernels.residual_mlp(half[0], half[1], products, norm, s, t)
    found.backward(grad)  # type: ignore[no-untyped-call]
    assert (found - expected).norm() / expected.norm() < 1e-2
    for mine, right in zip(given, wide, strict=True):
        assert mine.grad is not None
        assert right.grad is not None
        assert (mine.grad - right.grad).norm() / right.grad.norm() < 1.5e-2


@pytest.mark.parametrize("features", [8192, 1376, 40])
def test_swiglu_kernel(features: int) -> None:
    from raptr.models import kernels

    torch.manual_seed(0)
    z = (3 * torch.randn(3, 7, 2 * features, device=DEVICE)).to(HALF).requires_grad_()
    grad = torch.randn(3, 7, features, device=DEVICE, dtype=HALF)
    wide = z.detach().double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    expected = F.silu(gate) * up
    expected.backward(grad.double())  # type: ignore[no-untyped-call]
    found = kernels.swiglu(z)
    found.backward(grad)
    for mine, right in ((found, expected), (z.grad, wide.grad)):
        assert mine is not None
        assert right is not None
        assert mine.shape == right.shape
        assert (mine - right).norm() / right.norm() < 4e-3


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("vocabulary", [1000, 9001, *([70_000] if GPU else [])])
def test_cross_entropy_kernel(vocabulary: int, biased: bool, z_loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from raptr.models import kernels

    if vocabulary == 9001:
        few = partial(chunked_loss, scores=20 * vocabulary)
        monkeypatch.setattr("raptr.models.kernels.cross_entropy.chunked_loss", few)
    torch.manual_seed(0)
    x = torch.randn(77, 64, device=DEVICE, dtype=HALF, requires_grad=True)
    weight = (torch.randn(vocabulary, 64, device=DEVICE) / 2).to(HALF).requires_grad_()  # scores round to 0.06
    bias = torch.randn(vocabulary, device=DEVICE, requires_grad=True) if biased else None
    labels = torch.randint(0, vocabulary, (77,), device=DEVICE)
    given = [t for t in (x, weight, bias) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in given]
    scores = F.linear(*wide)
    expected = (F.cross_entropy(scores, labels) + z_loss * scores.logsumexp(-1).square().mean()) / 4
    expected.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        alone = kernels.linear_cross_entropy(x, weight, bias, labels, z_loss) / 4
    found = kernels.linear_cross_entropy(x, weight, bias, labels, z_loss) / 4
    found.backward()  # type: ignore[no-untyped-call]
    assert alone == found
    assert abs(found.item() - expected.item()) < 1e-2
    for mine, right in zip(given, wide, strict=True):
        assert mine.grad is not None
        assert right.grad is not None
        assert (mine.grad - right.grad).norm() / right.grad.norm() < 2e-2
