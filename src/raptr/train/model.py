"""The settings of the model: a family, a size of it, and the dimensions that replace the size's."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from raptr.models.contract import Family, ModelConfig
from raptr.models.registry import FAMILIES
from raptr.settings import check_choice, nearest, read, values
from raptr.train.starting import with_start

FAMILY = next(iter(FAMILIES))  # unless given
FROM_DATA = ("vocabulary", "positions")  # dimensions of a model that are no settings
MOST_LAYERS, MOST_WIDE = 10_000, 2**20  # more is a slip, and would fill the memory
FREE = {"free": True}  # a resume may change it: the run computes the same up to rounding


@dataclass(frozen=True)
class ModelSettings:
    """A family and a named size of it, any dimension of which may be replaced; `given` are those replaced."""

    family: str = FAMILY
    size: str = ""  # the family's first
    start: str | None = field(default=None, metadata=FREE)  # a folder of transformers instead of random weights
    start_sha256: str | None = None  # of its weights; decided when the settings are read
    given: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("model.family", self.family, FAMILIES)
        sizes = self.kind.sizes
        if not self.size:
            object.__setattr__(self, "size", next(iter(sizes)))
        check_choice("model.size", self.size, sizes)
        if self.start is None and self.start_sha256 is not None:
            raise ValueError(f"model.start_sha256 is {self.start_sha256!r} without model.start. Give both or neither.")
        for name, value in self.given.items():
            most = MOST_LAYERS if name == "layers" else MOST_WIDE
            if type(value) is int and not 1 <= value <= most:
                raise ValueError(f"model.{name} is {value}; a whole number from 1 to {most} is allowed")

    @classmethod
    def read(cls, settings: object) -> "ModelSettings":
        """Read the section `model`, whose keys are family, size and the family's own settings."""
        if not isinstance(settings, Mapping):
            raise ValueError(f"model is {settings!r}; a mapping is allowed")
        settings, names = with_start(settings), ("family", "size", "start", "start_sha256")
        made = read(cls, {key: settings[key] for key in names if key in settings}, "model.")
        if settings.get("size") == "":  # nothing is the default, but no name
            check_choice("model.size", "", made.kind.sizes)
        known = [entry.name for entry in fields(made.kind.config) if entry.name not in FROM_DATA]
        for key in settings:
            if key not in (*names, *known):
                allowed = ", ".join((*names, *known))
                raise ValueError(f"Unknown setting model.{key}; {nearest(key, known)}allowed: {allowed}")
        given = {key: settings[key] for key in known if settings.get(key) is not None}
        return replace(made, given=values(made.kind.config, given, "model."))

    @property
    def kind(self) -> Family:
        return FAMILIES[self.family]

    def build(self, vocabulary: int, positions: int) -> ModelConfig:
        return replace(self.kind.sizes[self.size], **self.given, vocabulary=vocabulary, positions=positions)

    def mapping(self, dimensions: ModelConfig) -> dict[str, Any]:
        """All settings, with the dimensions as they were decided."""
        sizes = {key: value for key, value in asdict(dimensions).items() if key not in FROM_DATA}
        start = {"start": self.start, "start_sha256": self.start_sha256} if self.start is not None else {}
        return {"family": self.family, "size": self.size, **start, **sizes}
