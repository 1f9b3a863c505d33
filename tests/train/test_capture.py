"""A capture that fails leaves nothing behind; the GPU is one that behaves as torch 2.11 does."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raptr.train.capture import captured


class Gpu:
    """The current stream, and whether the generator believes that a capture is under way."""

    def __init__(self) -> None:
        self.current, self.capturing, self.captures = "default", False, 0

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, pool: object = None, stream: Any = None) -> Iterator[None]:
        before, self.current, self.capturing = self.current, stream.name, True
        try:
            yield
        except RuntimeError as error:  # the stream is not given back, and the generator not told
            raise RuntimeError("operation failed due to a previous error during capture") from error
        self.current, self.capturing, self.captures = before, False, self.captures + 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    for name, fake in {"stream": made.stream, "graph": made.graph, "CUDAGraph": object}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return made


SIDE: Any = SimpleNamespace(name="side", device=torch.device("cpu"))


def test_a_capture_that_fails_leaves_stream_and_generator_as_they_were(gpu: Gpu) -> None:
    graph: Any = object()

    def refused() -> None:
        assert (gpu.current, gpu.capturing) == ("side", True)
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="previous error"), captured(graph, None, SIDE):
        refused()
    assert (gpu.current, gpu.capturing) == ("default", False)


def test_a_capture_that_succeeds_is_the_only_one(gpu: Gpu) -> None:
    graph: Any = object()
    with captured(graph, None, SIDE):
        assert (gpu.current, gpu.capturing) == ("side", True)
    assert (gpu.current, gpu.capturing, gpu.captures) == ("default", False, 1)
