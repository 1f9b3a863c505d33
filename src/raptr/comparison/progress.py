"""The progress of a comparison: which runs it wants, which are finished, and the record of the finished ones.

A run is finished when its folder says so (`outcome.json`), when the comparison's record has it, or when another record
has a run with the same configuration and the same data, under whatever label.

A comparison that scores its models on tasks does so seed by seed, the tuning seeds first, so that one that is stopped
has whole seeds. Records hold no models, so a run that must be scored but is only in a record is trained again.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from rich.console import Console

from raptr.comparison.outcomes import OUTCOME, RUNS, Outcome, read_finished, read_note
from raptr.comparison.record import (
    Finished,
    Key,
    assembled,
    changes,
    check_machine,
    check_record,
    check_scores,
    load_record,
    read_finished_runs,
)
from raptr.comparison.search import wanted
from raptr.comparison.spec import Comparison, PlannedRun
from raptr.comparison.table import best_peak
from raptr.comparison.tasks import has_model, judge
from raptr.files import write_json, write_text
from raptr.train.diverged import Diverged
from raptr.train.exporting import export
from raptr.train.loop import pretrain
from raptr.train.run import RunFolder
from raptr.train.safety import StopRequest

NAME = "compare"  # of the files in a comparison's folder


@final
@dataclass(frozen=True)
class WantedRun:
    """A run that the comparison wants, and how to train it."""

    run: PlannedRun
    folder: Path
    place: str  # such as "3 of 8"
    data: str  # the data's fingerprint
    jobs: int
    keep_models: bool
    keep_export: bool = False

    @property
    def state(self) -> str:
        note = read_note(self.folder)
        if note is None:
            return "stopped"
        return "finished" if note["diverged"] is None else f"diverged in step {note['diverged']}"

    def train(self, stop: StopRequest, console: Console) -> None:
        """Train until the run ends or is asked to stop. A run that ends, even by diverging, is marked as finished."""
        diverged = None
        try:
            if pretrain(self.run.config, self.folder, console=console, stop=stop, advice=False).stopped:
                return
        except Diverged as error:
            diverged = error.step
            console.print(f"diverged in step {diverged}", highlight=False)
        outcome = {"diverged": diverged, "data": self.data, "jobs": self.jobs}
        if self.keep_export and diverged is None:
            try:
                export(self.folder)
            except ValueError as error:  # a model that no stock class can hold
                console.print(f"no export was kept: {error}", highlight=False, markup=False)
        write_text(self.folder / OUTCOME, json.dumps(outcome) + "\n")
        if not self.keep_models:
            shutil.rmtree(RunFolder(self.folder).checkpoints, ignore_errors=True)

    def refuse_other(self) -> None:
        """Refuse a folder that holds a run with other settings or other data."""
        folder = RunFolder(self.folder)
        if not folder.config.exists():
            return
        changed = changes(folder.read(), self.run.config)
        note = read_note(self.folder)
        if note is not None and note["data"] != self.data:
            changed.append(f"the data's fingerprint: was {note['data']}, now {self.data}")
        if changed:
            raise ValueError(
                f"the run in {str(self.folder)!r} was made with other settings ({'; '.join(changed)}); "
                "go on with the old ones, compare in another folder, or remove that run"
            )


@final
class Progress:
    """Which runs a comparison wants, and which of them are finished. Each finished run is read once.

    `data` describes the data, for the record. Without it nothing can be trained, and records of any data are accepted.
    """

    def __init__(
        self,
        comparison: Comparison,
        out: Path,
        data: Mapping[str, Any] | None,
        *,
        record: Path | None = None,
        others: Sequence[Path] = (),
        jobs: int = 1,
        keep_models: bool = False,
    ) -> None:
        self.comparison, self.out, self.jobs = comparison, out, jobs
        self.continued = record is not None
        self.record = record or out / f"{NAME}.json"
        self._data, self._keep = data, keep_models
        fingerprint = None if data is None else data["fingerprint"]
        self._fingerprint = "" if fingerprint is None else fingerprint
        self._finished: dict[Key, Finished] = {}
        self._here: set[Key] = set()  # the runs read from their own folders
        self._judged = 0  # how many of the comparison's rounds have been scored
        loaded = load_record(self.record) if self.continued else None
        if loaded is not None:
            check_record(self.record, loaded, comparison.entries, fingerprint)
            self._finished = {run.key: run for run in read_finished_runs(loaded)}
        self._evaluated: Mapping[str, Any] = loaded["comparison"].get("evaluate", {}) if loaded is not None else {}
        self._wanted = self._search()
        self._sources = others
        self._seen: dict[Key, int] = {}  # for each run, how many runs of other records were compared with it
        self._others = [
            run
            for path in others
            if (other := load_record(path)) is not None
            and (fingerprint is None or other.get("data", {}).get("fingerprint") == fingerprint)
            for run in read_finished_runs(other)
        ]

    def check(self) -> None:
        """Refuse folders and a record whose runs are not the wanted ones, before anything is trained."""
        for wanted_run in self.wanted_runs():
            wanted_run.refuse_other()
        if self.continued and self.unfinished():
            check_machine(self.record, self._finished.values(), self.comparison.entries)
        models = {wanted_run.run.key for wanted_run in self.wanted_runs() if has_model(wanted_run.folder)}
        if self.comparison.evaluate and any(
            run.outcome.scores and run.key not in models for run in self._finished.values()
        ):
            check_scores(self.record, self._evaluated, self.comparison.given["evaluate"])

    def learn(self, other: "Progress", run: PlannedRun) -> None:
        """Take note of a run that another comparison has just trained, if this one takes runs from its record."""
        if self._follows(other) and run.key in other._finished:
            self._others.append(other._finished[run.key])

    def takes(self, other: "Progress", made: PlannedRun, run: PlannedRun) -> bool:
        """Return whether `made`, which another comparison is training, will serve as `run` here."""
        return self._follows(other) and made.terms == run.terms and not changes(made.config, run.config)

    def _follows(self, other: "Progress") -> bool:
        """Return whether this comparison takes runs from the other's record."""
        return other is not self and other.record in self._sources and other._fingerprint == self._fingerprint

    def wanted_runs(self) -> list[WantedRun]:
        """Return every run that is wanted so far."""
        # Finished runs may make the comparison want more runs, of which some may be finished too.
        while self._read_new(self._wanted):
            self._wanted = self._search()
        runs = self._wanted
        return [
            WantedRun(
                run,
                self._folder(run),
                f"{number} of {len(runs)}",
                self._fingerprint,
                self.jobs,
                self._keep,
                bool(self.comparison.evaluate),
            )
            for number, run in enumerate(runs, start=1)
        ]

    def unfinished(self) -> list[WantedRun]:
        """Return the wanted runs that are not finished, or whose models must be trained again to be scored."""
        runs, again = self.wanted_runs(), self._to_retrain_for_scores()
        return [wanted for wanted in runs if wanted.run.key not in self._finished or wanted.run.key in again]

    def due(self) -> list[WantedRun]:
        """Return the unfinished runs that may start now.

        While models of an earlier round wait to be scored, no run of a later seed starts.
        """
        waiting = self.unfinished()
        if not self.unjudged:
            return waiting
        return [wanted for wanted in waiting if wanted.run.seed in self._begun]

    @property
    def unjudged(self) -> bool:
        """Whether models remain to be scored on tasks."""
        return bool(self.comparison.evaluate) and self._judged < len(self.comparison.rounds)

    @property
    def _begun(self) -> set[int]:
        """The seeds of the current round and of earlier ones."""
        return {seed for group in self.comparison.rounds[: self._judged + 1] for seed in group}

    def whole(self, seed: int) -> bool:
        """Return whether every run of this seed that is wanted so far is finished."""
        return not any(wanted.run.seed == seed for wanted in self.unfinished())

    @property
    def planned(self) -> int:
        """The number of runs there will be, as far as it is known yet."""
        known = len(self.wanted_runs())
        return max(known, self.comparison.count) if self.unfinished() else known

    @property
    def finished(self) -> int:
        return len(self.wanted_runs()) - len(self.unfinished())

    def write(self) -> dict[str, Any] | None:
        """Write the record of the finished runs and return it, or return None if no run is finished."""
        assert self._data is not None
        keys = [wanted.run.key for wanted in self.wanted_runs() if wanted.run.key in self._finished]
        keys += [key for key in self._finished if key not in keys]  # no longer wanted, but measured
        if not keys:
            return None
        runs = [self._finished[key] for key in keys]
        record = assembled(self.comparison, runs, finished=self.finished, planned=self.planned, data=self._data)
        self.record.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.record, record)
        return record

    def judge(self, stop: StopRequest, console: Console) -> None:
        """Score the models of this round on the tasks, each entry's at its best rate, once all runs are finished."""
        if not self.unjudged or stop.asked or self.due():
            return
        best, now, wanted = self._best(), self.comparison.rounds[self._judged], {}
        for wanted_run in (wanted_run for wanted_run in self.wanted_runs() if wanted_run.run.seed in self._begun):
            run, outcome = wanted_run.run, self._finished[wanted_run.run.key].outcome
            if outcome.loss is None or best[run.entry.label] != run.peak:
                continue
            if run.seed not in now and outcome.scores:  # of earlier rounds, only runs whose rate was not the best then
                continue
            if has_model(wanted_run.folder):
                wanted[wanted_run.folder] = run
            elif not outcome.scores:
                console.print(f"not judged by tasks, since its model was not kept: {run}", markup=False)

        def keep(folder: Path, scores: Mapping[str, Mapping[str, Any]]) -> None:
            run = wanted[folder]
            console.print(f"judged {run}", highlight=False, markup=False)
            finished = self._finished[run.key]
            self._finished[run.key] = replace(finished, outcome=replace(finished.outcome, scores=scores))
            if self.continued:
                self.write()

        asked, config = self.comparison.evaluate, self.comparison.entries[0].config
        if judge(asked, list(wanted), config, jobs=self.jobs, stop=stop, console=console, on_judged=keep):
            self._judged += 1

    def _to_retrain_for_scores(self) -> set[Key]:
        """Return the runs at best rates that only a record has, without scores: they must be trained again."""
        if not self.comparison.evaluate:
            return set()
        best, tune = self._best(), self.comparison.tune
        tuning = {run.entry.label for run in self._wanted if run.seed in tune and run.key not in self._finished}
        ready = [run for run in self._wanted if run.entry.label not in tuning and self._lacks_scores(run)]
        return {run.key for run in ready if best[run.entry.label] == run.peak}

    def _lacks_scores(self, run: PlannedRun) -> bool:
        """Return whether only a record has the run, trained to its end but without the scores that are wanted."""
        finished = self._finished.get(run.key)
        if finished is None or run.key in self._here or not self.comparison.evaluate:
            return False
        return finished.outcome.loss is not None and not finished.outcome.scores

    def _best(self) -> dict[str, float | None]:
        by_label: dict[str, dict[float, list[Outcome]]] = {}
        for run in self._finished.values():
            by_label.setdefault(run.outcome.label, {}).setdefault(run.outcome.peak, []).append(run.outcome)
        return {label: best_peak(by_peak) for label, by_peak in by_label.items()}

    def _search(self) -> list[PlannedRun]:
        return wanted(self.comparison, [run.outcome for run in self._finished.values()])

    def _read_new(self, runs: Sequence[PlannedRun]) -> bool:
        """Read the runs that have finished since the last call, and return whether there are any."""
        before = len(self._finished)
        for run in runs:
            if run.key not in self._finished or self._lacks_scores(run):
                finished = self._read(run)
                if finished is not None:
                    self._finished[run.key] = finished
        return len(self._finished) > before

    def _read(self, run: PlannedRun) -> Finished | None:
        """Return the run from its folder, or else from another record; None if neither has it."""
        in_folder = read_finished(self._folder(run), *run.key, run.entry.steps)
        if in_folder is not None:
            trained, outcome = in_folder
            self._here.add(run.key)
            return Finished(outcome, trained.config, trained.environment)
        unseen = self._others[self._seen.get(run.key, 0) :]
        self._seen[run.key] = len(self._others)
        return next((other.named(run.entry.label) for other in unseen if other.fits(run)), None)

    def _folder(self, run: PlannedRun) -> Path:
        return self.out / RUNS / run.name
