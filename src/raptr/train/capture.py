"""CUDA graphs whose capture may fail: out of memory, or in code that reads a number back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what is called inside; where that fails, GPU work can go on as it could before.

    After a failure `torch.cuda.graph` leaves its stream the current one, and torch 2.11 takes the generator to be
    capturing until a capture succeeds: dropout, and replays of other graphs, would fail.
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
