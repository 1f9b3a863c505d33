"""Capture of CUDA graphs, which may fail: out of memory, or in code that reads a number back from the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture the operations of the `with` block; if that fails, keep the GPU usable for later work.

    After a failure `torch.cuda.graph` leaves its own stream as the current one, and torch 2.11 considers the random
    generator to be capturing until a capture succeeds: dropout, and replays of other graphs, would fail. So a trivial
    graph is captured, and the stream is restored.
    """
    scratch = torch.zeros((), device=stream.device)
    with torch.cuda.stream(stream):
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                yield
        except RuntimeError:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                scratch.zero_()
            raise
