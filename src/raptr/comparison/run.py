"""Run comparisons: each run is an ordinary run folder, trained by `pretrain`, one seed after the other.

    OUT/runs/LABEL-peakP-seedS/   the runs; `outcome.json` marks a finished one, and says where it diverged if it did
    OUT/compare.md, .json, .png   the tables, the record and the plot of the finished runs

Finished runs are not repeated and stopped ones are resumed, so the same command continues a comparison that was stopped
or killed. A run that diverges is recorded as such, and the comparison goes on. It also goes on after a run that fails
with an error, and raises the first such error at its end.

Several runs at once are separate processes, which save and exit when this process asks them to, or is gone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from traceback import clear_frames
from typing import Any

from rich.console import Console, Group
from rich.progress import Progress as Bar

from raptr.comparison.outcomes import FULL, RUNS
from raptr.comparison.progress import NAME, Progress, WantedRun
from raptr.comparison.spec import read_comparison, read_file
from raptr.data import TokenStore
from raptr.files import locked as hold_file
from raptr.files import made, refuse_strange
from raptr.train.opening import open_data
from raptr.train.safety import LOCK, StopRequest, locked
from raptr.train.workers import PATIENCE, Workers

LONGEST = 300  # characters of an error in the line about its run


@dataclass(frozen=True)
class Compared:
    """The state of a comparison: how many of its runs are finished, and their table (None: no run is finished)."""

    out: Path
    finished: int
    runs: int
    table: Group | None
    stopped: bool = False  # asked to stop by SIGTERM or Ctrl-C


@dataclass(frozen=True)
class Asked:
    """A comparison to run: its content, its folder, its record, and other records to take finished runs from."""

    spec: Mapping[str, Any]
    out: Path
    record: Path | None = None
    others: tuple[Path, ...] = ()


def compare(
    spec: Mapping[str, Any] | Path,
    out: Path,
    *,
    record: Path | None = None,
    device: str | None = None,
    keep_models: bool = False,
    jobs: int = 1,
    console: Console | None = None,
) -> Compared:
    """Run the comparison that `spec` describes (a YAML file, or its content), or resume the one in `out`.

    With `record`, runs in that file count as finished, and each run that ends is added to it. A run's checkpoints are
    removed when it is finished, unless `keep_models` is set. `jobs` runs are trained at once; with more than one, no
    times are reported, since concurrent runs slow each other down. A run that fails does not stop the others: its error
    is raised when they have ended, and their tables are written.
    """
    asked = Asked(read_file(spec) if isinstance(spec, Path) else spec, out, record)
    return compare_all([asked], device=device, keep_models=keep_models, jobs=jobs, console=console)[0]


def compare_all(
    asked: Sequence[Asked],
    *,
    device: str | None = None,
    keep_models: bool = False,
    jobs: int = 1,
    console: Console | None = None,
    stop: StopRequest | None = None,
) -> list[Compared]:
    """Run several comparisons, earlier ones first. While one waits for its last runs, the next one's may start."""
    from raptr.comparison.results import redraw  # imports matplotlib, which is slow

    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; 1 or more are allowed")
    console, stop = console or Console(stderr=True), stop or StopRequest()
    with ExitStack() as held:
        comparisons = [read_comparison(request.spec, device=device) for request in asked]
        for request in asked:
            refuse_strange(request.out, "comparison", f"{NAME}.md", partial(_ours, request))
            refusal = f"out is {str(request.out)!r}, where another process is comparing; wait for it, or name another"
            held.enter_context(locked(request.out, refusal))
            held.enter_context(_held_record(request.record or request.out / f"{NAME}.json"))
        held.enter_context(stop.listening())
        all_progress = [
            Progress(
                comparison,
                request.out,
                _described(open_data(comparison.entries[0].config, request.out / RUNS / FULL, console)),
                record=request.record,
                others=request.others,
                jobs=jobs,
                keep_models=keep_models,
            )
            for request, comparison in zip(asked, comparisons, strict=True)
        ]
        for progress in all_progress:
            progress.check()
        failures = _Failures(console)
        while not stop.asked:
            before = sum(progress.finished for progress in all_progress)
            for progress, done in (_one_by_one if jobs == 1 else _at_once)(all_progress, stop, console, failures):
                whole = progress.whole(done.run.seed) and bool(progress.unfinished())
                record = progress.write() if progress.continued or whole else None  # in case of a kill
                if record is not None and whole:
                    redraw(record, progress.out)
            for progress in all_progress:
                progress.judge(stop, console)
            stuck = failures and sum(progress.finished for progress in all_progress) == before
            if stuck or not any(progress.unjudged for progress in all_progress):
                break
        compared = [_concluded(progress) for progress in all_progress]
        if not stop.asked:
            failures.report([progress.out for progress in all_progress])
        return compared


class _Failures:
    """Runs that failed with an error, which the other runs do not wait for; true if there are any."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._errors: dict[Path, Exception] = {}

    def __bool__(self) -> bool:
        return bool(self._errors)

    def __contains__(self, run: WantedRun) -> bool:
        return run.folder in self._errors

    def add(self, name: str, run: WantedRun, error: Exception) -> None:
        """Set a failed run aside. An error that concerns all runs, such as a full disk, is raised."""
        if isinstance(error, OSError | BrokenProcessPool):
            raise error
        self._errors[run.folder] = error
        _let_go(error)
        reason = " ".join(str(error).split())[:LONGEST] or type(error).__name__
        self._console.print(f"{name}run {run.place} failed: {run.run}. {reason}", highlight=False, markup=False)

    def report(self, folders: Sequence[Path]) -> None:
        """Raise the first error, if there is one, after saying what the comparisons came to without these runs."""
        if not self._errors:
            return
        runs = "1 run" if len(self._errors) == 1 else f"{len(self._errors)} runs"
        tables = ", ".join(str(folder) for folder in folders)
        self._console.print(
            f"{runs} failed; the same command tries again. The results of the other runs are in {tables}.",
            highlight=False,
            markup=False,
        )
        raise next(iter(self._errors.values()))


def _let_go(error: BaseException | None) -> None:
    """Clear the local variables of an error's frames, which would keep the run's model and its GPU memory."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _concluded(progress: Progress) -> Compared:
    """Write the record, the tables and the plot of the finished runs."""
    from raptr.comparison.results import redraw, shown  # imports matplotlib, which is slow

    record = progress.write()
    if record is not None:
        redraw(record, progress.out)
    table = None if record is None else shown(record)
    finished, planned = progress.finished, progress.planned
    return Compared(progress.out, finished, planned, table, stopped=finished < planned or progress.unjudged)


def _ours(asked: Asked, path: Path) -> bool:
    """Return whether a comparison that has only begun, and its record, may have written this path in its folder."""
    names = [f"{NAME}."]
    if asked.record is not None:
        record = asked.record.resolve()
        if path.resolve() in record.parents:
            return True
        names += [record.name] if path.resolve().parent == record.parent else []
    return path.name in (LOCK, RUNS) or path.name.lstrip(".").startswith(tuple(names))


@contextmanager
def _held_record(record: Path) -> Iterator[None]:
    """Lock a record. It is written as a whole, so a second comparison would drop the runs that the first one adds."""
    refusal = f"record is {str(record)!r}, to which another process adds its runs; wait for it, or name another"
    with made(record.parent), hold_file(lock := record.with_name(f".{record.name}.lock"), refusal):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _described(store: TokenStore) -> dict[str, Any]:
    """Describe the data for the record: its fingerprint, and the training tokens of each domain."""
    tokens = {part.name: part.total("train") for part in store.manifest.domains}
    return {"fingerprint": store.fingerprint, "tokens": tokens}


def _waiting(all_progress: Iterable[Progress], failures: _Failures) -> Iterator[tuple[Progress, WantedRun]]:
    """Yield the runs that may start, the first comparison's first. Later comparisons are asked only if need be."""
    return ((progress, wanted) for progress in all_progress for wanted in progress.due() if wanted not in failures)


def _share(made: WantedRun, progress: Progress, all_progress: Sequence[Progress]) -> None:
    """Tell the other comparisons of a run that was just trained."""
    progress.unfinished()  # reads the run's outcome
    for other in all_progress:
        other.learn(progress, made.run)


def _named(progress: Progress, all_progress: Sequence[Progress]) -> str:
    return f"{progress.out.name}, " if len(all_progress) > 1 else ""


def _one_by_one(
    all_progress: Sequence[Progress], stop: StopRequest, console: Console, failures: _Failures
) -> Iterator[tuple[Progress, WantedRun]]:
    """Train the runs in turn until asked to stop, and yield each after its training."""
    while not stop.asked and (first := next(_waiting(all_progress, failures), None)):
        progress, wanted = first
        named = _named(progress, all_progress)
        console.print(f"{named}run {wanted.place}: {wanted.run}", highlight=False, markup=False)
        try:
            wanted.train(stop, console)
        except Exception as error:
            failures.add(named, wanted, error)
            continue
        _share(wanted, progress, all_progress)
        yield first


def _at_once(
    all_progress: Sequence[Progress], stop: StopRequest, console: Console, failures: _Failures
) -> Iterator[tuple[Progress, WantedRun]]:
    """Train the runs in several processes until asked to stop, and yield each after its training."""
    first = next(_waiting(all_progress, failures), None)
    if first is None:
        return
    jobs, device = first[0].jobs, first[1].run.config.train.resolve_device()
    with Workers(jobs, device) as workers, Bar(console=console) as bar:
        shown = bar.add_task("runs", total=None)
        running: dict[Future[None], tuple[Progress, WantedRun]] = {}
        submitted: set[Path] = set()

        def fresh() -> Iterator[tuple[Progress, WantedRun]]:
            for progress, wanted in _waiting(all_progress, failures):
                begun = running.values()
                if wanted.folder not in submitted and not any(
                    progress.takes(by, one.run, wanted.run) for by, one in begun
                ):
                    yield progress, wanted

        def submit() -> None:
            # Submit no more than can run at once: a run that becomes wanted later may have to go before these.
            for one in islice(fresh(), jobs - len(running)):
                submitted.add(one[1].folder)
                running[workers.submit(_make, one[1])] = one

        submit()
        while running and not stop.asked:
            for future in wait(running, PATIENCE, FIRST_COMPLETED).done:
                progress, wanted = running.pop(future)
                named = _named(progress, all_progress)
                try:
                    future.result()
                except Exception as error:
                    failures.add(named, wanted, error)
                    submit()
                    continue
                line = f"{named}run {wanted.place} {wanted.state}: {wanted.run}"
                bar.console.print(line, highlight=False, markup=False)
                _share(wanted, progress, all_progress)
                submit()
                counted = [(one.finished, one.planned) for one in all_progress]
                bar.update(shown, completed=sum(n for n, _ in counted), total=sum(n for _, n in counted))
                yield progress, wanted


def _make(stop: StopRequest, wanted: WantedRun) -> None:
    wanted.train(stop, Console(quiet=True))
