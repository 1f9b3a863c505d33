"""Processes that work for another one: what they do not hear, and how much of the machine they take."""

import os
import signal

import pytest
import torch

from raptr.train.safety import StopRequest
from raptr.train.workers import Workers

CPU = torch.device("cpu")


def told_to_end(stop: StopRequest, number: int) -> int:
    os.kill(os.getpid(), number)
    return 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_whole_group_are_for_the_parent_alone(number: int) -> None:
    before = signal.getsignal(number)
    with Workers(1, CPU) as workers:
        assert workers.submit(told_to_end, number).result() == 1
    assert signal.getsignal(number) == before


def threads(stop: StopRequest) -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["RAYON_NUM_THREADS"]


def test_they_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    with Workers(2, CPU) as workers:
        assert workers.submit(threads).result() == (3, "3")
