"""The processes of a run as a value: this process's rank, the number of processes, and how they communicate.

One process is the trivial case `ALONE`, in which every method returns at once, so callers need not ask how many
processes there are. torchrun starts several processes; its environment variables give each one its rank.

Gradients are reduced over NCCL between GPUs and over gloo between CPUs. All other messages (stop requests, digests,
failures) are small. They are sent between CPUs over gloo, in a separate process group `control`, so no step waits for a
GPU because of them. A process that does not answer there is noticed after `timeout` seconds.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate, count
from typing import Literal, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from raptr.distributed.errors import Disagreement, Elsewhere, Lost

T = TypeVar("T")
Engine = Literal["ddp", "fsdp", "hsdp"]
TIMEOUT = 600.0  # seconds
BUCKET = 1 << 25  # numbers in one all-reduce, at most (but at least one tensor)
JOINS = count()  # counts how often this process has joined a process group
PATIENCE = timedelta(hours=4)  # the timeout while one process alone reads all data or writes a checkpoint


@final
@dataclass(frozen=True)
class Processes:
    """This process among those of the run; `mesh` says how the weights lie on them (None: whole on each)."""

    rank: int = 0
    size: int = 1
    here: int = 1  # processes on this machine
    control: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    timeout: float = TIMEOUT

    @property
    def sharded(self) -> bool:
        """Whether the weights are split into shards, so that no process has all of them."""
        return self.mesh is not None and self.mesh.size(self.mesh.ndim - 1) > 1

    @property
    def first(self) -> bool:
        """Whether this is the first process, which writes all files but shards, and prints everything."""
        return self.rank == 0

    def laid_out(self, engine: Engine | None, shards: int | None, device: torch.device) -> "Processes":
        """Return a copy that uses the engine's mesh: (N, 1) for ddp (the default), (N,) for fsdp, (R, S) for hsdp.

        `shards` is S; None: the number of processes on this machine.
        """
        if self.control is None:
            if engine is not None:
                raise ValueError(
                    f"train.parallel is {engine}, but one process was started. Start several with torchrun "
                    "--nproc-per-node N -m raptr, or leave train.parallel out."
                )
            return self
        sharded = shards or self.here
        if engine == "hsdp" and self.size % sharded:
            raise ValueError(
                f"train.shards is {sharded}; with {self.size} processes a divisor of {self.size} is allowed"
            )
        if device.type == "cuda" and self.here > torch.cuda.device_count():
            raise ValueError(
                f"{self.here} processes were started on this machine, which has {torch.cuda.device_count()} GPUs. "
                "Use as many processes as GPUs (torchrun --nproc-per-node)."
            )
        shapes = {"ddp": (self.size, 1), "fsdp": (self.size,), "hsdp": (self.size // sharded, sharded)}
        shape = shapes[engine or "ddp"]
        names = ("replicas", "shards")[-len(shape) :]
        return replace(self, mesh=init_device_mesh(device.type, shape, mesh_dim_names=names))

    def apart(self) -> "Processes":
        """Return a copy with a separate process group for control messages, for use in another thread."""
        return self if self.control is None else replace(self, control=_control(self.timeout))

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of all processes' tensors, on their device."""
        if self.control is None:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total / self.size

    def average(self, tensors: Sequence[Tensor], reduce: torch.dtype | None = None) -> None:
        """Replace tensors of one precision by their means over the processes, summed in it or in `reduce`."""
        while self.control is not None and tensors:
            fitting = sum(size <= BUCKET for size in accumulate(tensor.numel() for tensor in tensors))
            bucket, tensors = list(tensors[: max(1, fitting)]), tensors[max(1, fitting) :]
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            flat = flat if reduce is None else flat.to(reduce)
            dist.all_reduce(flat)
            flat /= self.size
            means = torch.split(flat, [tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [mean.view_as(tensor) for mean, tensor in zip(means, bucket, strict=True)])

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""
        if self.control is None:
            return [value]
        values: list[T | None] = [None] * self.size
        with explained(self):
            dist.all_gather_object(values, value, group=self.control)
        return values  # type: ignore[return-value]

    def agree(self, digests: Callable[[], Mapping[str, str]], flag: Callable[[], bool]) -> "Agreement":
        """Begin to compare all processes' digests, by name, and to ask whether any process raises its flag."""
        if self.control is None:
            return Agreement(self, flag, None, [], [])
        named_digests = digests()
        mine = torch.tensor([*map(_number, named_digests.values()), int(flag())])
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        with explained(self):
            work = dist.all_gather(theirs, mine, group=self.control, async_op=True)
        return Agreement(self, flag, work, list(named_digests), theirs)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run code that all processes leave alike: if it fails in one of them, the others raise `Elsewhere`.

        No messages may be exchanged inside.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        if self.control is not None:
            with explained(self):
                dist.monitored_barrier(self.control, PATIENCE)
        failed = self.gather(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, reason in enumerate(failed):
            if reason is not None:
                raise Elsewhere(f"process {rank} failed: {reason}")

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` in the first process, and return its result in all processes."""
        values: list[T | None] = [None]
        with self.together():
            if self.first:
                values = [make()]
        if self.control is not None:
            with explained(self):
                dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]  # type: ignore[return-value]

    def first_before_others(self, make: Callable[[], T]) -> T:
        """Call `make` in every process, in the first one before the others, which can use what it left on disk."""
        results: list[T] = []
        for turn in (self.first, not self.first):
            with self.together():
                if turn:
                    results.append(make())
        return results[0]

    def share(self, items: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """Yield this process's share of the items, every n-th one, each with True.

        All processes must go through the same items, and get equally many of them: a process that is one short gets the
        last item again, with False.
        """
        number, last = -1, None
        for number, item in enumerate(items):
            last = item
            if number % self.size == self.rank:
                yield item, True
        if last is not None and self.rank > number % self.size:
            yield last, False


ALONE = Processes()


@final
@dataclass(frozen=True)
class Agreement:
    """A comparison of digests that `Processes.agree` has begun; `work` is None with one process."""

    processes: Processes
    flag: Callable[[], bool]
    work: "dist.Work | None"
    names: list[str]
    theirs: list[Tensor]

    def settle(self) -> bool:
        """Wait for the comparison, and return whether any process raised its flag.

        Raise `Disagreement` if the digests differ.
        """
        if self.work is None:
            return self.flag()
        with explained(self.processes):
            self.work.wait()
        rows = [row.tolist() for row in self.theirs]
        for column, name in enumerate(self.names):
            values = [row[column] for row in rows]
            if len(set(values)) > 1:
                usual = max(set(values), key=values.count)
                strange = ", ".join(str(rank) for rank, value in enumerate(values) if value != usual)
                raise Disagreement(
                    f"the processes disagree on {name} (process {strange} against the others), so the run was stopped "
                    "before it changed any weight. Start all of them with the same command, version and data."
                )
        return any(row[-1] for row in rows)


@contextmanager
def joined(timeout: float = TIMEOUT) -> Iterator[Processes]:
    """Connect the processes that torchrun started, inside the context. Without torchrun, yield `ALONE`."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        yield ALONE
        return
    patience, owned = timedelta(seconds=timeout), not dist.is_initialized()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if owned:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
        store, rank, size = next(rendezvous("env://", timeout=patience))
        # torchrun may keep one store for all its restarts, with the addresses of processes that have ended.
        store = PrefixStore(f"raptr-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-{next(JOINS)}", store)
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), here, _control(timeout), timeout=timeout)
    finally:
        if owned:
            dist.destroy_process_group()


@contextmanager
def explained(processes: Processes) -> Iterator[None]:
    """Turn an error of the connection to another process into `Lost`, with advice in its message."""
    try:
        yield
    except RuntimeError as error:
        if processes.control is None or isinstance(error, Lost) or not _network(error):
            raise
        reason = " ".join(str(error).split())
        raise Lost(
            f"process {processes.rank} of {processes.size} lost another one, or waited too long for it ({reason}). "
            "The same command continues from the newest checkpoint."
        ) from error


def _control(timeout: float) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _network(error: RuntimeError) -> bool:
    """Whether an error comes from the connection; gloo raises a plain RuntimeError that names its source file."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "monitoredBarrier" in str(error)


def _number(text: str) -> int:
    """Return 63 bits of a text's hash, which fit in an int64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
