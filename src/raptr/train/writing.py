"""Writing checkpoints in the background while training goes on.

With `train.async_checkpoints` a save copies the tensors into the CPU's memory, and a thread writes the copies while
training goes on. One checkpoint is written at a time: the next save and the end of training wait for it, and raise its
error if it failed. Several processes exchange messages about it in a separate process group, since otherwise the
order of these messages and those of training could differ from process to process.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, final

from torch import Tensor

from raptr.distributed.processes import Processes
from raptr.train import checkpoint


@final
class Writer:
    """Writes the checkpoints of a run; as a context manager, it ends when everything is written."""

    def __init__(self, processes: Processes, *, beside: bool) -> None:
        self._processes = processes.apart() if beside else processes
        self._threads = ThreadPoolExecutor(1) if beside else None
        self._pending: Future[Path] | None = None

    def save(
        self, folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keep: int | None
    ) -> None:
        """Write a checkpoint as `checkpoint.save` does, or begin to write it in the background."""
        if self._threads is None:
            checkpoint.save(folder, step, tensors, state, keep=keep, processes=self._processes)
            return
        self.finish()
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        save, processes = checkpoint.save, self._processes
        self._pending = self._threads.submit(save, folder, step, copies, state, keep=keep, processes=processes)

    def finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        try:
            self.finish()
        except Exception:
            if value is None:  # otherwise the error that ended training is the one to report
                raise
