"""Reading numbers of a step back from the device without making steps wait, and measuring the time of steps.

On a GPU the program runs ahead of the device. A reading is copied to the CPU in the background and returned when the
next one is taken, so the program is never more than one reading ahead. Its time is measured by the device's own clock,
up to the moment when the step was done; evaluations and checkpoints are not counted.
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
    """The note made when the reading was taken, its numbers, and the seconds of training until then."""

    note: Note
    numbers: list[float]
    seconds: float


@final
class Readout:
    """A stopwatch that also takes readings; it runs between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0  # between all earlier calls of `start` and `stop`
        self._gpu = device.type == "cuda"
        self._pending: deque[tuple[Note, Tensor, _Moment]] = deque()
        self._started: _Moment | None = None

    def start(self) -> None:
        """Start or continue counting."""
        assert self._started is None
        assert not self._pending
        self._started = _Moment(self._gpu)

    def take(self, note: Note, *numbers: Tensor) -> list[Reading]:
        """Take a reading of these numbers; return the readings that are complete: on a GPU, only earlier ones."""
        stacked = torch.stack([number.detach().double() for number in numbers])
        if self._gpu:
            pinned = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            stacked = pinned.copy_(stacked, non_blocking=True)
        self._pending.append((note, stacked, _Moment(self._gpu)))
        return self._read(1 if self._gpu else 0)

    def stop(self) -> list[Reading]:
        """Wait for the device and stop counting; return the readings that were not returned yet."""
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
            seconds = self.seconds + moment.since(self._started)  # waits for the device, so the copy is complete
            readings.append(Reading(note, numbers.tolist(), seconds))
        return readings


@final
class _Moment:
    """A point in time: on a GPU, the time at which the device reaches it."""

    def __init__(self, gpu: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if gpu else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()
        self._time = time.monotonic()

    def since(self, start: "_Moment") -> float:
        """Return the seconds since `start`; waits until the device has reached this moment."""
        if self._event is None or start._event is None:
            return self._time - start._time
        self._event.synchronize()
        return float(start._event.elapsed_time(self._event)) / 1000
