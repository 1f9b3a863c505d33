"""Run the next comparisons of the queue, for some minutes: `python -m evidence.take --minutes 9 --jobs 7`.

Runs are made in the order of the queue, `--jobs` at once. Each finished run is written to its comparison's record
(docs/results/evidence/). When the minutes are over, or at SIGTERM or Ctrl-C, unfinished runs are saved; the same
command resumes them, on the same machine. On another machine only the records count. Nothing in a record is run again.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from threading import Timer

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from evidence.queue import QUEUE, Item, Standing, read_queue, standing
from raptr.comparison import compare_all
from raptr.comparison.record import load_record
from raptr.data import open_store
from raptr.report.units import duration
from raptr.train.run import environment
from raptr.train.safety import StopRequest


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = _options(arguments)
    items = read_queue(options.queue)
    if not options.list:
        try:
            take(items, options)
        except ValueError as error:
            sys.exit(f"error: {error}")
    stands = _stands(items, options)
    Console().print(table(items, stands))
    for item in items:
        if refused := stands[item.name].refused:
            print(f"{item.name} cannot run: {refused}")


def take(items: Sequence[Item], options: Namespace) -> None:
    """Run the unfinished comparisons until the minutes are over."""
    if environment()["commit"] is None:
        raise ValueError(
            "the commit is not known, and every record names it. Set RAPTR_COMMIT, or run in a git checkout."
        )
    ready = [item for item in items if item.ready(options.data)]
    _check_data(ready, options.data)
    stop = StopRequest()
    clock = Timer(60 * options.minutes, _ask, [stop])
    clock.daemon = True
    clock.start()
    try:
        stands = _stands(items, options)
        left = [item for item in ready if not item.held and not _settled(stands[item.name])]
        asked = [item.asked(items, options.data, options.out) for item in left]
        compare_all(asked, device=options.device, keep_models=options.keep_models, jobs=options.jobs, stop=stop)
    finally:
        clock.cancel()


def table(items: Sequence[Item], stands: dict[str, Standing]) -> Table:
    """Return the state of the queue, with the time until the end of each comparison that `take` would run."""
    shown = Table(box=SIMPLE, caption="GPU time is estimated for one H200 with seven runs at once.")
    shown.add_column("comparison", no_wrap=True)
    for column in ("runs", "GPU time left", "with those above"):
        shown.add_column(column, justify="right")
    total = 0.0
    for item in items:
        stand = stands[item.name]
        runs = "cannot run" if stand.refused else f"{stand.finished} of {stand.planned}"
        left = "–" if _settled(stand) else duration(stand.seconds)
        taken = not _settled(stand) and not item.held
        total += stand.seconds if taken else 0.0
        shown.add_row(item.name, runs, left, duration(total) if taken else "held back" if item.held else "")
    return shown


def _stands(items: Sequence[Item], options: Namespace) -> dict[str, Standing]:
    return {item.name: standing(item, items, options.out, options.data) for item in items}


def _settled(stand: Standing) -> bool:
    return stand.done or stand.refused is not None


def _check_data(items: Sequence[Item], data: Path) -> None:
    """Refuse text other than that of the records: losses would not compare, and full training would run again."""
    open_store(data)  # raises a clear error if this is not a prepared folder
    for item in items:
        record, fingerprint = load_record(item.record), open_store(item.text(data)).fingerprint
        if record is not None and record["data"]["fingerprint"] != fingerprint:
            raise ValueError(
                f"data is {str(item.text(data))!r} with the fingerprint {fingerprint}, but {item.record} was made with "
                f"{record['data']['fingerprint']}. Prepare the same text with the same command."
            )


def _ask(stop: StopRequest) -> None:
    stop.asked = True


def _options(arguments: Sequence[str] | None) -> Namespace:
    assert __doc__ is not None
    parser = ArgumentParser(prog="python -m evidence.take", description=__doc__.splitlines()[0].split(":")[0] + ".")
    parser.add_argument("--list", action="store_true", help="show where the queue stands and run nothing")
    parser.add_argument("--minutes", type=float, default=9, help="save and stop after so many minutes (9)")
    parser.add_argument("--jobs", type=int, default=7, help="runs at once (7)")
    parser.add_argument("--data", type=Path, default=Path("corpus"), help="the folder made by `raptr prepare` (corpus)")
    parser.add_argument("--out", type=Path, default=Path("runs/evidence"), help="where runs go (runs/evidence)")
    parser.add_argument("--keep-models", action="store_true", help="keep the last checkpoint of every run")
    parser.add_argument("--device", help="auto, cpu or cuda")
    parser.add_argument("--queue", type=Path, default=QUEUE, help=f"the queue ({QUEUE})")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
