"""Attention inside segments: what the GPU runs equals the dense mask that the CPU runs."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from raptr.models.attention import Segments, attend, make_prefix, make_segments, prefix_blocks, segment_blocks


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


def prefixes(length: int) -> torch.Tensor:
    """Those at and around the ends of blocks, and a few others."""
    edges = [place + step for place in range(0, length + 1, 128) for step in (-1, 0, 1)]
    return torch.tensor(sorted({place for place in (*edges, 5, length // 2, length) if 1 <= place <= length}))


def indices(blocks: BlockMask) -> dict[str, list[list[list[list[int]]]]]:
    """The blocks that are named, row by row; the places behind them hold anything."""
    pairs = {kind: (f"{kind}num_blocks", f"{kind}indices") for kind in ("kv_", "full_kv_", "q_", "full_q_")}
    found = {}
    for kind, (count, order) in pairs.items():
        counts, orders = getattr(blocks, count), getattr(blocks, order)
        assert counts.dtype == orders.dtype == torch.int32
        found[kind] = [
            [
                [row[:number] for row, number in zip(rows, numbers, strict=True)]
                for rows, numbers in zip(o, c, strict=True)
            ]
            for o, c in zip(orders.tolist(), counts.tolist(), strict=True)
        ]
    return found


@pytest.mark.parametrize("length", [40, 128, 200, 512, 600])
def test_blocks_of_a_prefix_are_those_that_a_look_at_every_position_finds(length: int) -> None:
    prefix_B = prefixes(length)

    def seen(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) | (k < prefix_B[b])

    made, looked = prefix_blocks(prefix_B, length), create_block_mask(seen, len(prefix_B), None, length, length, "cpu")
    assert made.seq_lengths == looked.seq_lengths == (length, length)
    assert made.BLOCK_SIZE == looked.BLOCK_SIZE
    assert indices(made) == indices(looked)


def packed(length: int) -> torch.Tensor:
    """Documents that begin and end at and around the ends of blocks, and one that fills the sequence."""
    starts = [[], [128], [127, 129], [1, 130, 256], [5, 255, 257, 384], list(range(7, 600, 7)), [length - 1]]
    return torch.stack([(torch.arange(length) >= torch.tensor(some).view(-1, 1)).sum(0) for some in starts])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [40, 128, 200, 512, 600])
def test_blocks_of_documents_are_those_that_a_look_at_every_position_finds(length: int, causal: bool) -> None:
    ids = packed(length)

    def seen(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (ids[b, q] == ids[b, k]) & ((k <= q) | (not causal))

    made, looked = segment_blocks(ids, causal=causal), create_block_mask(seen, len(ids), None, length, length, "cpu")
    assert made.seq_lengths == looked.seq_lengths == (length, length)
    assert indices(made) == indices(looked)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_segments_in_any_order_equal_the_dense_mask(causal: bool) -> None:
    ids = torch.randint(0, 3, (2, 300), generator=torch.Generator().manual_seed(0)) * torch.tensor([[1], [0]])
    ids[1, 280:] = 1  # padding
    q, k = (torch.randn(2, heads, 300, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2))
    attended = torch.compile(attend, backend="eager", fullgraph=True)
    found = attended(q, k, k, Segments(blocks=segment_blocks(ids, causal=causal)))
    torch.testing.assert_close(found, attend(q, k, k, make_segments(ids, causal=causal)))


def test_a_position_sees_itself_those_before_it_and_the_prefix() -> None:
    prefix_B = prefixes(40)
    dense = make_prefix(prefix_B, 40).dense_B1SS
    assert dense is not None
    expected = [[[k <= q or k < prefix for k in range(40)] for q in range(40)] for prefix in prefix_B.tolist()]
    assert dense.squeeze(1).tolist() == expected


@pytest.mark.filterwarnings("ignore")  # torch's own, from its compiler
def test_blocks_equal_the_dense_mask_and_other_prefixes_need_no_other_code() -> None:
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=False)
    def attended(q: torch.Tensor, k: torch.Tensor, mask: Segments) -> torch.Tensor:
        return attend(q, k, k, mask)

    q, k = (torch.randn(3, heads, 256, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2))
    for prefix in ([1, 100, 256], [128, 129, 127], [7, 7, 7]):
        prefix_B = torch.tensor(prefix)
        found = attended(q, k, Segments(blocks=prefix_blocks(prefix_B, 256)))
        torch.testing.assert_close(found, attend(q, k, k, make_prefix(prefix_B, 256)))
    assert counter.frame_count == 1


def test_no_number_is_read_back_while_blocks_are_made() -> None:
    with FakeTensorMode():  # which has shapes and no numbers: as in a CUDA graph, nothing can depend on them
        prefix = prefix_blocks(torch.full((3,), 100), 512)
        documents = segment_blocks(torch.zeros(3, 500, dtype=torch.long), causal=True)
    assert prefix.kv_indices.shape == documents.kv_indices.shape == (3, 1, 4, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, from its compiler
@pytest.mark.parametrize("length", [200, 512])
def test_blocks_of_a_prefix_equal_the_dense_mask_on_a_gpu(length: int) -> None:
    prefix_B, results = prefixes(length), []
    dense = make_prefix(prefix_B, length).dense_B1SS
    assert dense is not None
    for mask in (Segments(dense_B1SS=dense.cuda()), make_prefix(prefix_B.cuda(), length)):
        generator = torch.Generator().manual_seed(0)
        shape = len(prefix_B), 3, length, 16
        q, k, v = (torch.randn(shape, generator=generator).cuda().requires_grad_() for _ in range(3))
        out = attend(q, k, v, mask)
        torch.autograd.backward((out * torch.arange(16, device="cuda")).sum())
        results.append([out.detach(), q.grad, k.grad, v.grad])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)
