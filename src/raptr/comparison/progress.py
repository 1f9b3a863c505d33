"""Where a comparison stands: which runs it wants, which are finished, and its record over these.

A run is finished when its folder says so (`outcome.json`), or the comparison's record has it, or another record does:
one with the same configuration and the same data, whatever its label there.

A comparison that judges its models by tasks does so seed by seed, the tuning seeds first: one that is stopped has whole
seeds. Records hold no models, so a run that is to be judged and is known from a record alone is made again.
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
    """A run of the comparison."""

    run: PlannedRun
    folder: Path
    place: str  # such as 3 of 8
    data: str  # the fingerprint
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
        """Bring the run to its end, or as far as it comes before a stop."""
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
        """Refuse a folder whose run is not the one wanted."""
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
    """Which runs a comparison wants, and which of them are finished; each finished one is read once.

    `data` is what the record says of the data. Without it nothing can be trained, and no record's data is compared.
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
        self._here: set[Key] = set()  # those read from their folders
        self._judged = 0  # how many of the comparison's rounds are judged
        found = load_record(self.record) if self.continued else None
        if found is not None:
            check_record(self.record, found, comparison.entries, fingerprint)
            self._finished = {run.key: run for run in read_finished_runs(found)}
        self._evaluated: Mapping[str, Any] = found["comparison"].get("evaluate", {}) if found is not None else {}
        self._wanted = self._search()
        self._sources = others
        self._seen: dict[Key, int] = {}  # how many of the others' runs were compared with a run
        self._others = [
            run
            for path in others
            if (other := load_record(path)) is not None
            and (fingerprint is None or other.get("data", {}).get("fingerprint") == fingerprint)
            for run in read_finished_runs(other)
        ]

    def check(self) -> None:
        """Refuse, before anything is trained, to go on with runs that are not those wanted."""
        for one in self.wanted_runs():
            one.refuse_other()
        if self.continued and self.unfinished():
            check_machine(self.record, self._finished.values(), self.comparison.entries)
        models = {one.run.key for one in self.wanted_runs() if has_model(one.folder)}
        if self.comparison.evaluate and any(
            run.outcome.scores and run.key not in models for run in self._finished.values()
        ):
            check_scores(self.record, self._evaluated, self.comparison.given["evaluate"])

    def learn(self, other: "Progress", run: PlannedRun) -> None:
        """Take note of a run that another comparison has just made, if its record is one to take runs from."""
        if self._follows(other) and run.key in other._finished:
            self._others.append(other._finished[run.key])

    def takes(self, other: "Progress", made: PlannedRun, run: PlannedRun) -> bool:
        """Whether `made`, which another comparison is making, will stand for `run` here."""
        return self._follows(other) and made.terms == run.terms and not changes(made.config, run.config)

    def _follows(self, other: "Progress") -> bool:
        """Whether another comparison's record is one to take runs from."""
        return other is not self and other.record in self._sources and other._fingerprint == self._fingerprint

    def wanted_runs(self) -> list[WantedRun]:
        """Every run that is wanted by now."""
        # What is finished may make the comparison want more, some of it finished too.
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
        """The runs that are wanted and not finished, or finished elsewhere without a model that is wanted here."""
        runs, again = self.wanted_runs(), self._to_retrain_for_scores()
        return [one for one in runs if one.run.key not in self._finished or one.run.key in again]

    def due(self) -> list[WantedRun]:
        """The unfinished runs that may start now.

        While models of an earlier round wait to be judged, no later seed begins.
        """
        waiting = self.unfinished()
        if not self.unjudged:
            return waiting
        return [one for one in waiting if one.run.seed in self._begun]

    @property
    def unjudged(self) -> bool:
        """Whether models are still to be judged by tasks."""
        return bool(self.comparison.evaluate) and self._judged < len(self.comparison.rounds)

    @property
    def _begun(self) -> set[int]:
        """The seeds of this round and of earlier ones."""
        return {seed for group in self.comparison.rounds[: self._judged + 1] for seed in group}

    def whole(self, seed: int) -> bool:
        """Whether every run of this seed is finished that is wanted by now."""
        return not any(one.run.seed == seed for one in self.unfinished())

    @property
    def planned(self) -> int:
        """How many runs there will be, as far as that is known by now."""
        known = len(self.wanted_runs())
        return max(known, self.comparison.count) if self.unfinished() else known

    @property
    def finished(self) -> int:
        return len(self.wanted_runs()) - len(self.unfinished())

    def write(self) -> dict[str, Any] | None:
        """Write the record over the finished runs, and return it; None where no run is finished."""
        assert self._data is not None
        keys = [one.run.key for one in self.wanted_runs() if one.run.key in self._finished]
        keys += [key for key in self._finished if key not in keys]  # asked for once: what was measured is kept
        if not keys:
            return None
        runs = [self._finished[key] for key in keys]
        made = assembled(self.comparison, runs, finished=self.finished, planned=self.planned, data=self._data)
        self.record.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.record, made)
        return made

    def judge(self, stop: StopRequest, console: Console) -> None:
        """Judge every entry's runs of the round at its best learning rate by the tasks, once all are finished."""
        if not self.unjudged or stop.asked or self.due():
            return
        best, now, wanted = self._best(), self.comparison.rounds[self._judged], {}
        for one in (one for one in self.wanted_runs() if one.run.seed in self._begun):
            run, outcome = one.run, self._finished[one.run.key].outcome
            if outcome.loss is None or best[run.entry.label] != run.peak:
                continue
            if run.seed not in now and outcome.scores:  # of earlier seeds those where another rate was the best
                continue
            if has_model(one.folder):
                wanted[one.folder] = run
            elif not outcome.scores:
                console.print(f"not judged by tasks, since its model was not kept: {run}", markup=False)

        def keep(folder: Path, scores: Mapping[str, Mapping[str, Any]]) -> None:
            run = wanted[folder]
            console.print(f"judged {run}", highlight=False, markup=False)
            found = self._finished[run.key]
            self._finished[run.key] = replace(found, outcome=replace(found.outcome, scores=scores))
            if self.continued:
                self.write()

        asked, config = self.comparison.evaluate, self.comparison.entries[0].config
        if judge(asked, list(wanted), config, jobs=self.jobs, stop=stop, console=console, on_judged=keep):
            self._judged += 1

    def _to_retrain_for_scores(self) -> set[Key]:
        """The runs whose models are to be judged, but are known from records alone: without scores, and not here."""
        if not self.comparison.evaluate:
            return set()
        best, tune = self._best(), self.comparison.tune
        tuning = {run.entry.label for run in self._wanted if run.seed in tune and run.key not in self._finished}
        ready = [run for run in self._wanted if run.entry.label not in tuning and self._lacks_scores(run)]
        return {run.key for run in ready if best[run.entry.label] == run.peak}

    def _lacks_scores(self, run: PlannedRun) -> bool:
        """Whether a record has the run, which was to be judged and was not."""
        found = self._finished.get(run.key)
        if found is None or run.key in self._here or not self.comparison.evaluate:
            return False
        return found.outcome.loss is not None and not found.outcome.scores

    def _best(self) -> dict[str, float | None]:
        by_label: dict[str, dict[float, list[Outcome]]] = {}
        for run in self._finished.values():
            by_label.setdefault(run.outcome.label, {}).setdefault(run.outcome.peak, []).append(run.outcome)
        return {label: best_peak(by_peak) for label, by_peak in by_label.items()}

    def _search(self) -> list[PlannedRun]:
        return wanted(self.comparison, [run.outcome for run in self._finished.values()])

    def _read_new(self, runs: Sequence[PlannedRun]) -> bool:
        """Read the runs that were finished since the last look; whether there were any."""
        before = len(self._finished)
        for run in runs:
            if run.key not in self._finished or self._lacks_scores(run):
                found = self._read(run)
                if found is not None:
                    self._finished[run.key] = found
        return len(self._finished) > before

    def _read(self, run: PlannedRun) -> Finished | None:
        """The run from its folder, or from another record."""
        read = read_finished(self._folder(run), *run.key, run.entry.steps)
        if read is not None:
            made, outcome = read
            self._here.add(run.key)
            return Finished(outcome, made.config, made.environment)
        unseen = self._others[self._seen.get(run.key, 0) :]
        self._seen[run.key] = len(self._others)
        return next((other.named(run.entry.label) for other in unseen if other.fits(run)), None)

    def _folder(self, run: PlannedRun) -> Path:
        return self.out / RUNS / run.name
