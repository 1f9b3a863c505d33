"""The settings of the objective: which one, and its mixture of denoisers where it has them."""

from collections.abc import Mapping
from dataclasses import dataclass

from raptr.data import Vocabulary
from raptr.objectives.contract import Objective
from raptr.objectives.registry import OBJECTIVES
from raptr.settings import check_choice


@dataclass(frozen=True)
class ObjectiveSettings:
    """What the model learns to predict."""

    name: str = ""  # the first that the family can learn
    mixture: Mapping[str, int] | None = None  # the samples of each denoiser in a cycle; None: the objective's own

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
        """The objective of this name, to be made for a vocabulary."""
        return OBJECTIVES[self.name]

    @property
    def cycle(self) -> int:
        """Samples after which the denoisers of a mixture repeat."""
        return sum(self.mixture.values()) if self.mixture else 1

    def make(self, vocabulary: Vocabulary) -> Objective:
        return self.kind(vocabulary, self.mixture) if self.mixture else self.kind(vocabulary)

    def targets(self, length: int) -> float:
        """The positions of a sequence at which the loss is taken; of a mixture, the mean over a cycle."""
        total = self.kind.targets(length, self.mixture)
        return total / self.cycle if total % self.cycle else total // self.cycle

    def check(self, length: int, batch: int, accumulate: int, *, isolate: bool, processes: int = 1) -> None:
        """Refuse impossible mixtures, micro-batches that break cycles, and a prefix objective on isolated documents."""
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
