"""The next batch is read while the device works on this one.

It changes nothing in what is read: a batch is a function of its step, so one that was read ahead for a step that
does not come is simply left.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

from raptr.data.batch import Batch


@final
class Prefetch:
    """Micro-batches in order of use, each made by another thread while the one before is at work."""

    def __init__(self, make: Callable[[int, int], Batch], micros: int) -> None:
        self._make, self._micros = make, micros
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: tuple[int, int] | None = None
        self._pending: Future[Batch] | None = None

    def get(self, step: int, micro: int) -> Batch:
        """The micro-batch of a step; the one that follows is begun."""
        if self._pending is not None and self._ahead == (step, micro):
            batch = self._pending.result()
        else:
            batch = self._make(step, micro)
        last = micro + 1 == self._micros
        self._ahead = (step + 1, 0) if last else (step, micro + 1)
        self._pending = self._pool.submit(self._make, *self._ahead)
        return batch
