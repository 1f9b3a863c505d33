"""The settings of the objective: its name, and its mixture of denoisers if it has one."""

from collections.abc import Mapping
from dataclasses import dataclass

from raptr.data import Vocabulary
from raptr.objectives.contract import Objective
from raptr.objectives.registry import OBJECTIVES
from raptr.settings import check_choice


@dataclass(frozen=True)
class ObjectiveSettings:
    """What the model learns to predict."""

    name: str = ""  # empty: the first objective of the family
    mixture: Mapping[str, int] | None = None  # samples of each denoiser in a cycle; None: the objective's default

    def __post_init__(self) -> None:
        if not self.name:
            return
        check_choice("objective.name", self.name, OBJECTIVES)
        if self.mixture is None and self.kind.standard:
            object.__setattr__(self, "mixture", dict(self.kind.standard))
        if self.mixture is not None and not self.kind.standard:
            mixed = ", ".join(name for name, kind in OBJECTIVES.items() if kind.standard)
            raise ValueError(f"objective.mixture is given, but objective.name {self.name} has none. Use {mixed}.")

    @property
    def kind(self) -> type[Objective]:
        """The class of the objective."""
        return OBJECTIVES[self.name]

    @property
    def cycle(self) -> int:
        """The number of samples after which the denoisers of a mixture repeat; 1 without a mixture."""
        return sum(self.mixture.values()) if self.mixture else 1

    def make(self, vocabulary: Vocabulary) -> Objective:
        return self.kind(vocabulary, self.mixture) if self.mixture else self.kind(vocabulary)

    def targets(self, length: int) -> float:
        """Return at how many positions of a sequence the loss is taken; for a mixture, the mean over a cycle."""
        total = self.kind.targets(length, self.mixture)
        return total / self.cycle if total % self.cycle else total // self.cycle

    def check(self, length: int, batch: int, accumulate: int, *, isolate: bool, processes: int = 1) -> None:
        """Refuse impossible mixtures, micro-batches that cut cycles, and a prefix objective on isolated documents."""
        if self.mixture is not None:
            self.kind.targets(length, self.mixture)
        if (share := batch // accumulate // processes) % self.cycle:
            among = f" on {processes} processes" if processes > 1 else ""
            raise ValueError(
                f"train.batch is {batch} and train.accumulate {accumulate}{among}, so a micro-batch has {share} "
                f"samples, but objective.mixture has a cycle of {self.cycle}: use a multiple of it per micro-batch."
            )
        if isolate and self.kind.attention == "prefix":
            raise ValueError(
                f"data.isolate_documents is true, but objective.name {self.name} keeps no documents apart. Use false."
            )
