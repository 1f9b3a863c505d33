"""Numbers of a step read back from the device without making the steps wait, and the seconds that steps took.

On a GPU the program runs ahead of the device. A reading is copied out in the background and looked at when the next
one is taken: then it is there, and the program is never more than one reading ahead. Its seconds are the device's
own, up to the moment when the step was done; evaluations and checkpoints are left out.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

Note = Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """What was noted when the reading was taken, the numbers, and the training seconds until then."""

    note: Note
    numbers: list[float]
    seconds: float


@final
class Readout:
    """A stopwatch with readings; it runs between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0  # of all stretches that have ended
        self._gpu = device.type == "cuda"
        self._pending: deque[tuple[Note, Tensor, _Moment]] = deque()
        self._started: _Moment | None = None

    def start(self) -> None:
        """Go on counting."""
        assert self._started is None
        assert not self._pending
        self._started = _Moment(self._gpu)

    def take(self, note: Note, *numbers: Tensor) -> list[Reading]:
        """Read these numbers; returns the readings that are there by now: on a GPU, those taken before."""
        stacked = torch.stack([number.detach().double() for number in numbers])
        if self._gpu:
            there = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            stacked = there.copy_(stacked, non_blocking=True)
        self._pending.append((note, stacked, _Moment(self._gpu)))
        return self._read(1 if self._gpu else 0)

    def stop(self) -> list[Reading]:
        """Wait for the device and stop counting; returns the readings not returned yet."""
        assert self._started is not None
        readings, end = self._read(0), _Moment(self._gpu)
        self.seconds += end.since(self._started)
        self._started = None
        return readings

    def _read(self, leave: int) -> list[Reading]:
        assert self._started is not None
        readings = []
        while len(self._pending) > leave:
            note, numbers, moment = self._pending.popleft()
            seconds = self.seconds + moment.since(self._started)  # waits, so the numbers are there
            readings.append(Reading(note, numbers.tolist(), seconds))
        return readings


@final
class _Moment:
    """A point in time: on a GPU, when the device gets there."""

    def __init__(self, gpu: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if gpu else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()
        self._time = time.monotonic()

    def since(self, start: "_Moment") -> float:
        """Seconds from `start` to here; waits until the device is here."""
        if self._event is None or start._event is None:
            return self._time - start._time
        self._event.synchronize()
        return float(start._event.elapsed_time(self._event)) / 1000
