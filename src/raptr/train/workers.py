"""A pool of worker processes.

Each worker holds one end of a pipe whose other end only the parent has. When the parent closes it, or dies, workers are
asked to stop: they finish what must not be interrupted, and leave.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, final

import torch

from raptr.train.safety import StopRequest, handled

if TYPE_CHECKING:
    from multiprocessing.synchronize import Lock as SharedLock

T = TypeVar("T")
P = ParamSpec("P")

PATIENCE = 0.5  # seconds between two checks whether to stop


@final
class Workers:
    """A pool of `jobs` processes for a device, as a context manager; at its end the processes stop their work."""

    def __init__(self, jobs: int, device: torch.device) -> None:
        self._jobs = jobs
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        receiver, self._sender = context.Pipe(duplex=False)
        arguments = (receiver, context.Lock(), device, max(1, torch.get_num_threads() // jobs))
        self._pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=arguments)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._sender.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise ValueError(
                f"jobs is {self._jobs}, but one of the processes ended before its time (killed, perhaps because "
                "memory ran out; or jobs came from a script without `if __name__ == '__main__':`); the same command "
                "continues, with fewer jobs if need be"
            ) from None

    def submit(
        self, function: Callable[Concatenate[StopRequest, P], T | None], *arguments: P.args, **named: P.kwargs
    ) -> "Future[T | None]":
        """Call a function in one of the processes, with a stop request as its first argument.

        The result is None if the call had not begun when the processes were asked to stop.
        """
        # Processes start here and inherit the ignored signals: what a terminal, `timeout` or Slurm sends to all of them
        # reaches only the parent, which then asks them to stop.
        with handled(signal.SIG_IGN):
            return self._pool.submit(_call, function, arguments, named)


_asked, _busy = StopRequest(), Lock()  # of a worker process


def _start(receiver: Connection, turn: "SharedLock", device: torch.device, threads: int) -> None:
    torch.set_num_threads(threads)
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))  # the threads of tokenizers
    Thread(target=_listen, args=(receiver,), daemon=True).start()
    with turn:
        torch.zeros(1, device=device)  # under CUDA MPS, processes that ask for a GPU at once may be refused


def _listen(receiver: Connection) -> None:
    receiver.poll(None)  # returns when the other end is closed
    _asked.asked = True
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # a living parent waits for this process, which then ends during this call
    with _busy:
        os._exit(1)


def _call(function: Callable[..., T | None], arguments: tuple[Any, ...], named: dict[str, Any]) -> T | None:
    with _busy:
        return None if _asked.asked else function(_asked, *arguments, **named)
